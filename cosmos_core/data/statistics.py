"""Statistics of the rows of a `prepare` stage: numbers and lengths, and which rows were cut, changed or left out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from cosmos_core.errors import DataError

if TYPE_CHECKING:
    from cosmos_core.data.records import RecordSpec

_MAX_LISTED_REASONS = 5  # maximum number of reasons in a notice, since each row may have a reason of its own


def make_unusable_rows_remedy(max_fraction: float, *, is_every_row_unusable: bool) -> str:
    """Return the end of an error message about unusable rows: why they are too many, and the remedy. `max_fraction` is
    the allowed fraction of unusable rows."""
    if is_every_row_unusable:
        return "none of those read can be: this training reads rows of another form; name their columns, or give others"
    return f"more than dataset.max_skipped_fraction = {max_fraction:g} allows; mend them, or raise it"


class SkippedRowEntry(NamedTuple):
    """Row of a data set that was left out of the prepared rows."""

    reason: str
    location: str
    """Location of the row that was left out."""
    error: str = ""
    """Error of a row that cannot be read or rendered; empty if the row has no content to learn."""


class RowChunk(NamedTuple):
    """A batch of tokenised rows, with counts for the statistics of their split, and the rows that were left out."""

    batch: pa.RecordBatch
    skipped_rows: list[SkippedRowEntry]
    locations_with_merged_turns: list[str]
    """Locations of rows whose turns were merged, because the chat template refuses the original turns."""
    counts: Counter[str]
    """Counts of `images`, `image_tokens` and `learned_ends` (learned end tokens), and of rows: `truncated_rows`
    were cut, `other_column` were read from another column than the recipe names, `plain_rows` learn every token,
    `continued_rows` are plain text whose prompt has no loss, `text_alone` leave out a response in another column,
    `rendered_texts` have the end token of a turn in a text that the chat template renders as one turn, and
    `sized_images` give the size of an image."""
    unread_column_counts: Counter[str]
    """Number of rows with a value in a column that was not read, by the name of the column."""


@dataclass
class _FirstItemCounter:
    """Counter of rows that stores the description of the first counted row only, because millions of rows can be
    counted."""

    count: int = 0
    first_description: str = ""

    def add(self, item_description: str) -> None:
        self.first_description = self.first_description if self.count else item_description
        self.count += 1


class SplitCounts:
    """Statistics of the rows of one split, which are added in chunks."""

    def __init__(self, row_spec: RecordSpec) -> None:
        self._row_kind, self._conversation_column = row_spec.row_kind, row_spec.conversation_column
        self._max_completion_tokens = row_spec.max_completion_tokens
        # A prompt of at most this length leaves room for the longest completion in the model's maximum length.
        max_prompt_tokens = row_spec.max_tokens + 1 - row_spec.max_completion_tokens
        self._max_prompt_tokens = max_prompt_tokens if row_spec.row_kind.is_prompt else math.inf
        self._row_lengths: list[np.ndarray] = []
        self._row_counts, self._unread_column_counts = Counter[str](), Counter[str]()
        self._skipped_by_reason: dict[str, _FirstItemCounter] = {}
        self._error_counter, self._merged_turns_counter = _FirstItemCounter(), _FirstItemCounter()

    def add(self, chunk: RowChunk) -> None:
        """Add the counts and lengths of the rows in `chunk` to the statistics."""
        lengths = [np.diff(chunk.batch.column(column).offsets.to_numpy()) for column in self._row_kind.token_id_columns]
        self._row_lengths.append(np.sum(lengths, axis=0).astype(np.int32))
        self._row_counts += chunk.counts
        self._unread_column_counts += chunk.unread_column_counts
        for location in chunk.locations_with_merged_turns:
            self._merged_turns_counter.add(location)
        for skipped_row in chunk.skipped_rows:
            self._skipped_by_reason.setdefault(skipped_row.reason, _FirstItemCounter()).add(skipped_row.location)
            if skipped_row.error:
                self._error_counter.add(skipped_row.error)
        for column in self._row_kind.mask_columns:
            self._row_counts["label_tokens"] += int(chunk.batch.column(column).values.to_numpy().sum(dtype=np.int64))

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the split that were written to the prepared file."""
        return sum(len(lengths) for lengths in self._row_lengths)

    @property
    def num_skipped_rows(self) -> int:
        """Return the number of rows of the split that were left out of the prepared file."""
        return sum(counter.count for counter in self._skipped_by_reason.values())

    @property
    def _has_learned_end_token(self) -> bool:
        """Return whether an end token is learned in at least one row of the split. Return True too if the rows have no
        loss, or if all rows were cut, so that their end tokens are missing."""
        is_always_truncated = self._row_counts["truncated_rows"] >= self.num_rows
        return not self._row_kind.mask_columns or is_always_truncated or self._row_counts["learned_ends"] > 0

    def check_unusable_rows(self, max_fraction: float, total_rows: int) -> None:
        """Raise DataError if the rows that cannot be used are more than `max_fraction` of the `total_rows` rows."""
        if self._error_counter.count > max_fraction * total_rows:
            raise DataError(
                f"{self._error_counter.first_description}; {self._error_counter.count} of {total_rows} rows cannot be "
                "used so far, " + make_unusable_rows_remedy(max_fraction, is_every_row_unusable=not self.num_rows)
            )

    def make_notices(self, end_token: str | None = None) -> list[str]:
        """Return lines about rows that were skipped, read from another column or merged, or that lack an end token."""
        notices = []
        if self._skipped_by_reason:
            listed_reasons = dict(islice(self._skipped_by_reason.items(), _MAX_LISTED_REASONS))
            reasons = [f"{n.count} {reason} (first: {n.first_description})" for reason, n in listed_reasons.items()]
            if num_other_rows := self.num_skipped_rows - sum(each.count for each in listed_reasons.values()):
                reasons.append(f"{num_other_rows} for other reasons")
            total_rows = self.num_rows + self.num_skipped_rows
            notices.append(f"{self.num_skipped_rows} of {total_rows} rows skipped: {', '.join(reasons)}")
        notice_text_by_count = {
            "other_column": f"have no column {self._conversation_column!r}, which "
            "train.train_policy.conversation_column_name names: they were read from another known column",
            "text_alone": f"are learned as the text of column {self._conversation_column!r} alone, and have a response "
            "in another column; leave train.train_policy.conversation_column_name out to learn that",
            "rendered_texts": "have the token that ends a turn in a text, which the chat template renders once more; "
            "give turns, or the words of one turn alone",
            "sized_images": "give the size of an image (max_pixels or another key of its part), which has no effect: "
            "custom.vision.min_pixels and max_pixels are those of all images",
        }
        counts_and_texts = [(self._row_counts[name], text) for name, text in notice_text_by_count.items()]
        notices += [f"{count} of {self.num_rows} rows {text}" for count, text in counts_and_texts if count]
        if count := sum(int((lengths > self._max_prompt_tokens).sum()) for lengths in self._row_lengths):
            notices.append(
                f"{count} of {self.num_rows} prompts leave less room in policy.model_max_length than the "
                f"{self._max_completion_tokens} tokens of max_response_length: their completions end earlier"
            )
        if self._merged_turns_counter.count:
            notices.append(
                f"turns put together in {self._merged_turns_counter.count} of {self.num_rows} rows (first: "
                f"{self._merged_turns_counter.first_description}): the chat template refuses a system turn, or turns "
                "of one role in a row"
            )
        if not self._has_learned_end_token:
            notices.append(
                f"no row teaches the end token {end_token!r}, so the model would not learn to stop; write it behind "
                "the assistant's turns in the chat template, or make the token that closes them the eos_token"
            )
        return notices

    def make_statistics_entry(self) -> dict[str, Any]:
        """Return the entry of the split in `statistics.json`."""
        row_lengths = np.concatenate(self._row_lengths).astype(np.int64)
        p50, p95 = np.percentile(row_lengths, [50, 95])
        return {
            "kind": self._row_kind.name,
            "rows": len(row_lengths),
            "tokens": int(row_lengths.sum()),
            "label_tokens": self._row_counts["label_tokens"],
            "length": {
                "min": int(row_lengths.min()), "mean": float(row_lengths.mean()), "p50": float(p50), "p95": float(p95),
                "max": int(row_lengths.max()),
            },
            "truncated_rows": self._row_counts["truncated_rows"],
            "skipped_rows": self.num_skipped_rows,
            "skipped": {reason: {"rows": counter.count, "first": counter.first_description}
                        for reason, counter in self._skipped_by_reason.items()},
            "merged_rows": self._merged_turns_counter.count,
            **{name: self._row_counts[name] for name in ("images", "image_tokens") if self._row_counts["images"]},
            **{name: self._row_counts[name] for name in ("plain_rows", "continued_rows") if self._row_counts[name]},
            **({"unread_columns": sorted(self._unread_column_counts)} if self._unread_column_counts else {}),
            **({} if self._has_learned_end_token else {"teaches_end": False}),
        }  # fmt: skip
