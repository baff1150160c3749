"""Reader of the files of a `prepare` stage: memory-mapped sequences to learn, pairs to compare, or prompts to complete.

There is one Arrow IPC file per split: `train.arrow` and optionally `validation.arrow` and `data_term.arrow`. The
schema's metadata names the kind of rows. `prepare.py` writes these files; batches and their order are elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cosmos_core.data.lazy import LazySequence
from cosmos_core.errors import DataError, first_line
from cosmos_core.types import ImageRef, Prompt

RowKind = Literal["sequences", "pairs", "labelled", "prompts", "media", "media_prompts"]
DATA_TERM = "data_term"
"""Name of the split with the rows that are learned in addition to rollouts."""
LEARNED_HELD_OUT = "held_out"
"""Name of the split with held-out rows as sequences to learn, where `validation` has them as prompts to complete."""
MEDIA: tuple[RowKind, ...] = ("media", "media_prompts")
"""Kinds of rows of diffusion models."""

_IDS, _MASK = pa.list_(pa.int32()), pa.list_(pa.uint8())


_ENTRY = pa.struct({"shard": pa.string(), "entry": pa.string()})
LOCATION = "place"
"""Name of the column with the location that a row was read from."""
_MEDIA = {"prompt": pa.string(), "metadata": pa.string(), "text": _ENTRY}


def _schema(kind: RowKind, columns: dict[str, pa.DataType]) -> pa.Schema:
    """Return the schema of a kind of rows, whose last column is the location of the row."""
    return pa.schema({**columns, LOCATION: pa.string()}, metadata={b"rows": kind.encode()})


SCHEMAS: dict[RowKind, pa.Schema] = {
    "sequences": _schema("sequences", {"input_ids": _IDS, "loss_mask": _MASK}),
    "pairs": _schema("pairs", {"chosen_ids": _IDS, "chosen_mask": _MASK, "rejected_ids": _IDS, "rejected_mask": _MASK}),
    "labelled": _schema("labelled", {"label": pa.bool_(), "input_ids": _IDS, "loss_mask": _MASK}),
    "prompts": _schema(
        "prompts",
        {"prompt_ids": _IDS, "prompt_text": pa.string(), "reference": pa.string(), "metadata": pa.string()},
    ),
    "media": _schema("media", {**_MEDIA, "media": _ENTRY, "shape": pa.list_(pa.int32())}),
    "media_prompts": _schema("media_prompts", _MEDIA),
}
_IMAGE = pa.struct({"path": pa.string(), "content": pa.large_binary(), "sha256": pa.string()})
_VISUAL: dict[RowKind, pa.Schema] = {
    kind: schema.insert(len(schema) - 1, pa.field("images", pa.list_(_IMAGE))) for kind, schema in SCHEMAS.items()
}
_ROOT = b"images below"
_PROMPT_COLUMNS = ("prompt_ids", "prompt_text", "reference", "metadata")
_NEEDED_FOR = {
    "sequences": "to learn (SFT)",
    "pairs": "to compare (DPO)",
    "labelled": "with a label (KTO)",
    "prompts": "to complete (RL, validation by reward)",
    "media": "to learn (SFT of a diffusion model)",
    "media_prompts": "to draw from (RL and validation of a diffusion model)",
}


def visual_schema(kind: RowKind, root: Path) -> pa.Schema:
    """Return the schema of rows that may show images; `root` is the folder that image paths are relative to."""
    schema = _VISUAL[kind]
    return schema.with_metadata({**schema.metadata, _ROOT: str(root).encode()})


def split_path(folder: Path, split: str) -> Path:
    """Return the path of the file of a split in the data folder of a `prepare` stage."""
    return folder / f"{split}.arrow"


def has_split(folder: Path, split: str) -> bool:
    """Return whether the data folder of a `prepare` stage has this split."""
    return split_path(folder, split).is_file()


class _Images:
    """The images of the rows of a table, in the order in which each row shows them."""

    def __init__(self, table: pa.Table) -> None:
        self._column = table["images"] if "images" in table.column_names else None
        self._root = Path((table.schema.metadata or {}).get(_ROOT, b"").decode())
        self.counts: np.ndarray = np.zeros(len(table), dtype=np.int64)
        if self._column is not None:
            self.counts = pc.fill_null(pc.list_value_length(self._column), 0).to_numpy().astype(np.int64)

    def __getitem__(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row, with absolute paths."""
        if self._column is None:
            return ()
        refs = [ImageRef(**image) for image in self._column[index].as_py() or ()]
        return tuple(ref if ref.path is None else replace(ref, path=str(self._root / ref.path)) for ref in refs)


class Sequences:
    """Token sequences to learn: `[i]` is `(input_ids int64, loss_mask uint8)`, copied from the memory-mapped file."""

    def __init__(self, table: pa.Table, path: Path, ids: str = "input_ids", mask: str = "loss_mask") -> None:
        """`ids` and `mask` are the names of the columns."""
        self.path = path
        self._ids, self._masks = table[ids], table[mask]
        self.lengths: np.ndarray = pc.list_value_length(self._ids).to_numpy().astype(np.int64)
        """Number of tokens of each row, int64."""
        if not np.array_equal(self.lengths, pc.list_value_length(self._masks).to_numpy()):
            raise _damaged(path, f"{mask} and {ids} differ in length")
        self.labels: np.ndarray | None = table["label"].to_numpy() if "label" in table.column_names else None
        """True for each row whose completion is desirable; None if rows have no label."""
        self._images = _Images(table)
        self.num_images = self._images.counts
        """Number of images of each row, int64."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ids, mask = (column[index].values.to_numpy() for column in (self._ids, self._masks))
        return ids.astype(np.int64), mask.copy()

    def images(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of a row in the order in which the row shows them, with absolute paths."""
        return self._images[index]


class Pairs:
    """Pairs of completions to compare: `chosen[i]` and `rejected[i]` begin with the same prompt, which has no loss."""

    def __init__(self, table: pa.Table, path: Path) -> None:
        self.path = path
        self.chosen = Sequences(table, path, "chosen_ids", "chosen_mask")
        self.rejected = Sequences(table, path, "rejected_ids", "rejected_mask")

    def __len__(self) -> int:
        return len(self.chosen)


class Prompts(LazySequence[Prompt]):
    """Prompts to complete; the id of a prompt is its row number."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._images = _Images(table)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def item(self, index: int) -> Prompt:
        ids, text, reference, columns = (self._table[name][index].as_py() for name in _PROMPT_COLUMNS)
        return Prompt(index, tuple(ids), text, reference, self._images[index], metadata=json.loads(columns))


def open_sequences(folder: Path, split: str, kind: RowKind = "sequences") -> Sequences:
    """Return the memory-mapped sequences of a split; rows of kind `labelled` have labels.

    Raises:
        DataError: the split does not exist, its file is damaged, or it holds rows of another kind.
    """
    path = split_path(folder, split)
    return Sequences(_open(path, kind), path)


def open_pairs(folder: Path, split: str) -> Pairs:
    """Return the memory-mapped pairs of a split.

    Raises:
        DataError: the split does not exist, its file is damaged, or it holds rows of another kind.
    """
    path = split_path(folder, split)
    return Pairs(_open(path, "pairs"), path)


def open_prompts(folder: Path, split: str) -> Prompts:
    """Return the memory-mapped prompts of a split.

    Raises:
        DataError: the split does not exist, its file is damaged, or it holds rows of another kind.
    """
    return Prompts(_open(split_path(folder, split), "prompts"))


def open_table(folder: Path, split: str, *kinds: RowKind) -> pa.Table:
    """Return the table of a split whose rows must be of one of `kinds`.

    Raises:
        DataError: the split does not exist, its file is damaged, or it holds rows of another kind.
    """
    actual_kind = rows_kind(folder, split)
    return _open(split_path(folder, split), next((kind for kind in kinds if kind == actual_kind), kinds[0]))


def shows_images(folder: Path) -> bool:
    """Return whether any row of any split shows an image.

    Raises:
        DataError: a file is damaged.
    """
    tables = (_open(file) for file in folder.glob("*.arrow"))
    return any(bool(_Images(table).counts.any()) for table in tables)


def check_ids(folder: Path, num_embeddings: int) -> None:
    """Check that the model has an embedding for every token of prepared rows of text.

    Raises:
        DataError: a token id has no embedding (the message names the row), or a file is damaged.
    """
    for table, name in _id_columns(folder):
        highest = pc.max(pc.list_flatten(table[name])).as_py()
        if highest is not None and highest >= num_embeddings:
            where = next(i for i, ids in enumerate(table[name]) if max(ids.as_py(), default=0) >= num_embeddings)
            raise DataError(
                f"{table[LOCATION][where]}: token id {highest} has no embedding, of which the model has "
                f"{num_embeddings:,}; save the tokenizer of the model beside it, or resize its embeddings"
            )


def longest_row(folder: Path) -> int:
    """Return the number of tokens of the longest prepared row of text.

    Raises:
        DataError: a file is damaged.
    """
    lengths = (pc.max(pc.list_value_length(table[name])).as_py() for table, name in _id_columns(folder))
    return max((length or 0 for length in lengths), default=0)


def _id_columns(folder: Path) -> Iterator[tuple[pa.Table, str]]:
    """Yield each table of a data folder with the name of each of its columns of token ids."""
    for table in map(_open, sorted(folder.glob("*.arrow"))):
        yield from ((table, name) for name in table.column_names if name.endswith("_ids"))


def rows_kind(folder: Path, split: str) -> str:
    """Return the kind of rows in a split, such as `sequences` or `prompts`, from the header of its file.

    Raises:
        DataError: the split does not exist, or its file is damaged.
    """
    with _reader(split_path(folder, split)) as reader:
        return _kind_of(reader.schema)


def _open(path: Path, kind: RowKind | None = None) -> pa.Table:
    """Return the table of a file whose rows must be of `kind`; None accepts any kind."""
    with _reader(path) as reader:
        table = reader.read_all()
        table.validate(full=True)
    actual_kind = _kind_of(table.schema)
    if kind is None and actual_kind in SCHEMAS:
        kind = actual_kind
    if kind is None or actual_kind != kind:
        raise DataError(
            f"{path} holds {actual_kind or 'unknown rows'}, but {_wanted(kind)} are needed; "
            "prepare the data with the recipe of the stage that reads it"
        )
    if not any(table.schema.equals(schema) for schema in (SCHEMAS[kind], _VISUAL[kind])):
        raise _damaged(path, f"its columns are {', '.join(table.column_names)}")
    return table


@contextmanager
def _reader(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    try:
        yield pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run the prepare stage that should have written this split") from None
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, first_line(error)) from error


def _kind_of(schema: pa.Schema) -> str:
    return (schema.metadata or {}).get(b"rows", b"").decode()


def _wanted(kind: RowKind | None) -> str:
    return "known ones" if kind is None else f"{kind} {_NEEDED_FOR[kind]}"


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); delete it and run the prepare stage again")
