"""Reading what the `prepare` stage wrote: memory-mapped sequences to learn, pairs to compare, or prompts to complete.

One Arrow IPC file per split, `train.arrow` and perhaps `validation.arrow`; the schema's metadata says which of these
kinds of rows it holds. Making these files is `prepare.py`; batches and their order are elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, overload

import numpy as np
import pyarrow as pa

from cosmos_core.data.images import ImageRef
from cosmos_core.errors import DataError
from cosmos_core.types import Prompt

RowKind = Literal["sequences", "pairs", "prompts"]

SCHEMAS: dict[RowKind, pa.Schema] = {
    "sequences": pa.schema(
        {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "place": pa.string()},
        metadata={b"rows": b"sequences"},
    ),
    "pairs": pa.schema(
        {
            "chosen_ids": pa.list_(pa.int32()),
            "chosen_mask": pa.list_(pa.uint8()),
            "rejected_ids": pa.list_(pa.int32()),
            "rejected_mask": pa.list_(pa.uint8()),
            "place": pa.string(),
        },
        metadata={b"rows": b"pairs"},
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


_IMAGES = pa.field(
    "images", pa.list_(pa.struct({"path": pa.string(), "content": pa.large_binary(), "sha256": pa.string()}))
)
_VISUAL = pa.schema([*list(SCHEMAS["sequences"])[:2], _IMAGES, SCHEMAS["sequences"].field("place")])
_ROOT = b"images below"


def visual_schema(root: Path) -> pa.Schema:
    """Return the schema of sequences that may show images; `root` is what their paths are relative to."""
    return _VISUAL.with_metadata({b"rows": b"sequences", _ROOT: str(root).encode()})


def split_path(folder: Path, split: str) -> Path:
    """Return where a split lies in the data folder of a `prepare` stage."""
    return folder / f"{split}.arrow"


def has_split(folder: Path, split: str) -> bool:
    """Return whether the data folder has this split."""
    return split_path(folder, split).is_file()


class Sequences:
    """Token sequences to learn: `[i]` is `(input_ids int64, loss_mask uint8)`, copied out of the mapped file."""

    def __init__(
        self, batches: list[pa.RecordBatch], path: Path, ids: str = "input_ids", mask: str = "loss_mask"
    ) -> None:
        """`ids` and `mask` name the columns."""
        self._bounds = [_offsets(batch, ids) for batch in batches]
        self._ids = [_values(batch, ids) for batch in batches]
        self._masks = [_values(batch, mask) for batch in batches]
        for batch, bounds in zip(batches, self._bounds, strict=True):
            if not np.array_equal(bounds, _offsets(batch, mask)):
                raise _damaged(path, f"{mask} and {ids} differ in length")
        self._images = [batch.column("images") for batch in batches if "images" in batch.schema.names]
        self.has_images = any(len(column.values) for column in self._images)
        """Whether any row shows one."""
        self._root = Path((batches[0].schema.metadata or {}).get(_ROOT, b"").decode()) if batches else Path()
        self._starts = _row_starts(batches)
        self.lengths = np.concatenate([np.zeros(0, np.int64), *(np.diff(bounds) for bounds in self._bounds)])
        """Tokens of each row, int64."""

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        batch, row = _locate(self._starts, index)
        start, end = self._bounds[batch][row : row + 2]
        return self._ids[batch][start:end].astype(np.int64), self._masks[batch][start:end].copy()

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row, in the order in which it shows them; paths are absolute."""
        if not self.has_images:
            return ()
        batch, row = _locate(self._starts, index)
        refs = [ImageRef(**image) for image in self._images[batch][row].as_py()]
        return tuple(ref if ref.path is None else ref._replace(path=str(self._root / ref.path)) for ref in refs)


class Pairs:
    """Completions to compare: `chosen[i]` and `rejected[i]` begin with the same prompt, of which nothing is learned."""

    def __init__(self, batches: list[pa.RecordBatch], path: Path) -> None:
        self.path = path
        self.chosen = Sequences(batches, path, "chosen_ids", "chosen_mask")
        self.rejected = Sequences(batches, path, "rejected_ids", "rejected_mask")

    def __len__(self) -> int:
        return len(self.chosen)


class Prompts(Sequence[Prompt]):
    """Prompts to complete; the id of a prompt is its row number."""

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
    """Return the sequences of a split, memory-mapped.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds other rows.
    """
    path = split_path(folder, split)
    return Sequences(_open(path, "sequences"), path)


def open_pairs(folder: Path, split: str) -> Pairs:
    """Return the pairs of a split, memory-mapped.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds other rows.
    """
    path = split_path(folder, split)
    return Pairs(_open(path, "pairs"), path)


def open_prompts(folder: Path, split: str) -> Prompts:
    """Return the prompts of a split, memory-mapped.

    Raises:
        DataError: there is no such split, the file is damaged, or it holds other rows.
    """
    return Prompts(_open(split_path(folder, split), "prompts"))


def shows_images(folder: Path) -> bool:
    """Return whether any row of any split shows an image.

    Raises:
        DataError: a file is damaged.
    """
    splits = [file.stem for file in folder.glob("*.arrow") if rows_kind(folder, file.stem) == "sequences"]
    return any(open_sequences(folder, split).has_images for split in splits)


def rows_kind(folder: Path, split: str) -> str:
    """Return what a split holds, `sequences`, `pairs` or `prompts`, from the head of its file.

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
        written_for = {
            "sequences": "to learn (SFT)",
            "pairs": "to compare (DPO)",
            "prompts": "to complete (RL, validation by reward)",
        }
        raise DataError(
            f"{path} holds {found or 'unknown rows'}, but {kind} {written_for[kind]} are needed; "
            "prepare the data with the recipe of the stage that reads it"
        )
    if not reader.schema.equals(SCHEMAS[kind]) and not (kind == "sequences" and reader.schema.equals(_VISUAL)):
        raise _damaged(path, f"its columns are {', '.join(reader.schema.names)}")
    return batches


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); delete it and run the prepare stage again")


def _offsets(batch: pa.RecordBatch, column: str) -> np.ndarray:
    return batch.column(column).offsets.to_numpy().astype(np.int64)


def _values(batch: pa.RecordBatch, column: str) -> np.ndarray:
    return batch.column(column).values.to_numpy()


def _row_starts(batches: list[pa.RecordBatch]) -> list[int]:
    """Return the first row of each batch, and the number of rows at the end."""
    return np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()


def _locate(starts: list[int], index: int) -> tuple[int, int]:
    """Return the batch and the row in it. Negative numbers count from the end."""
    if not -starts[-1] <= index < starts[-1]:
        raise IndexError(f"row {index} of {starts[-1]}")
    index %= starts[-1]
    batch = bisect_right(starts, index) - 1
    return batch, index - starts[batch]
