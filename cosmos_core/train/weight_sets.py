"""Weight sets, copies of the trained weights: the moving average, the reference policy, a lagged (old) policy.

A weight set has a name and holds the trained parameters (a LoRA adapter or all parameters), each sharded like the
parameter of the policy. Frozen parameters exist once. A set that follows the policy is in float32, because bfloat16
rounds updates with a decay of 0.9999 to 0. `use_weights` exchanges the policy's weights with those of a set, so that
one model can compute with any set.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cosmos_core.checkpoint.state import POLICY_COPY_WEIGHT_SETS
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.parallel.fsdp import local_shard

logger = logging.getLogger(__name__)

EMA_WEIGHTS = "ema"
"""Name of the copy of the weights that holds the moving average of the policy's weights, which is validated and
exported."""


class WeightSets:
    """Named copies of the trained weights of one model (weight sets), such as its moving average and its reference
    policy. Checkpoints contain their `tensors`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """Tensors by the name of the copy of the weights, such as `ema`, and the name of the parameter."""

    def add(self, name: str) -> None:
        """Add a copy of the policy's weights under the name `name`, in float32 if the training changes the copy."""
        stored_dtype = torch.float32 if name in POLICY_COPY_WEIGHT_SETS else None
        self.tensors[name] = {n: w.to(stored_dtype or w.dtype, copy=True) for n, w in self.policy_weights.items()}

    def copy_from_policy(self, name: str) -> None:
        """Overwrite the copy of the weights named `name` with the policy's current weights."""
        for parameter_name, weight in self.policy_weights.items():
            self.tensors[name][parameter_name].copy_(weight)

    def equals_policy(self, name: str) -> bool:
        """Return whether the copy of the weights named `name` equals the policy's weights bit by bit; for sharded
        weights, on this rank's shards."""
        weight_pairs = ((local_shard(w), local_shard(self.tensors[name][n])) for n, w in self.policy_weights.items())
        return all(torch.equal(weight.to(stored_tensor.dtype), stored_tensor) for weight, stored_tensor in weight_pairs)

    @torch.no_grad()
    def move_towards_policy(self, name: str, fraction: float) -> None:
        """Move W, the copy of the weights named `name`, towards the policy's weights: W + fraction * (policy - W)."""
        for parameter_name, weight in self.policy_weights.items():
            stored_tensor = self.tensors[name][parameter_name]
            stored_tensor.lerp_(weight.to(stored_tensor.dtype), fraction)

    @property
    def policy_weights(self) -> dict[str, Tensor]:
        """Return the policy's current weights by parameter name. They are read at each call, because FSDP can move the
        parameters in its first forward pass."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @contextmanager
    def use_weights(self, name: str) -> Iterator[None]:
        """Return a context manager in which the model computes with the copy of the weights named `name`. Tensors in
        the policy's dtype are swapped one by one. For other dtypes, the policy's weights are saved and restored,
        because a cast loses bits."""
        if name == "policy":
            yield
            return
        saved_policy_weights: dict[str, Tensor] = {}
        for parameter_name, weight in self.policy_weights.items():
            stored_tensor = self.tensors[name][parameter_name]
            if stored_tensor.dtype == weight.dtype:
                _swap_tensors(weight, stored_tensor)
            else:
                saved_policy_weights[parameter_name] = weight.clone()
                weight.copy_(stored_tensor)
        try:
            yield
        finally:
            for parameter_name, weight in self.policy_weights.items():
                if parameter_name in saved_policy_weights:
                    weight.copy_(saved_policy_weights[parameter_name])
                else:
                    _swap_tensors(weight, self.tensors[name][parameter_name])

    def copy_to_policy(self, name: str) -> None:
        """Overwrite the policy's weights with the copy named `name`."""
        for parameter_name, weight in self.policy_weights.items():
            weight.copy_(self.tensors[name][parameter_name])


class MovingAverage:
    """Moving average of the trained weights, updated after optimizer steps with the decay schedule of DiffusionNFT and
    Flow-GRPO."""

    def __init__(self, weight_sets: WeightSets, train_config: TrainConfig) -> None:
        self._weight_sets, self._decay = weight_sets, train_config.ema_decay
        self._update_interval = max(1, train_config.ema_update_step_interval)
        weight_sets.add(EMA_WEIGHTS)

    def update(self, num_updates: int) -> None:
        """Move the average towards the policy's weights, if `num_updates + 1` is divisible by the update interval;
        `num_updates` is the number of optimizer steps taken."""
        if (num_updates + 1) % self._update_interval == 0:
            decay = min((1 + num_updates) / (10 + num_updates), self._decay)
            self._weight_sets.move_towards_policy(EMA_WEIGHTS, 1 - decay)

    def copy_to_policy(self, num_updates: int) -> None:
        """Overwrite the policy's weights with the average after `num_updates` optimizer steps. Log a warning if the
        training was too short to update the average, which then has the weights from which it began."""
        if num_updates + 1 < self._update_interval:
            logger.warning(
                "train.ema_update_step_interval = %d: %d optimizer steps never updated the moving average, so the "
                "exported weights are those before the training; lower it, or set train.ema_enable = false",
                self._update_interval, num_updates,
            )  # fmt: skip
        self._weight_sets.copy_to_policy(EMA_WEIGHTS)


def _swap_tensors(first_tensor: Tensor, second_tensor: Tensor) -> None:
    first_copy = first_tensor.clone()
    first_tensor.copy_(second_tensor)
    second_tensor.copy_(first_copy)
