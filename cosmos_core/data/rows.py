"""Rows of a data set as pairs of location and dictionary, from a local file or folder, the Hub, or a generator.

Error messages name a row by its location: "train.jsonl:12", in lines from 1, or "name[train] row 12", from 0.
`formats.py` reads file formats, `messages.py` interprets rows.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, compress, islice
from pathlib import Path

import numpy as np
from huggingface_hub import constants

from cosmos_core.config.media import media_settings
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.dataset import (
    DATA_SUFFIXES,
    GENERATED,
    DatasetConfig,
    RowsConfig,
    data_suffix,
    generator_of,
)
from cosmos_core.data.formats import Located, RowPart, dataset_part, open_part, reader_errors
from cosmos_core.data.generated import make_generated_part
from cosmos_core.data.order import shuffled
from cosmos_core.data.user_dataset import Opener
from cosmos_core.errors import DataError, first_line
from cosmos_core.models.model_files import hub_is_reachable
from cosmos_core.registry import is_code
from cosmos_core.run.stage import Stage
from cosmos_core.transient import is_machine_error, is_network_error

_TRAIN = "train"
_SLICE = re.compile(r"(.+?)\[(-?\d+%?)?:(-?\d+%?)?\]")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\b")
"""Start of the name of one of the files into which `datasets` divides a split; the group is the split."""
_HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")


class Rows:
    """Rows of one or several files (parts) with their locations, or a selection of rows, read anew per iteration."""

    def __init__(self, parts: Sequence[RowPart], folder: Path, chosen_rows: np.ndarray | None = None) -> None:
        """Join the rows of files or splits (`parts`), in which paths are relative to `folder`; the mask `chosen_rows`
        selects rows (None: all rows)."""
        self.folder = folder
        self._row_parts, self._chosen_rows = parts, chosen_rows
        self._num_all_rows = sum(part.num_rows for part in parts)

    def __len__(self) -> int:
        return self._num_all_rows if self._chosen_rows is None else int(self._chosen_rows.sum())

    @property
    def is_generated(self) -> bool:
        """Return whether a generator makes the rows, which may be slow."""
        return any(part.name.startswith(GENERATED) for part in self._row_parts)

    def __iter__(self) -> Iterator[Located]:
        rows = chain.from_iterable(part.read() for part in self._row_parts)
        return rows if self._chosen_rows is None else compress(rows, self._chosen_rows)

    def first(self, count: int | None) -> Rows:
        """Return the first `count` rows; None returns all rows."""
        if count is None or count >= len(self):
            return self
        chosen_rows = np.ones(self._num_all_rows, bool) if self._chosen_rows is None else self._chosen_rows
        return Rows(self._row_parts, self.folder, chosen_rows & (np.cumsum(chosen_rows) <= count))

    def where(self, chosen_rows: np.ndarray) -> Rows:
        """Return the rows that the mask `chosen_rows`, with an entry per row, selects."""
        if self._chosen_rows is not None:
            new_chosen_rows = self._chosen_rows.copy()
            new_chosen_rows[self._chosen_rows] = chosen_rows
            chosen_rows = new_chosen_rows
        return Rows(self._row_parts, self.folder, chosen_rows)


def load_rows(dataset: RowsConfig, key: str = "dataset", opener: Opener | None = None) -> Rows:
    """Return the rows of all splits of a data set, in order; `key` is the name of the data set's table in the TOML, for
    messages. Without an `opener` of user-defined data set classes, such classes are not allowed.

    Raises:
        ConfigError: the user's class does not exist.
        DataError: the file, folder, split or Hub data set is missing or malformed, or holds no rows.
    """
    if not dataset.name.strip():
        raise DataError(f"{key}.name is empty; give a file, a folder or a Hub id")
    if generator := generator_of(dataset.name):
        if dataset.split != (_TRAIN,):
            raise DataError(f"{key}.split: a generator has only the split 'train'; set {key}.arguments.size")
        return Rows([make_generated_part(generator, dataset.arguments, key)], Path.cwd())
    # Path.expanduser and Path.exists raise for some names, unlike the functions of os.path.
    path = Path(os.path.expanduser(dataset.name))
    if os.path.exists(path):
        path = _folder_of_rows(path, dataset.subset)
        parts = [part for split in dataset.split for part in _find_split_parts(path, split, key)]
    elif is_code(dataset.name) and opener:
        parts = [opener.make_part(dataset.name, key)]
    elif _looks_like_path(dataset.name):
        note = "" if path.is_absolute() else f" in {str(Path.cwd())!r} or beside the file that is run"
        raise DataError(f"{key}.name = {str(path)!r}: it does not exist{note}; give a file, a folder or a Hub id")
    else:
        parts = [_load_hub_split(dataset, split, key) for split in dataset.split]
    if not any(part.num_rows for part in parts):  # some shards may be empty, but not all shards
        raise DataError(f"{parts[0].name}: file holds no rows; {key}.name needs at least one")
    folder = path if path.is_dir() else path.parent
    return Rows(parts, folder.absolute() if os.path.exists(path) else Path.cwd())


def training_sources(stage: Stage) -> dict[str, AlgorithmConfig]:
    """Return the algorithm's table for each data set of training rows, by the key that names the data set; the stage's
    key `data` overrides the data sets of the recipe."""
    policy = stage.recipe.train.train_policy
    name, key = str(stage.data), f"stage {stage.name!r}: data"
    if stage.data is None:
        name, key = media_settings(stage.recipe).annotation_path, "custom.dataset.annotation_path"
    if not name:
        return dict(policy.sources)
    keys = {name: getattr(policy.dataset, name) for name in ("test_size", "max_skipped_fraction", "keep", "pass_rates")}
    return {key: policy.derive(datasets=(), dataset=DatasetConfig(name=name, **keys))}


def has_local_split(path: Path, split: str) -> bool:
    """Return whether a folder of data files has files named for this split."""
    return path.is_dir() and any(_has_split_name(file, split) for file in _data_files(path))


def split_rows(rows: Rows, test_size: int | float, seed: int) -> tuple[Rows, Rows]:
    """Divide rows into (train, held-out), both in the order of the file; the arguments are those of `held_out_mask`."""
    held_out = held_out_mask(len(rows), test_size, seed)
    return rows.where(~held_out), rows.where(held_out)


def held_out_mask(num_rows: int, test_size: int | float, seed: int) -> np.ndarray:
    """Return the mask of the held-out rows, bool, (num_rows,), which are chosen at random by the seed alone.

    `test_size` is the number of held-out rows, or a fraction below 1 of all rows, which is rounded up.

    Raises:
        DataError: no row would be left to train on.
    """
    count = math.ceil(num_rows * test_size) if isinstance(test_size, float) else test_size
    if count >= num_rows:
        raise DataError(f"test_size = {test_size} of {num_rows} rows leaves none to train on; lower dataset.test_size")
    is_held_out = np.zeros(num_rows, dtype=bool)
    is_held_out[shuffled(num_rows, seed)[:count]] = True
    return is_held_out


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or bool(data_suffix(name))


def _find_split_parts(path: Path, split: str, key: str) -> list[RowPart]:
    """Return the parts of a split, or of a slice in the notation of `datasets`: `train[:48]`, `train[10%:]`."""
    match = _SLICE.fullmatch(split)
    if match is None:
        return _local_parts(path, split, key)
    parts = _local_parts(path, match[1], key)
    total = sum(part.num_rows for part in parts)
    first, last, _ = slice(*(_parse_slice_bound(text, total) for text in match.groups()[1:])).indices(total)
    chosen, start = [], 0
    for part in parts:
        low, high = max(first - start, 0), min(last - start, part.num_rows)
        if low < high:
            chosen.append(RowPart(part.name, high - low, partial(_rows_between, part, low, high)))
        start += part.num_rows
    if not chosen:
        raise DataError(f"{key}.split = {split!r} names no row of {total}; name others")
    return chosen


def _rows_between(part: RowPart, low: int, high: int) -> Iterator[Located]:
    return islice(part.read(), low, high)


def _parse_slice_bound(text: str | None, total: int) -> int | None:
    if text is None:
        return None
    return round(total * int(text[:-1]) / 100) if text.endswith("%") else int(text)


def _local_parts(path: Path, split: str, key: str) -> list[RowPart]:
    if path.is_dir() and _is_saved(path):
        return [_load_saved_split(path, split, key)]
    if path.is_dir():
        return [_read(file) for file in _files_of_split(path, split, key)]
    if split != _TRAIN:
        raise DataError(f"{key}.split = {split!r}, but {path} is one file, which has only the split 'train'")
    if not data_suffix(path.name):
        raise DataError(f"{key}.name: {path.name} has the suffix {path.suffix!r}; known: {', '.join(DATA_SUFFIXES)}")
    return [_read(path)]


def _read(file: Path) -> RowPart:
    # The file name becomes part of row locations in messages and in prepared rows.
    if re.search("[\0-\x1f\ud800-\udfff]", file.name):
        raise DataError(f"{file.name!r}: the name of a data file must be UTF-8 without control characters; rename it")
    return open_part(file)


def _is_saved(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` has written the folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _data_files(folder: Path) -> list[Path]:
    files = (file for file in folder.iterdir() if data_suffix(file.name) and not file.name.startswith("."))
    return sorted(file for file in files if file.is_file())


def _has_split_name(file: Path, split: str) -> bool:
    """Return whether a file name is that of a split: `train.jsonl`, `train-00000-of-00002.parquet`, `train_1.json`; but
    `train_sft-00000-of-00001.parquet` is of the split `train_sft`."""
    if match := _SHARD.match(file.name):
        return match[1] == split
    return file.name.startswith(tuple(split + separator for separator in ".-_"))


def _files_of_split(folder: Path, split: str, key: str) -> list[Path]:
    files = _data_files(folder)
    chosen = [file for file in files if _has_split_name(file, split)]
    splits = {match[1] for file in files if (match := _SHARD.match(file.name))}
    if not chosen and split == _TRAIN and len(splits) < 2:  # files without split names are training rows
        chosen = [file for file in files if not any(_has_split_name(file, name) for name in _HELD_OUT_SPLITS)]
    if not chosen:
        contents = ", ".join(file.name for file in files[:5]) or f"no data file{_mention_subfolders(folder)}"
        remedy = f"; set {key}.split to one of {', '.join(sorted(splits))}" if splits else ""
        raise DataError(f"{key}.name: {folder} has no file for the split {split!r}; it holds {contents}{remedy}")
    return chosen


def _folder_of_rows(path: Path, subset: str) -> Path:
    """Return the path with the data files of a data set. A copy of a Hub data set has its files in a sub-folder: the
    one named `subset`, or else the only sub-folder with data files."""
    if not path.is_dir() or _is_saved(path):
        return path
    if subset and (path / subset).is_dir():
        return path / subset
    subfolders = _subfolders(path)
    return subfolders[0] if len(subfolders) == 1 and not _data_files(path) else path


def _subfolders(folder: Path) -> list[Path]:
    """Return the sub-folders with data files, except hidden ones."""
    folders = (each for each in folder.iterdir() if each.is_dir() and not each.name.startswith("."))
    return sorted(each for each in folders if _data_files(each))


def _mention_subfolders(folder: Path) -> str:
    """Return the part of a message that names sub-folders with data files."""
    names = " or ".join(repr(str(each)) for each in _subfolders(folder)[:5])
    return f", and its folders are not looked into; name {names}" if names else ""


def _load_saved_split(path: Path, split: str, key: str) -> RowPart:
    import datasets

    with reader_errors(f"{key}.name: {path} cannot be read by `datasets`"):
        saved = datasets.load_from_disk(str(path))
    splits = saved if isinstance(saved, datasets.DatasetDict) else {_TRAIN: saved}
    if split not in splits:
        raise DataError(f"{key}.split = {split!r}, but {path} has {', '.join(splits)}")
    return dataset_part(splits[split], f"{path.name}[{split}]")


def _load_hub_split(dataset: RowsConfig, split: str, key: str) -> RowPart:
    import datasets

    try:
        with _set_offline_if_unreachable():
            subset, revision = dataset.subset or None, dataset.revision or None
            loaded = datasets.load_dataset(dataset.name, subset, revision=revision, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if is_machine_error(error) or (is_network_error(error) and hub_is_reachable()):
            raise
        raise DataError(
            f"{key}.name = {dataset.name!r} is no local file and could not be had from the Hub: {first_line(error)}; "
            "check the name, the split and the network, or give a local path"
        ) from error
    return dataset_part(loaded, f"{dataset.name}[{split}]")


@contextmanager
def _set_offline_if_unreachable() -> Iterator[None]:
    """Restrict `datasets` to its cache while the Hub is unreachable; otherwise it retries each file for 20 seconds."""
    import datasets

    old_offline_flags = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not hub_is_reachable():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = old_offline_flags
