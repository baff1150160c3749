"""Selection of the best train step by validation metrics. The file `best.json` names that step, and its checkpoint is
kept even beyond the limit `max_keep` of checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST_STEP_FILE = "best.json"
_METRIC_DIRECTIONS = {"validation/reward": 1, "validation/loss": -1}
"""Validation metrics that select the best step, by name: 1 if higher values are better, -1 if lower values are. If
several are present, only the first of them counts."""


@dataclass(frozen=True, slots=True)
class BestStep:
    """Best training step so far, with the validation metric that selected it."""

    step: int
    metric: str
    value: float


def select_best_step(best_step: BestStep | None, step: int, metrics: Mapping[str, float]) -> BestStep | None:
    """Return `step` as the new best step if its metrics are better than those of `best_step`, otherwise `best_step`. On
    a tie the earlier step wins; NaN and infinity never win. If `metrics` has a reward and a loss, the reward alone
    decides; values of different metrics are never compared."""
    for metric, sign in _METRIC_DIRECTIONS.items():
        value, is_same_metric = metrics.get(metric, math.nan), best_step is not None and best_step.metric == metric
        if math.isfinite(value) and (best_step is None or not is_same_metric or sign * value > sign * best_step.value):
            return BestStep(step, metric, value)
        if is_same_metric or math.isfinite(value):
            return best_step
    return best_step
