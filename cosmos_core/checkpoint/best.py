"""The best step by validation: its checkpoint is kept whatever `max_keep` says, and `best.json` names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best.json"
_SIGN = {"validation/reward": 1, "validation/loss": -1}  # what decides, in this order, and whether more is better


@dataclass(frozen=True, slots=True)
class Best:
    """A step and the validation metric by which no other was better."""

    step: int
    metric: str
    value: float


def best_of(best: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
    """Return `best`, or `step` when its metrics are better; of equal ones the earlier, and never NaN or infinity.

    Where there are a reward and a loss, as of a diffusion model that is validated by both, the reward alone decides:
    the numbers of two metrics are never compared.
    """
    for metric, sign in _SIGN.items():
        value, is_same = metrics.get(metric, math.nan), best is not None and best.metric == metric
        if math.isfinite(value) and (best is None or not is_same or sign * value > sign * best.value):
            return Best(step, metric, value)
        if is_same or math.isfinite(value):
            return best
    return best
