"""Selection of the best step by validation metrics; `best.json` names it, and its checkpoint is kept even beyond the
limit `max_keep` of checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST_STEP_FILE = "best.json"
_METRIC_DIRECTIONS = {"validation/reward": 1, "validation/loss": -1}
"""1 if higher values of a metric are better, else -1, by name of the metric; the first metric has priority."""


@dataclass(frozen=True, slots=True)
class BestStep:
    """Best training step so far, with the validation metric that selected it."""

    step: int
    metric: str
    value: float


def select_best(best: BestStep | None, step: int, metrics: Mapping[str, float]) -> BestStep | None:
    """Return `step` as the new best if its metrics are better than those of `best`, otherwise `best`. On a tie the
    earlier step wins; NaN and infinity never win. If `metrics` has a reward and a loss, the reward alone decides;
    values of different metrics are never compared."""
    for metric, direction in _METRIC_DIRECTIONS.items():
        value, is_same_metric = metrics.get(metric, math.nan), best is not None and best.metric == metric
        if math.isfinite(value) and (best is None or not is_same_metric or direction * value > direction * best.value):
            return BestStep(step, metric, value)
        if is_same_metric or math.isfinite(value):
            return best
    return best
