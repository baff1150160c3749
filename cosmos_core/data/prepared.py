"""Reader of the files of a `prepare` stage: memory-mapped tables with a row for each prepared row.

There is one Arrow IPC file per split: `train.arrow` and optionally `validation.arrow` and `data_term.arrow`. The
schema's metadata names the kind of rows (`kinds/`). `prepare.py` writes these files.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.data.kinds.base import (
    IMAGE_ROOT_KEY,
    LOCATION_COLUMN,
    TRAIN_SPLIT,
    VALIDATION_SPLIT,
    HeldOutSet,
    RowKind,
)
from cosmos_core.data.kinds.registry import list_row_kind_names, load_row_kind
from cosmos_core.data.order import Mixture
from cosmos_core.errors import DataError, first_line
from cosmos_core.run.files import read_json_object
from cosmos_core.types import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T_co = TypeVar("T_co", covariant=True)
DATA_TERM_SPLIT = "data_term"
"""Name of the split with the rows of a supervised loss that is trained in addition to the RL loss."""
HELD_OUT_SEQUENCES_SPLIT = "held_out"
"""Name of the split with held-out rows as sequences to learn, if the split `validation` has them as prompts."""
STATISTICS_FILE = "statistics.json"
"""Name of the file with the statistics of each split, and with the data sets of a mixture."""
HELD_OUT_REMEDY = "name validation.dataset, or split some off with train.train_policy.dataset.test_size"


def get_split_path(folder: Path, split: str) -> Path:
    """Return the path of the file of a split in the data folder of a `prepare` stage."""
    return folder / f"{split}.arrow"


def has_split(folder: Path, split: str) -> bool:
    """Return whether the data folder of a `prepare` stage has this split."""
    return get_split_path(folder, split).is_file()


def read_mixture(split_path: Path) -> Mixture | None:
    """Return the mixture of data sets from which the rows in the file of a split are; None if all rows are from one
    data set."""
    split_statistics = read_json_object(split_path.with_name(STATISTICS_FILE)).get(split_path.stem) or {}
    if not (mixture_sources := split_statistics.get("sources")):
        return None
    return Mixture(*(tuple(source[name] for source in mixture_sources) for name in ("source", "rows", "weight")))


class RowImages:
    """The images of the rows of a table, in the order in which each row shows them."""

    def __init__(self, table: pa.Table) -> None:
        self._image_column = table["images"] if "images" in table.column_names else None
        self._image_root = Path((table.schema.metadata or {}).get(IMAGE_ROOT_KEY, b"").decode())
        self.num_images: np.ndarray = np.zeros(len(table), dtype=np.int64)
        if self._image_column is not None:
            self.num_images = pc.fill_null(pc.list_value_length(self._image_column), 0).to_numpy().astype(np.int64)

    def __getitem__(self, index: int) -> tuple[ImageRef, ...]:
        """Return the images of row number `index`, in the order in which the row shows them, with absolute paths."""
        if self._image_column is None:
            return ()
        images = [ImageRef(**image) for image in self._image_column[index].as_py() or ()]
        return tuple(ref if ref.path is None else replace(ref, path=str(self._image_root / ref.path)) for ref in images)


class IndexedSequence(Sequence[T_co]):
    """Sequence with negative indices and slices, whose subclasses define only `__len__` and `read_item(index)`."""

    @abstractmethod
    def read_item(self, index: int) -> T_co:
        """Return the item of the sequence at `index`, which is not negative and less than the sequence's length."""

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> list[T_co]: ...
    def __getitem__(self, index: int | slice) -> T_co | list[T_co]:
        if isinstance(index, slice):
            return [self.read_item(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.read_item(index % len(self))


def open_table(folder: Path, split: str, *row_kinds: RowKind) -> pa.Table:
    """Return the memory-mapped Arrow table with the prepared rows of a split. Raise DataError if the split does not
    exist, its file is damaged, or its rows are of no kind in `row_kinds` (empty: of no known kind)."""
    return _open_arrow_table(get_split_path(folder, split), *row_kinds)


def has_images(folder: Path) -> bool:
    """Return whether a prepared row in any file of `folder` shows an image; raise DataError if a file is damaged."""
    return any(RowImages(_open_arrow_table(file)).num_images.any() for file in folder.glob("*.arrow"))


def check_token_ids(folder: Path, num_embeddings: int) -> None:
    """Raise DataError, which names the row, if the model has no embedding for a token of prepared rows of text."""
    for table, column_name in _iterate_id_columns(folder):
        max_token_id = pc.max(pc.list_flatten(table[column_name])).as_py()
        if max_token_id is not None and max_token_id >= num_embeddings:
            rows = zip(table[LOCATION_COLUMN], table[column_name], strict=True)
            location = next(row_location for row_location, ids in rows if max(ids.as_py(), default=0) >= num_embeddings)
            problem = f"token id {max_token_id} has no embedding, of which the model has {num_embeddings:,}"
            remedy = "save the tokenizer of the model beside it, or resize its embeddings"
            raise DataError(f"{location}: {problem}; {remedy}")


def find_longest_row_length(folder: Path, id_column_suffix: str = "_ids", split: str = "*") -> int:
    """Return the number of tokens of the longest prepared row of text in `split` ("*": in all splits). Only columns
    whose names end with `id_column_suffix` count. Raise DataError if a file is damaged."""
    id_columns = (table[name] for table, name in _iterate_id_columns(folder, split) if name.endswith(id_column_suffix))
    max_column_lengths = (pc.max(pc.list_value_length(column)).as_py() for column in id_columns)
    return max((length or 0 for length in max_column_lengths), default=0)


def _iterate_id_columns(folder: Path, split: str = "*") -> Iterator[tuple[pa.Table, str]]:
    for table in map(_open_arrow_table, sorted(folder.glob(f"{split}.arrow"))):
        yield from ((table, column_name) for column_name in table.column_names if column_name.endswith("_ids"))


def read_row_kind(folder: Path, split: str) -> str:
    """Return the kind of rows in a split, such as `sequences` or `prompts`, from the header of its file; raise
    DataError if the split does not exist, or its file is damaged."""
    with _open_arrow_reader(path := get_split_path(folder, split)) as reader:
        return _find_row_kind(path, reader.schema).name


def require_held_out_rows(folder: Path) -> None:
    """Raise DataError if the data folder of a `prepare` stage has no held-out rows."""
    if not has_split(folder, VALIDATION_SPLIT):
        raise DataError(f"{folder} has no held-out rows; {HELD_OUT_REMEDY}")


def open_held_out(folder: Path, algorithm: AlgorithmConfig, model: PolicyConfig, adapter: Any = None) -> HeldOutSet:
    """Return the held-out rows in the data folder of a `prepare` stage. `adapter`, the model's adapter, is needed only
    for diffusion models. Raise DataError if no rows are held out, or a file is damaged."""
    require_held_out_rows(folder)
    return load_row_kind(read_row_kind(folder, VALIDATION_SPLIT)).open_held_out(folder, algorithm, model, adapter)


def _open_arrow_table(table_path: Path, *row_kinds: RowKind) -> pa.Table:
    with _open_arrow_reader(table_path) as reader:
        table = reader.read_all()
        table.validate(full=True)
    row_kind = _find_row_kind(table_path, table.schema, *row_kinds)
    if not any(table.schema.equals(schema) for schema in (row_kind.schema, row_kind.schema_with_images)):
        raise make_damaged_file_error(table_path, f"its columns are {', '.join(table.column_names)}")
    return table


@contextmanager
def _open_arrow_reader(path: Path) -> Iterator[pa.RecordBatchFileReader]:
    try:
        yield pa.ipc.open_file(pa.memory_map(str(path)))
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; run the prepare stage that should have written this split") from None
    except (pa.ArrowException, OSError) as error:
        raise make_damaged_file_error(path, first_line(error)) from error


def _find_row_kind(path: Path, schema: pa.Schema, *row_kinds: RowKind) -> RowKind:
    row_kind_name = (schema.metadata or {}).get(b"rows", b"").decode()
    if row_kind_name not in ([row_kind.name for row_kind in row_kinds] or list_row_kind_names()):
        expected_kind = f"{row_kinds[0].name} {row_kinds[0].rows_purpose}" if row_kinds else "known ones"
        remedy = "prepare the data with the recipe of the stage that reads it"
        raise DataError(f"{path} holds {row_kind_name or 'unknown rows'}, but {expected_kind} are needed; {remedy}")
    return load_row_kind(row_kind_name)


def preview_rows(folder: Path, tokenizer: PreTrainedTokenizerBase, num_rows: int) -> list[str]:
    """Return lines of text that show the first `num_rows` prepared training rows, with one line for consecutive tokens
    that are all learned or all masked."""
    table = open_table(folder, TRAIN_SPLIT)
    previewed_columns = [name for name in table.column_names if name not in {"images", "prompt_text"}]
    preview_lines = []
    for row in table.select(previewed_columns).slice(0, num_rows).to_pylist():
        preview_lines.append(f"{row[LOCATION_COLUMN]}:")
        for sequence_name in [name.removesuffix("_ids") for name in previewed_columns if name.endswith("_ids")]:
            has_one_sequence, token_ids = sequence_name == "input", row[f"{sequence_name}_ids"]
            loss_mask = row.get("loss_mask" if has_one_sequence else f"{sequence_name}_mask") or [0] * len(token_ids)
            for is_learned, token_run in groupby(zip(loss_mask, token_ids, strict=True), key=itemgetter(0)):
                decoded_text = str(tokenizer.decode([token_id for _, token_id in token_run]))
                sequence_label = "" if has_one_sequence else f"{sequence_name} "
                preview_lines.append(f"  {sequence_label}{'learned' if is_learned else 'masked'}: {decoded_text!r}")
        preview_lines += [f"  {name}: {row[name]!r}" for name in ("label", "reference") if name in row]
    return preview_lines


def make_damaged_file_error(path: Path, damage: str) -> DataError:
    """Return the DataError to raise for the damaged prepared file `path`; `damage` is the part of its message that says
    what is wrong with the file."""
    return DataError(f"{path} is damaged ({damage}); delete it and run the prepare stage again")
