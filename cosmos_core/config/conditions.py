"""Conditions of a gate stage, such as `validation/accuracy >= 0.6`, `validation/accuracy >= published` or, for all
benchmarks, `evaluation/*/acc not worse than published by 0.02`."""

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from statistics import NormalDist

_PUBLISHED_KEYWORD = "published"
_MAX_ROUNDING_ERROR = 1e-12
STANDARD_ERROR_SUFFIX = "_stderr"
"""Suffix of the name of a metric that is the standard error of another metric."""
_COMPARISON_FUNCTIONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip
_COMPARISON_PATTERN = re.compile(r"\s*(\S+)\s*(>=|<=|==|>|<)\s*(?:published\s*(?:([+-])\s*([\d.]\S*))?|(\S+))\s*")
_NOT_WORSE_THAN_PUBLISHED_PATTERN = re.compile(r"\s*(\S+)\s+not\s+worse\s+than\s+published(?:\s+by\s+([\d.]\S*))?\s*")
_PASS_RATE_PATTERN = re.compile(r"\s*(?:([\d.]+)\s*(<=|<))?\s*pass_rate\s*(?:(<=|<|>=|>)\s*([\d.]+))?\s*")
_LOWER_IS_BETTER_WORDS = ("loss", "perplexity", "nll", "kl", "error", "invalid", "truncated", "bits_per_byte", "brier")


@dataclass(frozen=True)
class MetricCondition:
    """Comparison of a metric with a number, or with the same metric of the currently published model.

    A condition on a metric with `*` applies to every metric whose name matches.
    """

    text: str
    metric: str
    operator: str
    threshold_text: str
    published_offset: float = 0.0
    """Number that is added to the metric of the published model to get the threshold."""

    @property
    def needs_published_model(self) -> bool:
        """Return True if the condition compares a metric with its value for the published model, such as `accuracy >=
        published`."""
        return self.threshold_text == _PUBLISHED_KEYWORD

    @property
    def allows_for_noise(self) -> bool:
        """Return True if `confidence` of a gate applies to the condition: the condition compares with the published
        model, and not for equality."""
        return self.needs_published_model and self.operator != "=="

    def threshold(self, published_value: float | None) -> float | None:
        """Return the number with which the condition compares its metric. If it compares with the published model, the
        number is computed from `published_value`, the value of the metric for that model; None if no model was
        published."""
        if not self.needs_published_model:
            return float(self.threshold_text)
        if published_value is None or not self.published_offset:
            return published_value
        return round(published_value + self.published_offset, 12)  # remove rounding errors, which messages would show

    def matches_metric(self, name: str) -> bool:
        """Return True if the condition applies to the metric `name`. A condition on a pattern with `*` does not apply
        to standard errors."""
        may_match_as_pattern = "*" in self.metric and not name.endswith(STANDARD_ERROR_SUFFIX)
        return name == self.metric or (may_match_as_pattern and fnmatchcase(name, self.metric))

    def is_satisfied(self, measured_value: float, threshold: float | None, margin: float = 0.0) -> bool:
        """Return True if the measured value, made worse by `margin`, satisfies the condition. If `threshold` is None
        because no model was published yet, every number satisfies it. NaN never satisfies it."""
        worst_measured_value = measured_value - margin if self.operator.startswith(">") else measured_value + margin
        # Ignore a rounding error: thresholds and rewards are sums, and 0.7 + 0.2 + 0.1 < 1.
        rel_tol, abs_tol = _MAX_ROUNDING_ERROR, _MAX_ROUNDING_ERROR if self.published_offset else 0.0
        if threshold is not None and math.isclose(worst_measured_value, threshold, rel_tol=rel_tol, abs_tol=abs_tol):
            worst_measured_value = threshold
        satisfies_threshold = threshold is None or _COMPARISON_FUNCTIONS[self.operator](worst_measured_value, threshold)
        return satisfies_threshold and not math.isnan(measured_value)


def parse_condition(text: str) -> MetricCondition:
    """Parse one condition of a gate, such as `accuracy >= 0.8`; raise `ValueError` if the text is no condition."""
    if text_match := _NOT_WORSE_THAN_PUBLISHED_PATTERN.fullmatch(text):
        metric, offset_text, threshold_text = text_match[1], text_match[2] or "0", None
        comparison_operator, offset_sign = ("<=", "+") if is_lower_better(metric) else (">=", "-")
    elif text_match := _COMPARISON_PATTERN.fullmatch(text):
        metric, comparison_operator, threshold_text = text_match[1], text_match[2], text_match[5]
        offset_sign, offset_text = text_match[3] or "+", text_match[4] or "0"
    if not text_match or not _is_number(offset_text) or (threshold_text is not None and not _is_number(threshold_text)):
        raise ValueError(
            f"condition {text!r} must be METRIC >= NUMBER, METRIC >= published, METRIC >= published - NUMBER (also >, "
            f"<=, <, ==) or METRIC not worse than published by NUMBER"
        )
    threshold_text, published_offset = threshold_text or _PUBLISHED_KEYWORD, float(f"{offset_sign}{offset_text}")
    return MetricCondition(text, metric, comparison_operator, threshold_text, published_offset)


def is_lower_better(metric: str) -> bool:
    """Return True if lower values of a metric are better: if the last part of its name contains a word such as `loss`
    or `error`, or if the name ends with `loss/LABEL`, the loss of one data set of a mixture."""
    last_name_part = metric.rpartition("/")[2].lower()
    # The name `ter` (translation edit rate) must match as a whole, because longer names such as `filter` contain it.
    has_lower_better_word = last_name_part == "ter" or any(word in last_name_part for word in _LOWER_IS_BETTER_WORDS)
    return has_lower_better_word or bool(re.search(r"\bloss/", metric))


def parse_pass_rate_range(text: str) -> Callable[[float], bool]:
    """Return a function that tests whether a pass rate is in a range such as `0.1 <= pass_rate <= 0.9`. Raises
    `ValueError` if the text is no range of pass rates."""
    match = _PASS_RATE_PATTERN.fullmatch(text)
    if not match or not (match[1] or match[4]) or not all(_is_number(match[i] or "0") for i in (1, 4)):
        raise ValueError(f"keep = {text!r} must be NUMBER <= pass_rate <= NUMBER, or one half of it (also < and >)")
    min_pass_rate_text, lower_operator, upper_operator, max_pass_rate_text = match.groups()
    return lambda pass_rate: (
        (not min_pass_rate_text or _COMPARISON_FUNCTIONS[lower_operator](float(min_pass_rate_text), pass_rate))
        and (not max_pass_rate_text or _COMPARISON_FUNCTIONS[upper_operator](pass_rate, float(max_pass_rate_text)))
    )


def significance_margin(metric: str, confidence: float, *measurements: Mapping[str, float]) -> float | None:
    """Return the smallest difference between measurements of the metric `metric` that is significant (one-sided) at the
    confidence level `confidence`; None if the standard error of a measurement is unknown.

    The standard error of a metric NAME is the metric `NAME_stderr`. For a fraction of held-out prompts it is computed
    from the number of prompts, with one success and one failure added, because a fraction of 0 or 1 of few prompts is
    not certain.
    """
    std_errors = [std_error for metrics in measurements if (std_error := _standard_error(metric, metrics)) is not None]
    return NormalDist().inv_cdf(confidence) * math.hypot(*std_errors) if len(std_errors) == len(measurements) else None


def is_prompt_fraction(metric: str) -> bool:
    """Return True if a metric is a fraction of the prompts, such as `accuracy` or `pass@2`, so that its standard error
    can be computed from the number of prompts."""
    last_name_part = metric.rpartition("/")[2]
    return last_name_part == "accuracy" or last_name_part.startswith("pass@")


def _standard_error(metric: str, metrics: Mapping[str, float]) -> float | None:
    if (standard_error := metrics.get(metric + STANDARD_ERROR_SUFFIX)) is not None:
        return standard_error
    num_prompts = metrics.get(f"{metric.rpartition('/')[0]}/prompts", 0.0)
    if num_prompts < 1 or not is_prompt_fraction(metric):
        return None
    # A value outside of 0 to 1, such as a percentage, has no standard error, because the formula is only for fractions.
    if metrics[metric] < 0 or metrics[metric] > 1:
        return None
    laplace_smoothed_fraction = (metrics[metric] * num_prompts + 1) / (num_prompts + 2)
    return math.sqrt(laplace_smoothed_fraction * (1 - laplace_smoothed_fraction) / num_prompts)


def _is_number(number_text: str) -> bool:
    try:
        return not math.isnan(float(number_text))
    except ValueError:
        return False
