"""Rows of a data set as pairs of location and dictionary, from a local file or folder, the Hub, or a generator.

Messages name a row by its location: "train.jsonl:12" (lines from 1), or "name[train] row 12" (rows from 0).
`formats.py` reads file formats, `messages.py` interprets rows.
"""

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from pathlib import Path

import numpy as np
from huggingface_hub import constants

from cosmos_core.config.inputs import read_card_metadata
from cosmos_core.config.media import image_settings
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.dataset import (
    DATA_SUFFIXES,
    DatasetConfig,
    RowsConfig,
    data_suffix,
    reasoning_gym_generator,
)
from cosmos_core.data.formats import LocatedRow, RowReader, convert_reader_errors, make_dataset_reader, open_row_file
from cosmos_core.data.order import shuffled_indices
from cosmos_core.data.reasoning_gym_rows import make_generator_reader
from cosmos_core.data.user_dataset import UserDatasetLoader
from cosmos_core.errors import DataError, first_line
from cosmos_core.models.model_files import is_hub_reachable
from cosmos_core.registry import is_user_code
from cosmos_core.run.files import read_json_object
from cosmos_core.run.stage import Stage
from cosmos_core.transient import is_machine_error, is_network_error

logger = logging.getLogger(__name__)

_TRAIN_SPLIT = "train"
_DATASET_DICT_FILE = "dataset_dict.json"
_SLICE_REGEX = re.compile(r"(.+?)\[(-?\d+%?)?:(-?\d+%?)?\]")
_SHARD_REGEX = re.compile(r"(.+)-\d{5}-of-(\d{5})\b")
"""Pattern of the names of files that `datasets` writes for a split; the groups match the split and the number of
files."""
_FilesBySplit = dict[str, list[Path]]
"""Files of each split that the README.md of a data set declares; if empty, the names of files determine the splits."""
_DATASET_INFO_FILES = ("dataset_info.json", "dataset_infos.json")
"""Names of JSON files that describe a data set; they are in the folders of data files, but have no rows."""
_UNSUPPORTED_SUFFIXES = (".zst", ".zstd", ".lz4", ".zip")
HELD_OUT_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")


class Rows:
    """Rows of one or several files with their locations, or a selection of rows; each iteration reads the files."""

    def __init__(self, readers: Sequence[RowReader], folder: Path, selection_mask: np.ndarray | None = None) -> None:
        """Join the rows of `readers`. `selection_mask` has an entry per row, True to select it; None: all rows. Paths
        of media in rows are relative to `folder`."""
        self.folder = folder
        self._readers, self._selection_mask = readers, selection_mask
        self._num_reader_rows = sum(reader.num_rows for reader in readers)

    def __len__(self) -> int:
        return self._num_reader_rows if self._selection_mask is None else int(self._selection_mask.sum())

    def __iter__(self) -> Iterator[LocatedRow]:
        rows = chain.from_iterable(reader.read() for reader in self._readers)
        return rows if self._selection_mask is None else compress(rows, self._selection_mask)

    def take(self, num_rows: int) -> "Rows":
        """Return the first `num_rows` rows."""
        return self.select(np.arange(len(self)) < num_rows)

    def select(self, selection_mask: np.ndarray) -> "Rows":
        """Return the rows for which `selection_mask`, a bool array with an entry per row, is True."""
        if self._selection_mask is not None:
            mask_over_all_rows = self._selection_mask.copy()
            mask_over_all_rows[self._selection_mask] = selection_mask
            selection_mask = mask_over_all_rows
        return Rows(self._readers, self.folder, selection_mask)


def load_rows(dataset: RowsConfig, config_key: str = "dataset", loader: UserDatasetLoader | None = None) -> Rows:
    """Return the rows of all splits of a data set, in order; `config_key` names the data set's table in messages.
    Without a `loader`, user-defined data set classes are not allowed. Raise ConfigError if the user's class
    does not exist, and DataError if the data set or a split is missing or malformed, or holds no rows."""
    if not dataset.name.strip():
        raise DataError(f"{config_key}.name is empty; give a file, a folder or a Hub id")
    if generator := reasoning_gym_generator(dataset.name):
        if dataset.split != (_TRAIN_SPLIT,):
            remedy = f"set {config_key}.arguments.size"
            raise DataError(f"{config_key}.split: a generator has only the split 'train'; {remedy}")
        return Rows([make_generator_reader(generator, dataset.arguments, config_key)], Path.cwd())
    # Use os.path, because Path.expanduser and Path.exists raise errors for some names.
    path = Path(os.path.expanduser(dataset.name))
    if os.path.exists(path):
        path, declared_files = _find_data_folder(path, dataset.subset, config_key)
        readers = [reader for split in dataset.split for reader in _open_split(path, split, config_key, declared_files)]
    elif is_user_code(dataset.name) and loader:
        readers = [loader.make_row_reader(dataset.name, config_key)]
    elif dataset.name.startswith((".", "/", "~")) or dataset.name.count("/") > 1 or data_suffix(dataset.name):
        searched_folders_text = "" if path.is_absolute() else f" in {str(Path.cwd())!r} or beside the file that is run"
        problem = f"{config_key}.name = {str(path)!r}: it does not exist{searched_folders_text}"
        raise DataError(f"{problem}; give a file, a folder or a Hub id")
    else:
        readers = [_load_hub_split(dataset, split, config_key) for split in dataset.split]
    if not any(reader.num_rows for reader in readers):  # one shard may be empty, but not the whole data set
        raise DataError(f"{readers[0].name}: file holds no rows; {config_key}.name needs at least one")
    folder = path if path.is_dir() else path.parent
    return Rows(readers, folder.absolute() if os.path.exists(path) else Path.cwd())


def get_policies_by_dataset(stage: Stage) -> dict[str, AlgorithmConfig]:
    """Return the training settings for the rows of each training data set, by the configuration key of the data set. A
    data set in the key `data` of the stage replaces those of the recipe."""
    algorithm = stage.recipe.train.train_policy
    dataset_path, config_key = str(stage.data), f"stage {stage.name!r}: data"
    if stage.data is None:
        dataset_path, config_key = image_settings(stage.recipe).annotation_path, "custom.dataset.annotation_path"
    if not dataset_path:
        return dict(algorithm.tables_by_dataset)
    mixture_setting_names = ("test_size", "max_skipped_fraction", "keep", "pass_rates")
    dataset_settings = {name: getattr(algorithm.dataset, name) for name in mixture_setting_names}
    return {config_key: algorithm.copy_with(datasets=(), dataset=DatasetConfig(name=dataset_path, **dataset_settings))}


def has_local_split(path: Path, split: str) -> bool:
    """Return whether a folder of data files has files, a sub-folder, or a saved data set for this split."""
    if declared_files := _find_declared_files(path, "", "data"):
        return split in declared_files
    if not path.is_dir():
        return False
    if (path / _DATASET_DICT_FILE).is_file():
        return split in (read_json_object(path / _DATASET_DICT_FILE).get("splits") or ())
    if data_files := _find_data_files(path):
        return any(_has_split_name(file, split) for file in data_files)
    return (path / split).is_dir() and bool(_find_data_files(path / split))


def split_rows(rows: Rows, test_size: int | float, seed: int) -> tuple[Rows, Rows]:
    """Divide rows into training rows and held-out rows, both in their order. The held-out rows are `test_size` rows, or
    a fraction below 1 of all rows, chosen at random by the seed. Raise DataError if no row is left to train on."""
    held_out_mask = sample_held_out_mask(len(rows), test_size, seed)
    return rows.select(~held_out_mask), rows.select(held_out_mask)


def sample_held_out_mask(num_rows: int, test_size: int | float, seed: int) -> np.ndarray:
    """Return the mask of the held-out rows, bool, (num_rows,), chosen at random by the seed alone: `test_size` rows, or
    a fraction below 1 of all rows, which is rounded up. Raise DataError if no row would be left to train on."""
    num_held_out_rows = math.ceil(num_rows * test_size) if isinstance(test_size, float) else test_size
    if num_held_out_rows >= num_rows:
        raise DataError(f"test_size = {test_size} of {num_rows} rows leaves none to train on; lower dataset.test_size")
    held_out_mask = np.zeros(num_rows, dtype=bool)
    held_out_mask[shuffled_indices(num_rows, seed)[:num_held_out_rows]] = True
    return held_out_mask


def _open_split(path: Path, split: str, config_key: str, declared_files: _FilesBySplit) -> list[RowReader]:
    """Return the readers of a split, or of a slice in the notation of `datasets`: `train[:48]`, `train[10%:]`.
    `declared_files` are the files of each split that README.md declares."""
    slice_match = _SLICE_REGEX.fullmatch(split)
    if slice_match is None:
        return _open_local_split(path, split, config_key, declared_files)
    readers = _open_local_split(path, slice_match[1], config_key, declared_files)
    num_rows = sum(reader.num_rows for reader in readers)
    slice_bounds = [_parse_slice_bound(bound_text, num_rows) for bound_text in slice_match.groups()[1:]]
    start_row, end_row, _ = slice(*slice_bounds).indices(num_rows)
    readers_of_slice, row_offset = [], 0
    for reader in readers:
        reader_start_row, reader_end_row = max(start_row - row_offset, 0), min(end_row - row_offset, reader.num_rows)
        if reader_start_row < reader_end_row:
            readers_of_slice.append(reader.select(reader_start_row, reader_end_row))
        row_offset += reader.num_rows
    if not readers_of_slice:
        raise DataError(f"{config_key}.split = {split!r} names no row of {num_rows}; name others")
    return readers_of_slice


def _parse_slice_bound(bound_text: str | None, num_rows: int) -> int | None:
    if bound_text is None:
        return None
    return round(num_rows * int(bound_text[:-1]) / 100) if bound_text.endswith("%") else int(bound_text)


def _open_local_split(path: Path, split: str, config_key: str, declared_files: _FilesBySplit) -> list[RowReader]:
    if declared_files:
        if not declared_files.get(split):
            existing_splits_text = ", ".join(name for name, files in declared_files.items() if files) or "no split"
            problem = f"but of the data files that README.md declares those of {existing_splits_text} exist"
            raise DataError(f"{config_key}.split = {split!r}, {problem}; name others")
        _warn_of_missing_files(declared_files[split], config_key)
        return [_open_data_file(file) for file in declared_files[split]]
    if path.is_dir() and _is_saved_dataset(path):
        return [_load_saved_split(path, split, config_key)]
    if path.is_dir():
        return [_open_data_file(file) for file in _find_split_files(path, split, config_key)]
    if split != _TRAIN_SPLIT:
        raise DataError(f"{config_key}.split = {split!r}, but {path} is one file, which has only the split 'train'")
    if not data_suffix(path.name):
        problem = f"{path.name} has the suffix {path.suffix!r}"
        raise DataError(f"{config_key}.name: {problem}; known: {', '.join(DATA_SUFFIXES)}")
    return [_open_data_file(path)]


def _open_data_file(file: Path) -> RowReader:
    # Check the name, because messages and prepared rows contain it as a part of the location of a row.
    if re.search("[\0-\x1f\ud800-\udfff]", file.name):
        raise DataError(f"{file.name!r}: the name of a data file must be UTF-8 without control characters; rename it")
    return open_row_file(file)


def _is_saved_dataset(folder: Path) -> bool:
    """Return whether `save_to_disk` of `datasets` has written the folder."""
    return any((folder / name).is_file() for name in (_DATASET_DICT_FILE, "state.json"))


def _find_data_files(folder: Path) -> list[Path]:
    files = (file for file in folder.iterdir() if data_suffix(file.name) and not file.name.startswith("."))
    # Keep links to missing files: reading one raises an error, whereas rows of a skipped link would be lost silently.
    files = (file for file in files if file.is_file() or (file.is_symlink() and not file.exists()))
    return sorted(file for file in files if file.name not in _DATASET_INFO_FILES)


def _has_split_name(file: Path, split: str) -> bool:
    """Return whether a file name is that of a split: `train.jsonl`, `train-00000-of-00002.parquet`, `train_1.json`; but
    `train_sft-00000-of-00001.parquet` is of the split `train_sft`."""
    if shard_match := _SHARD_REGEX.match(file.name):
        return shard_match[1] == split
    return file.name.startswith(tuple(split + separator for separator in ".-_"))


def has_split_word(file: Path, split: str) -> bool:
    """Return whether a file name is the name of a split or contains it as a word, like "gsm8k_train.jsonl"."""
    is_shard_file, split_name_regex = bool(_SHARD_REGEX.match(file.name)), rf"[._-]{re.escape(split)}[._-]"
    return _has_split_name(file, split) or (not is_shard_file and bool(re.search(split_name_regex, file.name)))


def _find_split_files(folder: Path, split: str, config_key: str) -> list[Path]:
    data_files = _find_data_files(folder)
    if not data_files and (folder / split).is_dir():  # the folder of a split may hold files of any name
        split_files = data_files = _find_data_files(folder / split)
    else:
        split_files = [file for file in data_files if _has_split_name(file, split)]
    if not split_files:
        split_files = [file for file in data_files if has_split_word(file, split)]
    split_names = {shard_match[1] for file in data_files if (shard_match := _SHARD_REGEX.match(file.name))}
    if not split_files and split == _TRAIN_SPLIT and len(split_names) < 2:  # files without split names are for training
        split_files = [file for file in data_files if not any(has_split_word(file, name) for name in HELD_OUT_SPLITS)]
    if not split_files:
        subfolder_names = " or ".join(repr(str(subfolder)) for subfolder in _find_data_subfolders(folder)[:5])
        subfolder_hint = f", and its folders are not looked into; name {subfolder_names}" if subfolder_names else ""
        data_file_names_text = ", ".join(file.name for file in data_files[:5]) or f"no data file{subfolder_hint}"
        remedy = f"; set {config_key}.split to one of {', '.join(sorted(split_names))}" if split_names else ""
        problem = f"{folder} has no file for the split {split!r}; it holds {data_file_names_text}"
        raise DataError(f"{config_key}.name: {problem}{remedy}")
    _check_file_names(split_files, config_key)
    _warn_of_missing_files(split_files, config_key)
    for file in split_files[0].parent.iterdir():
        if file.suffix in _UNSUPPORTED_SUFFIXES and data_suffix(file.stem):
            remedy = "only .gz, .bz2 and .xz are decompressed; decompress it"
            logger.warning("%s.name: %s in %s is not read: %s", config_key, file.name, file.parent, remedy)
    return split_files


def _check_file_names(files: list[Path], config_key: str) -> None:
    """Raise DataError if two files have the same name but different suffixes, such as a file and its compressed copy:
    their rows would be read twice."""
    file_by_name_stem: dict[str, Path] = {}
    for file in files:
        first_file = file_by_name_stem.setdefault(file.name[: -len(data_suffix(file.name))], file)
        if first_file is not file:
            problem = f"{file.parent} has {first_file.name} and {file.name}, and one is probably a copy of the other"
            raise DataError(f"{config_key}.name: {problem}; remove or rename one")


def _warn_of_missing_files(files: list[Path], config_key: str) -> None:
    counts_by_shard_name = Counter(match.groups() for file in files if (match := _SHARD_REGEX.match(file.name)))
    for (name, total), count in counts_by_shard_name.items():
        if count < int(total):
            logger.warning(
                "%s: %s has %d of its %d files; the rows of the others are missing", config_key, name, count, int(total)
            )


def _find_data_folder(path: Path, subset: str, config_key: str) -> tuple[Path, _FilesBySplit]:
    """Return the path with the data files of a data set, and the files of each split that its README.md declares. A
    copy of a Hub data set has its files in a sub-folder: the one named `subset`, or the only sub-folder with data
    files, which for the default configuration is often `data`."""
    if not path.is_dir() or _is_saved_dataset(path):
        return path, {}
    if declared_files := _find_declared_files(path, subset, config_key):
        declared_file_folders = [file.parent for files in declared_files.values() for file in files]
        return Path(os.path.commonpath(declared_file_folders)), declared_files
    if subset and (path / subset).is_dir():
        return path / subset, {}
    subfolders = [] if _find_data_files(path) else _find_data_subfolders(path)
    subfolder_names = [subfolder.name for subfolder in subfolders]
    if subfolder_names and subfolder_names != ["data"] and subset not in {"", "default"}:
        data_folders_text = f"the folders {', '.join(subfolder_names[:5])} in {path}"
        raise DataError(f"{config_key}.subset = {subset!r} is none of {data_folders_text}; name one")
    return (subfolders[0] if len(subfolders) == 1 else path), {}


def _find_declared_files(path: Path, subset: str, config_key: str) -> _FilesBySplit:
    """Return the files that `configs` in README.md declares for each split; empty if it has no `configs`."""
    dataset_card_configs = read_card_metadata(path).get("configs")
    if "data_files" not in str(dataset_card_configs) or (subset and (path / subset).is_dir()):
        return {}
    import datasets

    remedy = "complete the copy, or give one of its files or folders"
    with convert_reader_errors(f"{config_key}: `configs` in the README.md of {path} cannot be read ({remedy})"):
        declared_files = datasets.load_dataset_builder(str(path), subset or None).config.data_files or {}
    files = {str(split): [Path(file) for file in names if data_suffix(file)] for split, names in declared_files.items()}
    return files if any(files.values()) else {}


def _find_data_subfolders(folder: Path) -> list[Path]:
    subfolders = (entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    return sorted(filter(_find_data_files, subfolders))


def _load_saved_split(path: Path, split: str, config_key: str) -> RowReader:
    import datasets

    with convert_reader_errors(f"{config_key}.name: {path} cannot be read by `datasets`"):
        saved_dataset = datasets.load_from_disk(str(path))
    splits = saved_dataset if isinstance(saved_dataset, datasets.DatasetDict) else {_TRAIN_SPLIT: saved_dataset}
    if split not in splits:
        raise DataError(f"{config_key}.split = {split!r}, but {path} has {', '.join(splits)}")
    return make_dataset_reader(splits[split], f"{path.name}[{split}]")


def _load_hub_split(dataset: RowsConfig, split: str, config_key: str) -> RowReader:
    import datasets

    try:
        with _set_offline_if_unreachable():
            subset, revision = dataset.subset or None, dataset.revision or None
            hub_dataset = datasets.load_dataset(dataset.name, subset, revision=revision, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if is_machine_error(error) or (is_network_error(error) and is_hub_reachable()):
            raise
        problem = f"is no local file and could not be had from the Hub: {first_line(error)}"
        remedy = f"check the name, {config_key}.subset and split, and the network, or give a local path"
        raise DataError(f"{config_key}.name = {dataset.name!r} {problem}; {remedy}") from error
    return make_dataset_reader(hub_dataset, f"{dataset.name}[{split}]")


@contextmanager
def _set_offline_if_unreachable() -> Iterator[None]:
    """Let `datasets` use only its cache while the Hub is unreachable; otherwise `datasets` would retry each file for 20
    seconds."""
    import datasets

    previous_offline_flags = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    if not is_hub_reachable():
        datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = previous_offline_flags
