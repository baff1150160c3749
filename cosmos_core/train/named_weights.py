"""Named sets of weights besides the policy's: the moving average, the reference policy, a lagged policy.

A set holds the trained parameters (an adapter or all), each sharded like the policy's parameter; frozen parameters are
shared by all sets. A set that follows the policy is always in float32, because updates with a decay of 0.9999 would be
lost to rounding in bfloat16. `use_weights` swaps a set with the policy's, so one model can compute with any set.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cosmos_core.checkpoint.state import POLICY_COPY_NAMES
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.parallel.fsdp import local_shard

EMA_WEIGHTS = "ema"
"""Name of the moving average of the policy's weights, which is validated and exported in place of these weights."""


class NamedWeights:
    """Named sets of weights of one model, whose `tensors` are part of a checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """Tensors of each set of weights, by set name and parameter name."""

    def add(self, name: str) -> None:
        """Add a copy of the policy's weights as the set `name`, in float32 if the set follows the policy."""
        dtype = torch.float32 if name in POLICY_COPY_NAMES else None
        self.tensors[name] = {n: weight.to(dtype or weight.dtype, copy=True) for n, weight in self.policy.items()}

    def reset(self, name: str) -> None:
        """Overwrite the set `name` with the policy's current weights."""
        for parameter_name, weight in self.policy.items():
            self.tensors[name][parameter_name].copy_(weight)

    def equals_policy(self, name: str) -> bool:
        """Return whether the set `name` equals the policy bit by bit; for sharded weights, on this rank's shards."""
        weight_pairs = ((local_shard(weight), local_shard(self.tensors[name][n])) for n, weight in self.policy.items())
        return all(torch.equal(weight.to(named_weight.dtype), named_weight) for weight, named_weight in weight_pairs)

    @torch.no_grad()
    def lerp(self, name: str, fraction: float) -> None:
        """Move the weights of the set `name` towards the policy: set + fraction * (policy - set)."""
        for parameter_name, weight in self.policy.items():
            named_tensor = self.tensors[name][parameter_name]
            named_tensor.lerp_(weight.to(named_tensor.dtype), fraction)

    @property
    def policy(self) -> dict[str, Tensor]:
        """Return the policy's current weights; FSDP may move the parameters in its first forward pass."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @contextmanager
    def use_weights(self, name: str) -> Iterator[None]:
        """Return a context manager in which the model computes with the set `name`. Tensors in the policy's dtype are
        swapped one by one. For other dtypes, the policy's weights are saved and restored, because a cast loses bits."""
        if name == "policy":
            yield
            return
        saved_policy_weights: dict[str, Tensor] = {}
        for parameter_name, weight in self.policy.items():
            named_tensor = self.tensors[name][parameter_name]
            if named_tensor.dtype == weight.dtype:
                _swap_tensors(weight, named_tensor)
            else:
                saved_policy_weights[parameter_name] = weight.clone()
                weight.copy_(named_tensor)
        try:
            yield
        finally:
            for parameter_name, weight in self.policy.items():
                if parameter_name in saved_policy_weights:
                    weight.copy_(saved_policy_weights[parameter_name])
                else:
                    _swap_tensors(weight, self.tensors[name][parameter_name])

    def copy_to_policy(self, name: str) -> None:
        """Overwrite the policy's weights with the set `name`."""
        for parameter_name, weight in self.policy.items():
            weight.copy_(self.tensors[name][parameter_name])


class MovingAverage:
    """Moving average that is updated after optimizer steps, with the decay schedule of DiffusionNFT and Flow-GRPO."""

    def __init__(self, named_weights: NamedWeights, train: TrainConfig) -> None:
        self._named_weights, self._decay = named_weights, train.ema_decay
        self._interval = max(1, train.ema_update_step_interval)
        named_weights.add(EMA_WEIGHTS)

    def update(self, num_updates: int) -> None:
        """Move the average towards the weights after optimizer step `num_updates`, at the update interval."""
        if (num_updates + 1) % self._interval == 0:
            self._named_weights.lerp(EMA_WEIGHTS, 1 - min((1 + num_updates) / (10 + num_updates), self._decay))


def _swap_tensors(tensor: Tensor, other_tensor: Tensor) -> None:
    tensor_copy = tensor.clone()
    tensor.copy_(other_tensor)
    other_tensor.copy_(tensor_copy)
