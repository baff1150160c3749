"""What is said of the rows of a `prepare` stage: how many and how long, and which were cut, changed or left out."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from cosmos_core.data.prepared import RowKind

_IDS: dict[RowKind, tuple[str, ...]] = {
    "sequences": ("input_ids",), "pairs": ("chosen_ids", "rejected_ids"), "prompts": ("prompt_ids",),
}  # fmt: skip
_MASKS: dict[RowKind, tuple[str, ...]] = {
    "sequences": ("loss_mask",), "pairs": ("chosen_mask", "rejected_mask"), "prompts": (),
}  # fmt: skip

_MOST_REASONS = 5
"""In a notice: a chat template may say something else of each row."""


class Chunk(NamedTuple):
    """Some rows, tokenised."""

    batch: pa.RecordBatch
    num_cut: int
    """Sequences that were longer than the model."""
    skipped: list[tuple[str, str]]
    """Reason and place of each row that was left out."""
    merged: list[str]
    """Places of rows whose turns were put together, because the chat template refuses them as they are."""
    num_images: int = 0
    num_image_tokens: int = 0


class Counts:
    """What is said of one split."""

    def __init__(self, kind: RowKind) -> None:
        self._kind = kind
        self._lengths: list[np.ndarray] = []
        self._num_labels = 0
        self._num_cut = 0
        self._images: dict[str, int] = {"images": 0, "image_tokens": 0}
        self._skipped: dict[str, list[str]] = {}
        self._merged: list[str] = []

    def add(self, chunk: Chunk) -> None:
        """The rows behind those so far."""
        lengths = [np.diff(chunk.batch.column(name).offsets.to_numpy()) for name in _IDS[self._kind]]
        self._lengths.append(np.sum(lengths, axis=0))
        self._num_cut += chunk.num_cut
        self._merged += chunk.merged
        self._images["images"] += chunk.num_images
        self._images["image_tokens"] += chunk.num_image_tokens
        for reason, place in chunk.skipped:
            self._skipped.setdefault(reason, []).append(place)
        for name in _MASKS[self._kind]:
            self._num_labels += int(chunk.batch.column(name).values.to_numpy().sum(dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Rows that were written."""
        return sum(len(lengths) for lengths in self._lengths)

    @property
    def num_skipped(self) -> int:
        """Rows that were left out."""
        return sum(len(places) for places in self._skipped.values())

    def notices(self) -> list[str]:
        """A line about rows that were left out, and one about rows whose turns were put together."""
        found = []
        if self._skipped:
            told = dict(islice(self._skipped.items(), _MOST_REASONS))
            reasons = [f"{len(places)} {reason} (first: {places[0]})" for reason, places in told.items()]
            if others := self.num_skipped - sum(map(len, told.values())):
                reasons.append(f"{others} for other reasons")
            found.append(f"{self.num_skipped} of {self.num_rows + self.num_skipped} rows skipped: {', '.join(reasons)}")
        if self._merged:
            found.append(
                f"turns put together in {len(self._merged)} of {self.num_rows} rows (first: {self._merged[0]}): "
                "the chat template refuses a system turn, or turns of one role in a row"
            )
        return found

    def summary(self) -> dict[str, Any]:
        """For `statistics.json`."""
        lengths = np.concatenate(self._lengths)
        p50, p95 = np.percentile(lengths, [50, 95])
        return {
            "kind": self._kind,
            "rows": len(lengths),
            "tokens": int(lengths.sum()),
            "label_tokens": self._num_labels,
            "length": {
                "min": int(lengths.min()), "mean": float(lengths.mean()), "p50": float(p50), "p95": float(p95),
                "max": int(lengths.max()),
            },
            "truncated_rows": self._num_cut,
            "skipped_rows": self.num_skipped,
            "skipped": {reason: {"rows": len(at), "first": at[0]} for reason, at in self._skipped.items()},
            "merged_rows": len(self._merged),
            **(self._images if self._images["images"] else {}),
        }  # fmt: skip
