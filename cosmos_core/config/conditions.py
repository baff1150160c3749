"""Conditions of a gate: `validation/accuracy >= 0.6`, `validation/accuracy >= published`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
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
        """Whether it compares with the published model."""
        return self.bound == PUBLISHED

    def holds(self, value: float, published: Mapping[str, float] | None) -> bool:
        """Whether `value` passes; where nothing has been published yet, a comparison with it does. NaN never passes."""
        if math.isnan(value):
            return False
        if not self.needs_published:
            return _OPERATORS[self.comparison](value, float(self.bound))
        if published is None or self.metric not in published:
            return True
        return _OPERATORS[self.comparison](value, published[self.metric])


def parse_condition(text: str) -> Condition:
    """Read one condition.

    Raises:
        ValueError: it has not the form `METRIC OPERATOR NUMBER` or `METRIC OPERATOR published`.
    """
    match = _PATTERN.fullmatch(text)
    form = f"condition {text!r} must be METRIC >= NUMBER or METRIC >= {PUBLISHED} (also >, <=, <, ==)"
    if not match:
        raise ValueError(form)
    if match[3] != PUBLISHED:
        try:
            float(match[3])
        except ValueError:
            raise ValueError(form) from None
    return Condition(text, match[1], match[2], match[3])
