"""Format durations, numbers and names of metrics for the console and the report."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cosmos_core.config.conditions import STANDARD_ERROR_SUFFIX, is_lower_better

_METRIC_SUFFIXES = ("/mean", "_mean", "/avg", "_avg")
RESOURCE_PREFIXES = ("time/", "throughput/", "memory/")
_HEADLINE_METRICS = ("reward", "loss", "accuracy")
_TABLE_METRIC_NAMES = {
    "accuracy": "accuracy", "reward": "reward", "loss": "loss", "logprob_difference_p95": "log-prob difference p95",
}  # fmt: skip
_TRAINING_AND_VALIDATION_METRICS = frozenset({"reward", "loss"})
"""Names of metrics that training and validation both report, computed from different rows or completions."""


def format_duration(seconds: float | None) -> str:
    """Return a duration in seconds as text such as `3.1s`, `42s`, `1m40s`, `2h05m`, `3d04h`; a dash for None."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f}s"
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds}s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m{whole_seconds % 60:02d}s"
    if whole_seconds < 86400:
        return f"{whole_seconds // 3600}h{whole_seconds % 3600 // 60:02d}m"
    return f"{whole_seconds // 86400}d{whole_seconds % 86400 // 3600:02d}h"


def describe_machines(ranks: Iterable[Any]) -> str:
    """Return the machines of ranks as a text such as `node-3 (8 ranks, NVIDIA H100, 16 threads)`."""
    ranks_by_host = Counter((rank.host, ", ".join(dict.fromkeys(rank.gpus)) or "cpu", rank.threads) for rank in ranks)
    return "; ".join(
        f"{host} ({num_ranks} rank{'' if num_ranks == 1 else 's'}, {device}, {threads} threads)"
        for (host, device, threads), num_ranks in ranks_by_host.items()
    )


def format_timestamp(unix_time: float | None) -> str:
    """Return a unix time as local date and time; empty if the time is None or 0."""
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(unix_time)) if unix_time else ""


def format_time(unix_time: float | None) -> str:
    """Return a unix time as local time such as `20:14`, with the date if it is not today; a dash for None."""
    if unix_time is None:
        return "–"
    local_time, current_time = time.localtime(unix_time), time.localtime()
    return time.strftime("%H:%M" if local_time[:3] == current_time[:3] else "%Y-%m-%d %H:%M", local_time)


def format_bytes(num_bytes: int) -> str:
    """Return a number of bytes as text such as `850 B`, `3.2 kB`, `1.4 MB`."""
    byte_count_text = format_count(num_bytes)
    return f"{byte_count_text[:-1]} {byte_count_text[-1]}B" if byte_count_text[-1].isalpha() else f"{byte_count_text} B"


def float_or_inf(number: float) -> float:
    """Return a metric as a float, or infinity if it is an integer that is too large for a float."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def make_sort_key(number: float | None, sort_sign: float) -> tuple[bool, float]:
    """Return a sort key for ascending (`sort_sign` 1) or descending (-1) order, with None and NaN last."""
    return number is None or math.isnan(number), 0.0 if number is None else sort_sign * number


def format_number(number: Any) -> str:
    """Return a metric as text such as `0.123`, `12,345` or `1.23e-05`; a dash for None."""
    if number is None:
        return "–"
    if isinstance(number, bool | str):
        return str(number)
    if not math.isfinite(float_or_inf(number)):
        return str(float_or_inf(number))
    is_whole_number = float(number).is_integer() and abs(number) >= 10
    if isinstance(number, int) or (abs(number) < 1e12 and (is_whole_number or abs(number) >= 1e3)):
        return f"{number:,.0f}"
    return f"{number:.3f}" if number == 0 or 1e-3 <= abs(number) < 1e3 else f"{number:.3g}"


def format_count(number: float) -> str:
    """Return a number as text with a unit prefix, such as `850`, `3.2k`, `1.4M`."""
    for unit_size, unit_letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit_size:
            return f"{number / unit_size:.1f}{unit_letter}"
    return f"{number:.0f}"


def get_metric_family(metric: str) -> str:
    """Return the name of a metric without prefix and suffix: `loss` for `train/loss`, `reward` for `reward/mean`."""
    for suffix in _METRIC_SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric.rpartition("/")[2]


def judge_change(metric: str, metric_change: float | None) -> str:
    """Return `better` or `worse` for a metric that has changed by `metric_change`; empty if it has not changed, or if
    neither higher nor lower values are preferred."""
    has_preferred_direction = is_lower_better(metric) or get_metric_family(metric) in _HEADLINE_METRICS
    if not metric_change or math.isnan(metric_change) or not has_preferred_direction:
        return ""
    return "better" if (metric_change < 0) == is_lower_better(metric) else "worse"


def find_headline_metric(metrics: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return name and value of the reward or, if it is missing, of the loss or the accuracy; None: all are missing."""
    for name in _HEADLINE_METRICS:
        for key, value in metrics.items():
            if get_metric_family(key) == name and isinstance(value, int | float):
                return name, float_or_inf(value)
    return None


def find_tokens_per_second(metrics: Mapping[str, Any]) -> float | None:
    """Return the number of tokens per second from the metrics of a step; None if it was not measured."""
    throughputs = (value for key, value in metrics.items() if get_metric_family(key) == "tokens_per_second")
    return next((float_or_inf(value) for value in throughputs if isinstance(value, int | float)), None)


def select_key_metrics(metrics: Mapping[str, Any], max_metrics: int = 4) -> dict[str, float]:
    """Return at most `max_metrics` metrics: first those of validation, then reward, loss and accuracy, then others.
    Times, throughput and memory are left out."""
    metric_ranks = {name: priority for priority, name in enumerate(_HEADLINE_METRICS)}

    def get_metric_priority(name: str) -> int:
        return -1 if name.startswith("validation/") else metric_ranks.get(get_metric_family(name), len(metric_ranks))

    metric_names = [k for k, v in metrics.items() if isinstance(v, int | float) and not k.startswith(RESOURCE_PREFIXES)]
    return {key: metrics[key] for key in sorted(metric_names, key=get_metric_priority)[:max_metrics]}


def shorten_metric_name(metric: str) -> str:
    """Return the short name of a metric for tables: `loss` for training, `held-out loss` for validation."""
    name = _TABLE_METRIC_NAMES.get(get_metric_family(metric), get_metric_family(metric))
    return f"held-out {name}" if metric.startswith("validation/") and name in _TRAINING_AND_VALIDATION_METRICS else name


def select_table_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the accuracy, the reward, the loss and the 95th percentile of the log-prob difference by short name; if
    `metrics` has none of them, return the first three metrics."""
    sorted_metrics = select_key_metrics(metrics, max_metrics=len(metrics))
    table_metrics: dict[str, float] = {}
    for name in _TABLE_METRIC_NAMES:
        for key, value in sorted_metrics.items():
            if get_metric_family(key) == name:
                table_metrics.setdefault(shorten_metric_name(key), value)
    fallback_metrics = [each for each in sorted_metrics.items() if not each[0].endswith(STANDARD_ERROR_SUFFIX)][:3]
    return table_metrics or {(key.partition("/")[2] or key).replace("_", " "): value for key, value in fallback_metrics}
