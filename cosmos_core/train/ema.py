"""A moving average of the trained weights, which is measured and exported in their place.

In float32 whatever the weights are: with a decay of 0.9999 an average in bfloat16 would not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from cosmos_core.config.schema.train import TrainConfig


class MovingAverage:
    """The average of each weight that is trained; a pure function of the weights after each step."""

    def __init__(self, model: torch.nn.Module, train: TrainConfig) -> None:
        self._decay = train.ema_decay
        self._interval = max(1, train.ema_update_step_interval)
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.tensors = {name: weight.to(torch.float32, copy=True) for name, weight in self._weights.items()}
        """By the name of the parameter; part of a checkpoint."""

    def update(self, step: int) -> None:
        """Take in the weights after train step `step`, counted from 0, if it is the turn of that step."""
        if (step + 1) % self._interval:
            return
        decay = min((1 + step) / (10 + step), self._decay)
        for name, weight in self._weights.items():
            average = self.tensors[name]
            average.lerp_(weight.to(average.dtype), 1 - decay)

    @property
    def _weights(self) -> dict[str, Tensor]:
        """As they are now: at its first forward pass FSDP moves those that it has read in parts."""
        return {name: parameter.detach() for name, parameter in self._trained.items()}

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """The model has the averages inside the block, and its own weights after it."""
        own = {name: weight.clone() for name, weight in self._weights.items()}
        self.copy_to_model()
        try:
            yield
        finally:
            for name, weight in self._weights.items():
                weight.copy_(own[name])

    def copy_to_model(self) -> None:
        """Overwrite the weights with the averages."""
        for name, weight in self._weights.items():
            weight.copy_(self.tensors[name])
