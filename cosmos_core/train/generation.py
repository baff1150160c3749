"""What a stage generates with: the rollout engine, the publisher of its weights, the rewards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cosmos_core.data.sample import Sample
from cosmos_core.rewards.runner import ScoreGroups
from cosmos_core.rollout.base import Engine, EngineSettings
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.registry import make_engine
from cosmos_core.run.stage import Stage
from cosmos_core.train.measure import open_rewards
from cosmos_core.train.trainer import Trainer

logger = logging.getLogger(__name__)


class Generation:
    """Engine and rewards of a stage, each opened when it is first asked for and closed with the stack."""

    def __init__(self, stage: Stage, trainer: Trainer, stack: ExitStack) -> None:
        self._stage, self._trainer, self._stack = stage, trainer, stack
        self._scores: dict[tuple[tuple[str, float], ...], ScoreGroups] = {}

    @cached_property
    def engine(self) -> Engine:
        """Return the rollout engine, with the weights of the stage's model."""
        stage, adapter = self._stage, self._trainer.adapter
        stage.progress.phase("load")
        engine = make_engine(
            EngineSettings(
                adapter.model,
                adapter.tokenizer,
                stage.model,
                stage.recipe.rollout,
                max_model_len=stage.recipe.policy.model_max_length,
                dtype=getattr(torch, stage.recipe.train.param_dtype),
                custom=stage.recipe.custom,
                vision=adapter.vision,
            )
        )
        self._stack.callback(engine.close)
        logger.info("rollout engine: %s", engine.name)
        return engine

    @cached_property
    def _publisher(self) -> WeightPublisher:
        adapter = self._trainer.adapter
        return WeightPublisher(
            self.engine,
            adapter.model,
            self._probe_logprobs,
            getattr(torch, self._stage.recipe.train.param_dtype),
            whole=adapter.whole,
            probe_interval=self._stage.recipe.rollout.probe_interval,
        )

    def publish(self, version: int) -> dict[str, float]:
        """Send the present weights to the engine as `version`; return metrics."""
        return self._publisher.publish(version)

    def score(self, weights: dict[str, float]) -> ScoreGroups:
        """Return what scores groups by these rewards."""
        key = tuple(weights.items())
        if key not in self._scores:
            self._scores[key] = self._stack.enter_context(open_rewards(self._stage, weights))
        return self._scores[key]

    def _probe_logprobs(self, token_ids: Sequence[int]) -> Tensor:
        ids = np.array(token_ids, dtype=np.int64)
        [row] = self._trainer.evaluate([Sample(ids, np.ones(len(ids), dtype=np.uint8))])
        return row["logprobs"]
