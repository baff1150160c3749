"""Content digests of files outside the run directory, remembered by size, times and inode so that 100 GB is hashed
once."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

from cosmos_core.errors import ConfigError
from cosmos_core.run.files import SHARED, sha256, write_text

_UNSETTLED_NS = 100_000_000
"""A file that changed so short a time ago may change again without another time: its clock has ticks."""

Key = list[int]


class Digests:
    """A cache in one file that only grows, a line for each digest; losing it costs time only.

    `thorough`: nothing that another process hashed is believed.
    """

    def __init__(self, path: Path, *, thorough: bool = False) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Key, str]] = {} if thorough else _remembered(path)

    def of_file(self, file: Path) -> str:
        """Return the sha256 of a file's content.

        Raises:
            ConfigError: it is a device, a pipe or something else that may not end.
        """
        file = file.resolve()
        status = file.stat()
        if not S_ISREG(status.st_mode):
            raise ConfigError(
                f"{file} is no regular file, and a device or a pipe may be read without end; name another"
            )
        # A program can set the time of modification back, but not that of the last change of the inode.
        key = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
        with self._lock:
            known = self._known.get(str(file))
        if known is not None and known[0] == key:
            return known[1]
        digest = sha256(file)
        if time.time_ns() - status.st_ctime_ns > _UNSETTLED_NS:
            with self._lock:
                self._known[str(file)] = (key, digest)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._path, "a", encoding="utf-8") as cache:
                    cache.write(_line(str(file), key, digest))
        return digest

    def of_files(self, folder: Path, files: Iterable[Path]) -> str:
        """Return one digest over the names below `folder` and the contents of files."""
        lines = [f"{os.path.relpath(file, folder)}\0{self.of_file(file)}\n" for file in sorted(files)]
        return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def shared_digests(output_dir: Path, *, thorough: bool = False) -> Digests:
    """Return the digests that all runs of a folder share."""
    return Digests(output_dir / SHARED / "digests.jsonl", thorough=thorough)


def _remembered(path: Path) -> dict[str, tuple[Key, str]]:
    """The lines that are whole, the newest of each file; a cache of mostly older ones is written anew."""
    known: dict[str, tuple[Key, str]] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return known
    for line in lines:
        try:
            file, key, digest = json.loads(line)
            known[str(file)] = (list(key), str(digest))
        except (ValueError, TypeError, RecursionError):  # cut by a kill, or damaged
            continue
    if len(lines) > 2 * len(known) + 1000:
        write_text(path, "".join(_line(file, *known[file]) for file in known), durable=False)
    return known


def _line(file: str, key: Key, digest: str) -> str:
    return json.dumps([file, key, digest]) + "\n"
