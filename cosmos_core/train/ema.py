"""Exponential moving average of the trained weights, which is validated and exported in place of these weights."""

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.train.named_weights import NamedWeights

EMA_WEIGHTS = "ema"


class MovingAverage:
    """Moving average that is updated after optimizer steps, with the decay schedule of DiffusionNFT and Flow-GRPO."""

    def __init__(self, named_weights: NamedWeights, train: TrainConfig) -> None:
        self._named_weights = named_weights
        self._decay = train.ema_decay
        self._interval = max(1, train.ema_update_step_interval)
        named_weights.add(EMA_WEIGHTS)

    def update(self, num_updates: int) -> None:
        """Move the average towards the current weights, those after optimizer step `num_updates`, if the update
        interval divides `num_updates + 1`."""
        if (num_updates + 1) % self._interval == 0:
            self._named_weights.lerp(EMA_WEIGHTS, 1 - min((1 + num_updates) / (10 + num_updates), self._decay))
