"""Reading what the `prepare` stage wrote: memory-mapped sequences to learn, or prompts to answer.

One Arrow IPC file a split, `train.arrow` and perhaps `validation.arrow`; the schema's metadata says which of the two
kinds of rows it holds. Making these files is `prepare.py`; batches and their order are elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import numpy as np
import pyarrow as pa

from cosmos_core.errors import DataError
from cosmos_core.types import Prompt

RowKind = Literal["sequences", "prompts"]

SCHEMAS: dict[RowKind, pa.Schema] = {
    "sequences": pa.schema(
        {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "place": pa.string()},
        metadata={b"rows": b"sequences"},
    ),
    "prompts": pa.schema(
        {
            "prompt_ids": pa.list_(pa.int32()),
            "prompt_text": pa.string(),
            "reference": pa.string(),
            "place": pa.string(),
        },
        metadata={b"rows": b"prompts"},
    ),
}


def split_path(folder: Path, split: str) -> Path:
    """Where a split lies in the data folder of a `prepare` stage."""
    return folder / f"{split}.arrow"


def has_split(folder: Path, split: str) -> bool:
    """Whether the data folder has this split."""
    return split_path(folder, split).is_file()


class Sequences:
    """Token sequences to learn: `[i]` is `(input_ids int64, loss_mask uint8)`, copied out of the mapped file."""

    def __init__(self, batches: list[pa.RecordBatch], path: Path) -> None:
        self._bounds = [_offsets(batch, "input_ids") for batch in batches]
        self._ids = [_values(batch, "input_ids") for batch in batches]
        self._masks = [_values(batch, "loss_mask") for batch in batches]
        for batch, bounds in zip(batches, self._bounds, strict=True):
            if not np.array_equal(bounds, _offsets(batch, "loss_mask")):
                raise _damaged(path, "loss_mask and input_ids differ in length")
        self._starts = _row_starts(batches)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(bounds) for bounds in self._bounds)])
        """Tokens of each row, int64."""

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        batch, row = _locate(self._starts, index)
        start, end = self._bounds[batch][row : row + 2]
        return self._ids[batch][start:end].astype(np.int64), self._masks[batch][start:end].copy()


class Prompts(Sequence[Prompt]):
    """Prompts to answer; the id of a prompt is its row number."""

    def __init__(self, batches: list[pa.RecordBatch]) -> None:
        self._batches = batches
        self._starts = _row_starts(batches)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number, row = _locate(self._starts, index)
        batch = self._batches[number]
        return Prompt(
            id=self._starts[number] + row,
            token_ids=tuple(batch.column("prompt_ids")[row].as_py()),
            text=batch.column("prompt_text")[row].as_py(),
            reference=batch.column("reference")[row].as_py(),
        )


def open_sequences(folder: Path, split: str) -> Sequences:
    """The sequences of a split, memory-mapped.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds prompts.
    """
    path = split_path(folder, split)
    return Sequences(_open(path, "sequences"), path)


def open_prompts(folder: Path, split: str) -> Prompts:
    """The prompts of a split, memory-mapped.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds sequences.
    """
    return Prompts(_open(split_path(folder, split), "prompts"))


def rows_kind(folder: Path, split: str) -> str:
    """What a split holds, `sequences` or `prompts`, from the head of its file.

    Raises:
        DataError: there is no such split, or the file is damaged.
    """
    path = split_path(folder, split)
    try:
        with pa.memory_map(str(path)) as file:
            return str((pa.ipc.open_file(file).schema.metadata or {}).get(b"rows", b"").decode())
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run the prepare stage that should have written this split") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error


def _open(path: Path, kind: RowKind) -> list[pa.RecordBatch]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; run the prepare stage that should have written this split")
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error
    found = (reader.schema.metadata or {}).get(b"rows", b"").decode()
    if found != kind:
        written_for = {"sequences": "to learn (SFT)", "prompts": "to answer (RL, validation by reward)"}
        raise DataError(
            f"{path} holds {found or 'unknown rows'}, but {kind} {written_for[kind]} are needed; "
            "prepare the data with the recipe of the stage that reads it"
        )
    if not reader.schema.equals(SCHEMAS[kind]):
        raise _damaged(path, f"its columns are {', '.join(reader.schema.names)}")
    return batches


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); delete it and run the prepare stage again")


def _offsets(batch: pa.RecordBatch, column: str) -> np.ndarray:
    return batch.column(column).offsets.to_numpy().astype(np.int64)


def _values(batch: pa.RecordBatch, column: str) -> np.ndarray:
    return batch.column(column).values.to_numpy()


def _row_starts(batches: list[pa.RecordBatch]) -> list[int]:
    """First row of each batch, and the number of rows at the end."""
    return np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()


def _locate(starts: list[int], index: int) -> tuple[int, int]:
    """Batch and row in it. Negative numbers count from the end."""
    if not -starts[-1] <= index < starts[-1]:
        raise IndexError(f"row {index} of {starts[-1]}")
    index %= starts[-1]
    batch = bisect_right(starts, index) - 1
    return batch, index - starts[batch]
