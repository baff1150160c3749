"""Conditions of a gate: `validation/accuracy >= 0.6`, `validation/accuracy >= published`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

PUBLISHED = "published"
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_PATTERN = re.compile(r"\s*(\S+)\s*(>=|<=|==|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """Comparison of a metric with a number, or with the same metric of the currently published model."""

    text: str
    metric: str
    comparison: str
    bound: str

    @property
    def needs_published(self) -> bool:
        """Return True if the condition compares with the published model."""
        return self.bound == PUBLISHED

    def limit(self, published: float | None) -> float | None:
        """Return the number to compare with, where `published` is the metric of the published model; None if no model
        was published yet."""
        return published if self.needs_published else float(self.bound)

    def holds(self, value: float, limit: float | None, margin: float = 0.0) -> bool:
        """Return True if `value` passes by more than `margin`. A comparison with the published model passes if no model
        was published yet; NaN never passes."""
        adjusted = value - math.copysign(margin, 1.0 if self.comparison.startswith(">") else -1.0) if margin else value
        return not math.isnan(value) and (limit is None or _OPERATORS[self.comparison](adjusted, limit))


def parse_condition(text: str) -> Condition:
    """Parse the text of one condition.

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


def margin(name: str, confidence: float, *measured: Mapping[str, float]) -> float | None:
    """Return how much two measurements of a metric must differ so that the difference is noise with a probability of at
    most 1 - `confidence`; None if the standard error of a measurement is unknown.

    The standard error is the metric `NAME_stderr`. For a fraction of held-out prompts it follows from their number,
    with one success and one failure added, so that a fraction of 0 or 1 of few prompts does not count as certain.
    """
    errors = [_standard_error(name, metrics) for metrics in measured]
    known_errors = [error for error in errors if error is not None]
    return NormalDist().inv_cdf(confidence) * math.hypot(*known_errors) if len(known_errors) == len(errors) else None


def _standard_error(name: str, metrics: Mapping[str, float]) -> float | None:
    if (error := metrics.get(f"{name}_stderr")) is not None:
        return error
    folder, _, last = name.rpartition("/")
    count = metrics.get(f"{folder}/prompts", 0.0)
    if count < 1 or not (last == "accuracy" or last.startswith("pass@")):
        return None
    if metrics[name] < 0 or metrics[name] > 1:  # in percent, or not a fraction
        return None
    fraction = (metrics[name] * count + 1) / (count + 2)
    return math.sqrt(fraction * (1 - fraction) / count)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
