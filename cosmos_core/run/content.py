"""Which files of a folder will be read: what its digest is made of, and nothing else.

Links are followed. Left out are hidden files, documentation (*.md), and weights that an index beside them does not
name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.run.files import read_json

_INDEX = ".index.json"
# What tokenisation depends on; weights are not among it, so rows survive another initialisation.
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
    """Return the files below a folder whose names match one of the patterns, those behind links included.

    Raises:
        ConfigError: links lead in a circle.
    """
    found = []
    for below, names in _walk(folder, ()):
        for name in names:
            is_left_out = name.startswith(".") or name.lower().endswith(".md")
            if not is_left_out and any(fnmatch(name, pattern) for pattern in patterns) and (below / name).is_file():
                found.append(below / name)
    return found


def files_of_model(folder: Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """Return the files that are read of a folder with a model; of weights with an index those that it names.

    Raises:
        ConfigError: links lead in a circle.
        ModelError: an index names a file outside of its folder.
    """
    files = files_of(folder, patterns)
    indexes = [file for file in files if file.name.endswith(_INDEX)]
    named = {file for index in indexes for file in _named_by(index)}
    # Beside them transformers reads an adapter, and one file that has all weights before it looks at the index.
    named |= {index.with_name(index.name.removesuffix(_INDEX)) for index in indexes}
    folders = {index.parent for index in indexes}
    kept = {file for file in files if not (file.parent in folders and is_weights(file)) or file in named}
    return sorted(kept | {file for file in named if file.is_file()})


def enters_training(file: Path) -> bool:
    """Return whether a file of a model's folder is read for its weights, its shape or its tokens.

    The others, such as `generation_config.json` or a licence, change what is exported at most.
    """
    return any(fnmatch(file.name, pattern) for pattern in (*TOKENIZER_FILES, *_OF_WEIGHTS))


def files_of_encoders(folder: Path) -> list[Path]:
    """Return the files of a pipeline of diffusers that text and media are encoded with: all but those of its denoiser
    and its scheduler, which training changes.

    Raises:
        ConfigError, ModelError: as `files_of_model`.
    """
    files = files_of_model(folder)
    return [file for file in files if file.relative_to(folder).parts[0] not in _NOT_ENCODING]


def _named_by(index: Path) -> list[Path]:
    """The files of the tensors in an index; a damaged index names none, and the worker will say so."""
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
    """Return whether a name in an index is that of a file outside of the folder of the index."""
    return PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts


def is_weights(file: Path) -> bool:
    """Return whether a file has weights of the model itself."""
    return file.suffix in _WEIGHTS and not file.name.startswith("adapter_")


def _walk(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[tuple[Path, list[str]]]:
    """Folders that are not hidden, each with the names of what is no folder."""
    status = folder.stat()
    own = (status.st_dev, status.st_ino)
    if own in above:
        raise ConfigError(f"{folder}: links lead in a circle; remove the one that leads back")
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    yield folder, [entry.name for entry in entries if not entry.is_dir()]
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            yield from _walk(Path(entry.path), (*above, own))
