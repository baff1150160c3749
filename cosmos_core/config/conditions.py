"""Conditions of a gate: `validation/accuracy >= 0.6`, `validation/accuracy >= published`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

PUBLISHED = "published"
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\S+)\s*(>=|<=|==|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """One comparison of a metric with a number or with the same metric of what is published now."""

    text: str
    metric: str
    comparison: str
    bound: str

    @property
    def needs_published(self) -> bool:
        """Return whether it compares with the published model."""
        return self.bound == PUBLISHED

    def limit(self, published: float | None) -> float | None:
        """Return the number to compare with; None: nothing was published yet. `published`: the metric there."""
        return published if self.needs_published else float(self.bound)

    def holds(self, value: float, limit: float | None) -> bool:
        """Return whether `value` passes; where nothing has been published yet, a comparison with it does; NaN never."""
        return not math.isnan(value) and (limit is None or _OPERATORS[self.comparison](value, limit))


def parse_condition(text: str) -> Condition:
    """Read one condition.

    Raises:
        ValueError: it has not the form `METRIC OPERATOR NUMBER` or `METRIC OPERATOR published`.
    """
    match = _PATTERN.fullmatch(text)
    form = f"condition {text!r} must be METRIC >= NUMBER or METRIC >= {PUBLISHED} (also >, <=, <, ==)"
    if not match:
        raise ValueError(form)
    if match[3] != PUBLISHED and not _is_number(match[3]):
        raise ValueError(form)
    return Condition(text, match[1], match[2], match[3])


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
