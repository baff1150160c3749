"""Weights beside the policy's, by name: the moving average that is exported, the reference policy, a lagged policy.

A set holds what is trained, an adapter or all parameters, each tensor sharded like the policy's own; what is frozen is
the same in all sets. A set that follows the policy is in float32 whatever the weights are: with a decay of 0.9999 one
in bfloat16 would not move. `use` exchanges a set with the policy's weights in place, so one model computes under any of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cosmos_core.checkpoint.state import FOLLOWING
from cosmos_core.parallel.fsdp import local


class NamedWeights:
    """The sets of one model; a checkpoint holds `tensors`."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors: dict[str, dict[str, Tensor]] = {}
        """Of each set, by the name of their parameter."""

    def add(self, name: str) -> None:
        """Begin a set with a copy of the policy's weights: one that follows them in float32, others in their dtype."""
        dtype = torch.float32 if name in FOLLOWING else None
        self.tensors[name] = {n: weight.to(dtype or weight.dtype, copy=True) for n, weight in self.policy.items()}

    def reset(self, name: str) -> None:
        """Make a set what the policy is now."""
        for n, weight in self.policy.items():
            self.tensors[name][n].copy_(weight)

    def equals_policy(self, name: str) -> bool:
        """Return whether a set is what the policy is now, to the bit; of sharded weights this rank's shards are."""
        return all(_is_same(weight, self.tensors[name][n]) for n, weight in self.policy.items())

    @torch.no_grad()
    def lerp(self, name: str, weight: float) -> None:
        """Move a set towards the policy: set + weight * (policy - set)."""
        for n, tensor in self.policy.items():
            average = self.tensors[name][n]
            average.lerp_(tensor.to(average.dtype), weight)

    @property
    def policy(self) -> dict[str, Tensor]:
        """Return the policy's weights as they are now: FSDP moves those that were read in parts at its first pass."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Let the model compute with a set inside the block.

        Tensors of the policy's dtype are swapped one by one; others are copied, because a cast loses bits.
        """
        if name == "policy":
            yield
            return
        kept: dict[str, Tensor] = {}
        for n, weight in self.policy.items():
            other = self.tensors[name][n]
            if other.dtype == weight.dtype:
                _exchange(weight, other)
            else:
                kept[n] = weight.clone()
                weight.copy_(other)
        try:
            yield
        finally:
            for n, weight in self.policy.items():
                if n in kept:
                    weight.copy_(kept[n])
                else:
                    _exchange(weight, self.tensors[name][n])

    def copy_to_policy(self, name: str) -> None:
        """Overwrite the policy's weights with a set."""
        for n, weight in self.policy.items():
            weight.copy_(self.tensors[name][n])


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _is_same(one: Tensor, other: Tensor) -> bool:
    one, other = local(one), local(other)
    return torch.equal(one.to(other.dtype), other)
