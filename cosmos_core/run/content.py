"""Select the files of a model or data folder that stages read; the digest of the folder covers only these files.

Links are followed. Hidden files, documentation (*.md), and weights that the index in their folder does not name are
left out.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from cosmos_core.config.inputs import WEIGHTS_SUFFIXES, StageInput
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.run.files import read_json_object

_INDEX_SUFFIX = ".index.json"
_WEIGHTS_SUFFIXES = (".safetensors", ".bin")


def list_data_files(folder: Path, file_patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Return the files below a folder that match the patterns (see `matches_patterns`), except hidden files and `*.md`.
    Symbolic links are followed; raise ConfigError if they form a cycle."""
    files = []
    for subfolder, file_names in _walk_visible_folders(folder, ()):
        for name in file_names:
            is_file_excluded = name.startswith(".") or name.lower().endswith(".md")
            if not is_file_excluded and matches_patterns(Path(name), file_patterns) and (subfolder / name).is_file():
                files.append(subfolder / name)
    return files


def list_model_files(folder: Path, file_patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Return the files of a model folder that match the patterns, without weight files that an index does not name.
    Raise ConfigError if symbolic links form a cycle, and ModelError if an index names a file outside its folder."""
    files = list_data_files(folder)
    index_files = [file for file in files if file.name.endswith(_INDEX_SUFFIX)]
    indexed_files = {file for index_file in index_files for file in _list_indexed_files(index_file)}
    # If a single file has all weights, transformers reads that file and ignores the index.
    indexed_files |= {index_file.with_name(index_file.name.removesuffix(_INDEX_SUFFIX)) for index_file in index_files}
    folders_with_index = {index_file.parent for index_file in index_files}
    model_files = {file for file in files if not (file.parent in folders_with_index and is_weight_file(file))}
    model_files |= {file for file in indexed_files if file.is_file()}
    return sorted(file for file in model_files if matches_patterns(file.relative_to(folder), file_patterns))


def matches_patterns(file: Path, file_patterns: Sequence[str]) -> bool:
    """Return True if a file matches one of the patterns and none of the patterns that begin with `!`. Patterns are
    compared with the name of the file, also in lower case; `!` patterns with a slash are compared with its path
    relative to its folder. If all patterns begin with `!`, every other file matches."""
    excluded_patterns = [pattern[1:] for pattern in file_patterns if pattern.startswith("!")]
    included_patterns = [pattern for pattern in file_patterns if not pattern.startswith("!")] or ["*"]
    if any(fnmatch(file.as_posix() if "/" in pattern else file.name, pattern) for pattern in excluded_patterns):
        return False
    return any(fnmatch(name, pattern) for pattern in included_patterns for name in (file.name, file.name.lower()))


def _list_indexed_files(index_file: Path) -> list[Path]:
    """Return the files that an index of weights names; empty for a damaged index, which the worker reports later."""
    weight_map = read_json_object(index_file).get("weight_map")
    weight_file_names = weight_map.values() if isinstance(weight_map, dict) else ()
    file_names = {file_name for file_name in weight_file_names if isinstance(file_name, str)}
    for file_name in sorted(file_names):
        if is_outside_folder(file_name):
            remedy_text = "a model is one folder: copy the file there"
            raise ModelError(f"{index_file} names {file_name!r}, which lies outside of its folder; {remedy_text}")
    return [index_file.parent / file_name for file_name in file_names]


def is_outside_folder(name: str) -> bool:
    """Return True if a relative file name in an index refers to a file outside the folder of the index."""
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts


def is_weight_file(file: Path) -> bool:
    """Return True if a file holds weights of the model itself, not of an adapter."""
    return file.suffix in _WEIGHTS_SUFFIXES and not file.name.startswith("adapter_")


def create_linked_model_folder(inputs: Sequence[StageInput], folder: Path) -> str:
    """Create a folder of symbolic links for a model whose weight files are separate inputs of a stage: links to these
    inputs (role `weights`), and to the files of the model folder (role `model`) other than its weights. Return
    `folder`, or an empty string if no input is a weight file."""
    weight_files = [Path(stage_input.location) for stage_input in inputs if stage_input.role == "weights"]
    if not weight_files:
        return ""
    model_folder = next(Path(stage_input.location) for stage_input in inputs if stage_input.role == "model")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in list_model_files(model_folder):
        if is_weight_file(file) or file.name.endswith(WEIGHTS_SUFFIXES):
            continue
        link_path = folder / file.relative_to(model_folder)
        link_path.parent.mkdir(parents=True, exist_ok=True)
        link_path.symlink_to(file.resolve())
    for file in weight_files:
        name = "model.safetensors" if len(weight_files) == 1 else file.name
        (folder / name).symlink_to(file.resolve())
    return str(folder)


def _walk_visible_folders(folder: Path, ancestor_ids: tuple[tuple[int, int], ...]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder at or below `folder` that is not hidden, with the names of its entries that are not folders."""
    folder_stat = folder.stat()
    folder_id = (folder_stat.st_dev, folder_stat.st_ino)
    if folder_id in ancestor_ids:
        raise ConfigError(f"{folder}: links lead in a circle; remove the one that leads back")
    folder_entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    yield folder, [entry.name for entry in folder_entries if not entry.is_dir()]
    for entry in folder_entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _walk_visible_folders(Path(entry.path), (*ancestor_ids, folder_id))
