"""Reading what the `prepare` stage wrote: memory-mapped sequences to learn, pairs to compare, or prompts to complete.

One Arrow IPC file per split, `train.arrow` and perhaps `validation.arrow`; the schema's metadata says which of these
kinds of rows it holds. Making these files is `prepare.py`; batches and their order are elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cosmos_core.data.images import ImageRef
from cosmos_core.errors import DataError
from cosmos_core.types import Prompt

RowKind = Literal["sequences", "pairs", "prompts"]

_IDS, _MASK = pa.list_(pa.int32()), pa.list_(pa.uint8())


def _schema(kind: RowKind, columns: dict[str, pa.DataType]) -> pa.Schema:
    """Return the schema of a kind of rows, each of which ends with its location."""
    return pa.schema({**columns, "place": pa.string()}, metadata={b"rows": kind.encode()})


SCHEMAS: dict[RowKind, pa.Schema] = {
    "sequences": _schema("sequences", {"input_ids": _IDS, "loss_mask": _MASK}),
    "pairs": _schema("pairs", {"chosen_ids": _IDS, "chosen_mask": _MASK, "rejected_ids": _IDS, "rejected_mask": _MASK}),
    "prompts": _schema("prompts", {"prompt_ids": _IDS, "prompt_text": pa.string(), "reference": pa.string()}),
}
_IMAGE = pa.struct({"path": pa.string(), "content": pa.large_binary(), "sha256": pa.string()})
_VISUAL = _schema("sequences", {"input_ids": _IDS, "loss_mask": _MASK, "images": pa.list_(_IMAGE)})
_ROOT = b"images below"
_PROMPT_COLUMNS = ("prompt_ids", "prompt_text", "reference")
_NEEDED_FOR = {
    "sequences": "to learn (SFT)",
    "pairs": "to compare (DPO)",
    "prompts": "to complete (RL, validation by reward)",
}


def visual_schema(root: Path) -> pa.Schema:
    """Return the schema of sequences that may show images; `root` is what their paths are relative to."""
    return _VISUAL.with_metadata({**_VISUAL.metadata, _ROOT: str(root).encode()})


def split_path(folder: Path, split: str) -> Path:
    """Return where a split lies in the data folder of a `prepare` stage."""
    return folder / f"{split}.arrow"


def has_split(folder: Path, split: str) -> bool:
    """Return whether the data folder has this split."""
    return split_path(folder, split).is_file()


class Sequences:
    """Token sequences to learn: `[i]` is `(input_ids int64, loss_mask uint8)`, copied out of the mapped file."""

    def __init__(self, table: pa.Table, path: Path, ids: str = "input_ids", mask: str = "loss_mask") -> None:
        """`ids` and `mask` name the columns."""
        self._ids, self._masks = table[ids], table[mask]
        self.lengths: np.ndarray = pc.list_value_length(self._ids).to_numpy().astype(np.int64)
        """Tokens of each row, int64."""
        if not np.array_equal(self.lengths, pc.list_value_length(self._masks).to_numpy()):
            raise _damaged(path, f"{mask} and {ids} differ in length")
        self._images = table["images"] if "images" in table.column_names else None
        self.has_images = self._images is not None and bool(pc.max(pc.list_value_length(self._images)).as_py())
        """Whether any row shows one."""
        self._root = Path((table.schema.metadata or {}).get(_ROOT, b"").decode())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = (column[index].values.to_numpy() for column in (self._ids, self._masks))
        return ids.astype(np.int64), mask.copy()

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row, in the order in which it shows them; paths are absolute."""
        if self._images is None:
            return ()
        refs = [ImageRef(**image) for image in self._images[index].as_py()]
        return tuple(ref if ref.path is None else ref._replace(path=str(self._root / ref.path)) for ref in refs)


class Pairs:
    """Completions to compare: `chosen[i]` and `rejected[i]` begin with the same prompt, of which nothing is learned."""

    def __init__(self, table: pa.Table, path: Path) -> None:
        self.path = path
        self.chosen = Sequences(table, path, "chosen_ids", "chosen_mask")
        self.rejected = Sequences(table, path, "rejected_ids", "rejected_mask")

    def __len__(self) -> int:
        return len(self.chosen)


class Prompts(Sequence[Prompt]):
    """Prompts to complete; the id of a prompt is its row number."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        ids, text, reference = (self._table[name][index].as_py() for name in _PROMPT_COLUMNS)
        return Prompt(id=index % len(self), token_ids=tuple(ids), text=text, reference=reference)


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
    with _reader(split_path(folder, split)) as reader:
        return _kind_of(reader.schema)


def _open(path: Path, kind: RowKind) -> pa.Table:
    with _reader(path) as reader:
        table = reader.read_all()
        table.validate(full=True)
    if (found := _kind_of(table.schema)) != kind:
        raise DataError(
            f"{path} holds {found or 'unknown rows'}, but {kind} {_NEEDED_FOR[kind]} are needed; "
            "prepare the data with the recipe of the stage that reads it"
        )
    if not any(table.schema.equals(schema) for schema in (SCHEMAS[kind], _VISUAL) if _kind_of(schema) == kind):
        raise _damaged(path, f"its columns are {', '.join(table.column_names)}")
    return table


@contextmanager
def _reader(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    try:
        yield pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run the prepare stage that should have written this split") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from error


def _kind_of(schema: pa.Schema) -> str:
    return (schema.metadata or {}).get(b"rows", b"").decode()


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); delete it and run the prepare stage again")
