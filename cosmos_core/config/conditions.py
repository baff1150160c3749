"""Conditions of a gate stage: `validation/accuracy >= 0.6`, `validation/accuracy >= published`, and for all benchmarks
`evaluation/*/acc not worse than published by 0.02`."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import NormalDist

PUBLISHED = "published"
STDERR = "_stderr"
"""Suffix of the name of a metric that is the standard error of another metric."""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_COMPARISON_PATTERN = re.compile(r"\s*(\S+)\s*(>=|<=|==|>|<)\s*(?:published\s*(?:([+-])\s*([\d.]\S*))?|(\S+))\s*")
_NOT_WORSE_PATTERN = re.compile(r"\s*(\S+)\s+not\s+worse\s+than\s+published(?:\s+by\s+([\d.]\S*))?\s*")
_PASS_RATE_PATTERN = re.compile(r"\s*(?:([\d.]+)\s*(<=|<))?\s*pass_rate\s*(?:(<=|<|>=|>)\s*([\d.]+))?\s*")
LOWER_IS_BETTER = ("loss", "perplexity", "nll", "kl", "error", "invalid", "truncated", "bits_per_byte")
"""Words in the names of metrics whose lower values are better."""


@dataclass(frozen=True)
class MetricCondition:
    """Comparison of a metric with a number, or with the same metric of the currently published model.

    A condition on a metric with `*` applies to every metric whose name matches.
    """

    text: str
    metric: str
    comparison: str
    bound: str
    offset: float = 0.0
    """Number that is added to the metric of the published model."""

    @property
    def needs_published_model(self) -> bool:
        """Return True if the condition compares with the published model."""
        return self.bound == PUBLISHED

    def limit(self, published: float | None) -> float | None:
        """Return the threshold of the condition; None if the threshold is the metric of the published model and no
        model was published yet. `published` is the value of the metric of the published model."""
        if not self.needs_published_model:
            return float(self.bound)
        # The sum is rounded, because 0.1 + 0.2 is above 0.3.
        return None if published is None else round(published + self.offset, 12)

    def matches_metric(self, name: str) -> bool:
        """Return True if the condition applies to a metric; a pattern with `*` does not match a standard error."""
        is_pattern = "*" in self.metric and not name.endswith(STDERR)
        return name == self.metric or (is_pattern and fnmatchcase(name, self.metric))

    def is_satisfied(self, value: float, limit: float | None, margin: float = 0.0) -> bool:
        """Return True if `value`, worsened by `margin`, compares with `limit` as the condition requires. If `limit` is
        None (no model was published yet), any value passes; NaN never passes."""
        worse_value = value - margin if self.comparison.startswith(">") else value + margin
        return not math.isnan(value) and (limit is None or _OPERATORS[self.comparison](worse_value, limit))


def parse_condition(text: str) -> MetricCondition:
    """Parse one condition of a gate, such as `accuracy >= 0.8`.

    Raises:
        ValueError: the text has none of the forms of a condition.
    """
    if match := _NOT_WORSE_PATTERN.fullmatch(text):
        metric, offset_text, bound_text = match[1], match[2] or "0", None
        is_lower_better = any(word in metric.rpartition("/")[2].lower() for word in LOWER_IS_BETTER)
        comparison, offset_sign = ("<=", "+") if is_lower_better else (">=", "-")
    elif match := _COMPARISON_PATTERN.fullmatch(text):
        metric, comparison, bound_text = match[1], match[2], match[5]
        offset_sign, offset_text = match[3] or "+", match[4] or "0"
    if not match or not _is_number(offset_text) or (bound_text is not None and not _is_number(bound_text)):
        raise ValueError(
            f"condition {text!r} must be METRIC >= NUMBER, METRIC >= {PUBLISHED}, METRIC >= {PUBLISHED} - NUMBER (also "
            f">, <=, <, ==) or METRIC not worse than {PUBLISHED} by NUMBER"
        )
    return MetricCondition(text, metric, comparison, bound_text or PUBLISHED, float(f"{offset_sign}{offset_text}"))


def parse_range(text: str) -> Callable[[float], bool]:
    """Parse a range such as `0.1 <= pass_rate <= 0.9` to a function that returns True for a pass rate in the range.

    Raises:
        ValueError: the text is no range of pass rates.
    """
    match = _PASS_RATE_PATTERN.fullmatch(text)
    if not match or not (match[1] or match[4]) or not all(_is_number(match[i] or "0") for i in (1, 4)):
        raise ValueError(f"keep = {text!r} must be NUMBER <= pass_rate <= NUMBER, or one half of it (also < and >)")
    min_rate, low_operator, high_operator, max_rate = match.groups()
    return lambda pass_rate: (
        (not min_rate or _OPERATORS[low_operator](float(min_rate), pass_rate))
        and (not max_rate or _OPERATORS[high_operator](pass_rate, float(max_rate)))
    )


def noise_margin(name: str, confidence: float, *measurements: Mapping[str, float]) -> float | None:
    """Return how much two measurements of the metric `name` must differ so that the difference is noise with a
    probability of at most 1 - `confidence`; None if the standard error of a measurement is unknown.

    The standard error is the metric `NAME_stderr`. For a fraction of held-out prompts it is computed from the number of
    prompts, with one success and one failure added, because a fraction of 0 or 1 of few prompts is not certain.
    """
    errors = [_standard_error(name, metrics) for metrics in measurements]
    known_errors = [error for error in errors if error is not None]
    return NormalDist().inv_cdf(confidence) * math.hypot(*known_errors) if len(known_errors) == len(errors) else None


def _standard_error(name: str, metrics: Mapping[str, float]) -> float | None:
    if (error := metrics.get(name + STDERR)) is not None:
        return error
    metric_prefix, _, metric_name = name.rpartition("/")
    num_prompts = metrics.get(f"{metric_prefix}/prompts", 0.0)
    if num_prompts < 1 or not (metric_name == "accuracy" or metric_name.startswith("pass@")):
        return None
    if metrics[name] < 0 or metrics[name] > 1:  # a percentage, for example, is not a fraction
        return None
    smoothed_fraction = (metrics[name] * num_prompts + 1) / (num_prompts + 2)
    return math.sqrt(smoothed_fraction * (1 - smoothed_fraction) / num_prompts)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
