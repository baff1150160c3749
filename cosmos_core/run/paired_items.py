"""Compare two models on the same items of a benchmark, from the tables `items.parquet` that both evaluations wrote.

Most items are as hard for one model as for the other, so that the differences per item vary less than the two means do.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, pstdev
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.run.manifest import read_result

ITEMS_FILE = "items.parquet"
_TEST_POWER = 0.8


@dataclass(frozen=True)
class PairedDifferences:
    """Differences of a metric between a new and an old model, one per item of a benchmark."""

    item_differences: tuple[float, ...]
    has_binary_metric: bool
    """True if the metric of every item is 0 or 1 (wrong or right)."""

    @property
    def mean(self) -> float:
        """Return the mean of the differences per item."""
        return math.fsum(self.item_differences) / len(self.item_differences)

    def p_value(self, margin: float = 0.0) -> float:
        """Return the p-value of the mean difference: the probability of a mean at least as high if the true mean
        difference is `margin`. The test is McNemar's exact test for a binary metric and a margin of 0, otherwise the
        paired Student's t-test. Raises `ConfigError` if SciPy is not installed."""
        stats = _import_scipy_stats()
        if self.has_binary_metric and not margin:
            num_wins = sum(difference > 0 for difference in self.item_differences)
            num_non_ties = sum(difference != 0 for difference in self.item_differences)
            return float(stats.binomtest(num_wins, num_non_ties, alternative="greater").pvalue) if num_non_ties else 1.0
        return float(stats.ttest_1samp(self._nonconstant_differences, margin, alternative="greater").pvalue)

    def summarize(self, confidence: float) -> dict[str, Any]:
        """Return the mean difference with its two-sided confidence interval, the numbers of items, of better and of
        worse items, and the smallest difference that this number of items detects in 80 of 100 cases."""
        stats = _import_scipy_stats()
        standard_error = float(stats.sem(self._nonconstant_differences))
        interval_half_width = float(stats.t.ppf((1 + confidence) / 2, len(self.item_differences))) * standard_error
        return {
            "difference": self.mean,
            "low": self.mean - interval_half_width,
            "high": self.mean + interval_half_width,
            "items": len(self.item_differences),
            "better": sum(difference > 0 for difference in self.item_differences),
            "worse": sum(difference < 0 for difference in self.item_differences),
            "detectable": _compute_detection_factor(confidence) * standard_error,
        }

    @property
    def _nonconstant_differences(self) -> tuple[float, ...]:
        """Return the differences and one positive and one negative extra value, so that the variance is never zero."""
        largest_difference = 1.0 if self.has_binary_metric else max(map(abs, self.item_differences)) or 1e-12
        return (*self.item_differences, largest_difference, -largest_difference)


def correct_p_values(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's correction: if all tests with a corrected value of at most 0.05
    are rejected, the probability of any false rejection is at most 5 %."""
    corrected_p_values, largest_p_value = [1.0] * len(p_values), 0.0
    for rank, p_value_index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest_p_value = max(largest_p_value, min(1.0, (len(p_values) - rank) * p_values[p_value_index]))
        corrected_p_values[p_value_index] = largest_p_value
    return corrected_p_values


def compute_sample_size(num_items: int, detectable_difference: float, true_difference: float) -> int | None:
    """Return the number of items that a test needs to detect `true_difference` with a power of 80 %. A test of
    `num_items` items detects `detectable_difference` with this power. Return None if `true_difference` is not
    positive."""
    return math.ceil(num_items * (detectable_difference / true_difference) ** 2 - 1e-9) if true_difference > 0 else None


def find_published_item_folders(
    publication_record: Mapping[str, Any], metric: str, stage_names: Collection[str]
) -> Iterator[Path]:
    """Yield the stage directories on this machine with the items of an evaluation that measured the published value of
    `metric`. The stages in `stage_names` come first, because other stages may have measured the same value of another
    model. `publication_record` is the record of the published model."""
    item_files = Path(publication_record.get("stage") or "-").parent.glob(f"*/{ITEMS_FILE}")
    for file in sorted(item_files, key=lambda file: (file.parent.name not in stage_names, file)):
        result = read_result(file.parent)
        if result is not None and result["metrics"].get(metric) == publication_record["metrics"][metric]:
            yield file.parent


def find_measured_item_folders(folder: Path, metrics: Mapping[str, float]) -> Iterator[Path]:
    """Yield the stage directories with the items of the evaluations that measured `metrics`: `folder` itself or, if the
    stage in `folder` forwards metrics (`select`, or a gate), those of its inputs that have no other metrics."""
    if (folder / ITEMS_FILE).is_file():
        yield folder
    elif result := read_result(folder):
        for name in result["inputs"]:
            input_result = read_result(folder.parent / name)
            if input_result is not None and input_result["metrics"].items() <= metrics.items():
                yield from find_measured_item_folders(folder.parent / name, input_result["metrics"])


def compute_detectable_effect(metric: str, value: float, folder: Path, confidence: float) -> tuple[int, float] | None:
    """Return the number of items of the evaluation in `folder`, and the smallest difference to another model that these
    items detect in 80 of 100 cases. Both models count as independent; models that agree on most items show smaller
    differences. Return None if the evaluation kept no items, or if their mean is not `value`, the recorded metric."""
    scores = list(_read_item_values(metric, folder / ITEMS_FILE).values())
    num_items = len(scores)
    if num_items < 2 or not abs(math.fsum(scores) / num_items - value) <= 1e-6:
        return None
    stddev = pstdev([*scores, min(scores), max(scores)]) if len({*scores}) > 1 else 1.0 / math.sqrt(num_items)
    return num_items, _compute_detection_factor(confidence) * stddev * math.sqrt(2 / num_items)


def compare_items(metric: str, measured_folder: Path, published_folder: Path) -> PairedDifferences | None:
    """Return the differences per item of the metric `evaluation/TASK/METRIC` between the evaluations in two stage
    directories; None if an evaluation kept no items, or if the items differ."""
    item_values = [_read_item_values(metric, folder / ITEMS_FILE) for folder in (measured_folder, published_folder)]
    if len(item_values[0]) < 2 or item_values[0].keys() != item_values[1].keys():
        return None
    item_differences = tuple(item_values[0][item] - item_values[1][item] for item in item_values[0])
    return PairedDifferences(item_differences, {*item_values[0].values(), *item_values[1].values()} <= {0.0, 1.0})


def _read_item_values(metric: str, items_file: Path) -> dict[tuple[int, str], float]:
    """Return the value of a metric for each item of a benchmark, by the item's position and the hash of its content."""
    _, _, item_metric = metric.partition("/")
    if not items_file.is_file():
        return {}
    import pyarrow.parquet as pq

    # Try each slash as the separator, because the name of a task or of a metric may itself contain slashes.
    metric_parts, column_names = item_metric.split("/"), pq.read_schema(items_file).names
    task_metric_pairs = [("/".join(metric_parts[:i]), "/".join(metric_parts[i:])) for i in range(1, len(metric_parts))]
    task_name, metric_column = next((each for each in task_metric_pairs if each[1] in column_names), ("", ""))
    if not task_name:
        return {}
    item_rows: Sequence[dict[str, Any]] = pq.read_table(
        items_file, columns=["doc_id", "doc_hash", metric_column], filters=[("task", "=", task_name)]
    ).to_pylist()
    return {(row["doc_id"], row["doc_hash"]): row[metric_column] for row in item_rows if row[metric_column] is not None}


def _compute_detection_factor(confidence: float) -> float:
    """Return the number of standard errors that a difference must have so that a test with this confidence detects it
    in 80 of 100 cases."""
    return NormalDist().inv_cdf(confidence) + NormalDist().inv_cdf(_TEST_POWER)


def _import_scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError(
            "confidence: a comparison per item needs SciPy; pip install 'cosmos-posttrain[eval]', or set confidence = 0"
        ) from error
    return stats
