"""Selection of the best step by validation metrics; `best.json` names it, and its checkpoint is kept even beyond the
limit `max_keep` of checkpoints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best.json"
_METRIC_SIGNS = {"validation/reward": 1, "validation/loss": -1}  # by priority; 1: higher is better, -1: lower is better


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
    for metric, metric_direction in _METRIC_SIGNS.items():
        value, is_same_metric = metrics.get(metric, math.nan), best is not None and best.metric == metric
        if math.isfinite(value) and (
            best is None or not is_same_metric or metric_direction * value > metric_direction * best.value
        ):
            return BestStep(step, metric, value)
        if is_same_metric or math.isfinite(value):
            return best
    return best
