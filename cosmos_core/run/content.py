"""Selection of the files in a model or data folder that are read, and that its digest therefore covers.

Links are followed. Hidden files, documentation (*.md), and weights that the index in their folder does not name are
left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.run.files import read_json

_INDEX = ".index.json"
# Files that tokenisation depends on. Without weights among them, prepared rows stay valid when only weights change.
TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges*",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "*processor_config.json",
    "chat_template.json",
    "*.model",
)
_OF_WEIGHTS = (
    "*.safetensors", "*model*.bin", "adapter_*", "*.index.json", "config.json", "configuration*", "model_index.json",
    "scheduler_config.json", "tekken.json", "*.tiktoken", "*.py",
)  # fmt: skip
_NOT_ENCODING = ("transformer", "transformer_2", "unet", "scheduler", "lora")
_WEIGHTS = (".safetensors", ".bin")


def files_of(folder: Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Return the files below a folder whose names match one of the patterns, including files reached through links.

    Raises:
        ConfigError: links lead in a circle.
    """
    files = []
    for below, names in _walk(folder, ()):
        for name in names:
            is_left_out = name.startswith(".") or name.lower().endswith(".md")
            if not is_left_out and any(fnmatch(name, pattern) for pattern in patterns) and (below / name).is_file():
                files.append(below / name)
    return files


def files_of_model(folder: Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Return the files of a model folder that are read; of weights with an index, only the files that the index names.

    Raises:
        ConfigError: links lead in a circle.
        ModelError: an index names a file outside of its folder.
    """
    files = files_of(folder, patterns)
    indexes = [file for file in files if file.name.endswith(_INDEX)]
    indexed_files = {file for index in indexes for file in _named_by(index)}
    # transformers prefers a single file with all weights to the index.
    indexed_files |= {index.with_name(index.name.removesuffix(_INDEX)) for index in indexes}
    folders = {index.parent for index in indexes}
    model_files = {file for file in files if not (file.parent in folders and is_weights(file)) or file in indexed_files}
    return sorted(model_files | {file for file in indexed_files if file.is_file()})


def enters_training(file: Path) -> bool:
    """Return True if training reads a file of a model folder, for the weights, the shape of the model or the tokens.

    Other files, such as `generation_config.json` or a licence, affect exported models only.
    """
    return any(fnmatch(file.name, pattern) for pattern in (*TOKENIZER_FILES, *_OF_WEIGHTS))


def files_of_encoders(folder: Path) -> list[Path]:
    """Return the files of a diffusers pipeline that encode text and media: all but the denoiser and the scheduler,
    which training changes.

    Raises:
        ConfigError, ModelError: as `files_of_model`.
    """
    files = files_of_model(folder)
    return [file for file in files if file.relative_to(folder).parts[0] not in _NOT_ENCODING]


def _named_by(index: Path) -> list[Path]:
    """Return the files that an index of weights names; a damaged index names none, and the worker reports the
    damage."""
    content = read_json(index)
    tensors = content.get("weight_map") if isinstance(content, dict) else None
    names = {name for name in tensors.values() if isinstance(name, str)} if isinstance(tensors, dict) else set()
    for name in sorted(names):
        if leaves_folder(name):
            raise ModelError(
                f"{index} names {name!r}, which lies outside of its folder; a model is one folder: copy the file there"
            )
    return [index.parent / name for name in names]


def leaves_folder(name: str) -> bool:
    """Return True if a relative file name in an index refers to a file outside the folder of the index."""
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts


def is_weights(file: Path) -> bool:
    """Return True if a file holds weights of the model itself, not of an adapter."""
    return file.suffix in _WEIGHTS and not file.name.startswith("adapter_")


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[Path, list[str]]]:
    """Yield each folder that is not hidden, with the names of its entries that are not folders."""
    status = folder.stat()
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise ConfigError(f"{folder}: links lead in a circle; remove the one that leads back")
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    yield folder, [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _walk(Path(entry.path), (*above, identity))
