"""The moving average of the trained weights, a set of `NamedWeights` that is measured and exported in their place."""

from __future__ import annotations

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.train.named_weights import NamedWeights

NAME = "ema"


class MovingAverage:
    """Moves the average after each step; a pure function of the weights after each step."""

    def __init__(self, named: NamedWeights, train: TrainConfig) -> None:
        self._named = named
        self._decay = train.ema_decay
        self._interval = max(1, train.ema_update_step_interval)
        named.add(NAME)

    def update(self, step: int) -> None:
        """Take in the weights after train step `step`, counted from 0, if it is the turn of that step."""
        if (step + 1) % self._interval == 0:
            self._named.lerp(NAME, 1 - min((1 + step) / (10 + step), self._decay))
