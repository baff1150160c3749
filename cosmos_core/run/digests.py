"""Content digests of files outside the run directory, remembered by size, time and inode so that 100 GB is hashed
once."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.run.files import read_json, sha256, write_json


class Digests:
    """A cache in one JSON file; losing it costs time only."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        found = read_json(path)
        self._known: dict[str, list[int | str]] = found if isinstance(found, dict) else {}

    def of_file(self, file: Path) -> str:
        """sha256 of a file's content."""
        file = file.resolve()
        status = file.stat()
        key: list[int | str] = [status.st_size, status.st_mtime_ns, status.st_ino]
        with self._lock:
            known = self._known.get(str(file))
        if isinstance(known, list) and len(known) == 4 and known[:3] == key:
            return str(known[3])
        digest = sha256(file)
        with self._lock:
            self._known[str(file)] = [*key, digest]
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, self._known, durable=False)
        return digest

    def of_folder(self, folder: Path, patterns: Sequence[str]) -> str:
        """Digest over names and contents of the files below `folder` that match one of the patterns; hidden ones and
        documentation (*.md) left out."""
        files = {file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}
        files = {file for file in files if file.suffix.lower() != ".md"}
        lines = []
        for file in sorted(files):
            name = file.relative_to(folder)
            if not any(part.startswith(".") for part in name.parts):
                lines.append(f"{name}\0{self.of_file(file)}\n")
        return hashlib.sha256("".join(lines).encode()).hexdigest()
