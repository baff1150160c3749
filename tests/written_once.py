"""Folders of files that take long to make and are needed often: made once per process, then written from memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory


def write_once(folder: Path, write: Callable[..., object], *arguments: Hashable) -> Path:
    """Fill `folder` as `write(folder, *arguments)` does, which has to make the same files each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in _files(write, *arguments).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@cache
def _files(write: Callable[..., object], *arguments: Hashable) -> dict[Path, bytes]:
    with TemporaryDirectory() as scratch:
        write(Path(scratch), *arguments)
        return {file.relative_to(scratch): file.read_bytes() for file in Path(scratch).rglob("*") if file.is_file()}
