"""Selection of the best step by validation metrics; `best.json` names it, and `max_keep` never deletes its
checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best.json"
_SIGN = {"validation/reward": 1, "validation/loss": -1}  # by priority; 1: higher is better


@dataclass(frozen=True, slots=True)
class Best:
    """Best step so far, with its validation metric."""

    step: int
    metric: str
    value: float


def best_of(best: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
    """Return `step` as the new best if its metrics are better than `best`, otherwise `best`; on a tie the earlier step
    wins, and NaN or infinity never does.

    If there are a reward and a loss, as for a diffusion model that is validated by both, the reward alone decides:
    values of different metrics are never compared.
    """
    for metric, sign in _SIGN.items():
        value, is_same = metrics.get(metric, math.nan), best is not None and best.metric == metric
        if math.isfinite(value) and (best is None or not is_same or sign * value > sign * best.value):
            return Best(step, metric, value)
        if is_same or math.isfinite(value):
            return best
    return best
