"""Compare two models on the same items of a benchmark, from the tables `items.parquet` that both evaluations wrote.

Most items are as hard for one model as for the other, so that the differences per item vary less than the two means do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError

ITEMS = "items.parquet"
_POWER = 0.8


@dataclass(frozen=True)
class Paired:
    """Differences of a metric per item, of the new model minus the old one."""

    differences: tuple[float, ...]
    is_binary: bool
    """Whether every item is either right or wrong, 1 or 0."""

    @property
    def mean(self) -> float:
        """Return the mean of the differences per item."""
        return math.fsum(self.differences) / len(self.differences)

    @property
    def reversed(self) -> Paired:
        """Return the comparison of a metric whose lower values are better."""
        return Paired(tuple(-difference for difference in self.differences), self.is_binary)

    def p_value(self, margin: float = 0.0) -> float:
        """Return the probability (p-value) of a mean difference as high as this one or higher if the true mean
        difference is `margin`.

        The exact test of McNemar for right and wrong without a margin, otherwise Student's t-test of paired samples.

        Raises:
            ConfigError: SciPy is not installed.
        """
        stats = _scipy_stats()
        if self.is_binary and not margin:
            changed = [difference for difference in self.differences if difference]
            better = sum(difference > 0 for difference in changed)
            return float(stats.binomtest(better, len(changed), alternative="greater").pvalue) if changed else 1.0
        return float(stats.ttest_1samp(self._padded, margin, alternative="greater").pvalue)

    def describe(self, confidence: float) -> dict[str, Any]:
        """Return the mean difference with its two-sided confidence interval, the numbers of items, of better and of
        worse items, and the smallest difference that this number of items detects in 80 of 100 cases."""
        stats = _scipy_stats()
        error = float(stats.sem(self._padded))
        width = float(stats.t.ppf((1 + confidence) / 2, len(self.differences))) * error
        quantiles = float(stats.norm.ppf(confidence) + stats.norm.ppf(_POWER))
        return {
            "difference": self.mean,
            "low": self.mean - width,
            "high": self.mean + width,
            "items": len(self.differences),
            "better": sum(difference > 0 for difference in self.differences),
            "worse": sum(difference < 0 for difference in self.differences),
            "detectable": quantiles * error,
        }

    @property
    def _padded(self) -> tuple[float, ...]:
        """Return the differences with one additional item in each direction, so that a few equal items do not count as
        certain."""
        size = 1.0 if self.is_binary else max(map(abs, self.differences)) or 1e-12
        return (*self.differences, size, -size)


def compare_items(metric: str, new: Path, old: Path) -> Paired | None:
    """Return the differences of `evaluation/TASK/METRIC` between the evaluations in two stage directories; None if one
    of them kept no items, or if they are not of the same items."""
    values = [_values(metric, folder / ITEMS) for folder in (new, old)]
    if len(values[0]) < 2 or values[0].keys() != values[1].keys():
        return None
    differences = tuple(values[0][item] - values[1][item] for item in values[0])
    return Paired(differences, {*values[0].values(), *values[1].values()} <= {0.0, 1.0})


def _values(metric: str, file: Path) -> dict[tuple[int, str], float]:
    """Return the value of a metric for each item of a benchmark, by the item's position and the hash of its content."""
    _, _, rest = metric.partition("/")
    task, _, column = rest.rpartition("/")
    if not task or not file.is_file():
        return {}
    import pyarrow.parquet as pq

    if column not in pq.read_schema(file).names:
        return {}
    rows: Sequence[dict[str, Any]] = pq.read_table(
        file, columns=["doc_id", "doc_hash", column], filters=[("task", "=", task)]
    ).to_pylist()
    return {(row["doc_id"], row["doc_hash"]): row[column] for row in rows if row[column] is not None}


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ConfigError(
            "confidence: a comparison per item needs SciPy; pip install 'cosmos-posttrain[eval]', or set confidence = 0"
        ) from error
    return stats
