"""The best step by validation: its checkpoint is kept whatever `max_keep` says, and `best.json` names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

BEST = "best.json"
_SIGN = {"validation/reward": 1, "validation/loss": -1}  # what decides, and whether more of it is better


@dataclass(frozen=True, slots=True)
class Best:
    """A step and the validation metric by which no other was better."""

    step: int
    metric: str
    value: float


def best_of(best: Best | None, step: int, metrics: Mapping[str, float]) -> Best | None:
    """Return `best`, or `step` when its metrics are better; of equal ones the earlier, and never NaN or infinity."""
    for metric, sign in _SIGN.items():
        value = metrics.get(metric, math.nan)
        if math.isfinite(value) and (best is None or sign * value > sign * best.value):
            return Best(step, metric, value)
    return best
