"""Cache of content digests of files outside the run directory, keyed by size, times and inode, to hash a file once."""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from stat import S_ISREG

from cosmos_core.errors import ConfigError
from cosmos_core.run.files import SHARED_FOLDER, sha256, write_text

_MIN_FILE_AGE_NS = 100_000_000
"""Minimum age of a file whose digest is cached: a newer file may change without a change of its time stamps."""

FileStatKey = list[int]


class DigestCache:
    """Append-only cache of digests in a file with one line per digest; if the file is lost, digests are computed again.
    With `ignores_cache`, the digests that are already in the file are not used."""

    def __init__(self, path: Path, *, ignores_cache: bool = False) -> None:
        self._cache_path = path
        self._lock = threading.Lock()
        self._cached_digests: dict[str, tuple[FileStatKey, str]] = {} if ignores_cache else _read_cache(path)

    def digest_file(self, file: Path) -> str:
        """Return the SHA-256 of the content of `file`; raise ConfigError for devices and pipes, which may not end."""
        file = file.resolve()
        file_stat, current_time_ns = file.stat(), time.time_ns()
        if not S_ISREG(file_stat.st_mode):
            problem_text = "is no regular file, and a device or a pipe may be read without end"
            raise ConfigError(f"{file} {problem_text}; name another")
        # The key includes the change time of the inode, because a program can set back only the modification time.
        file_key = [file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns, file_stat.st_ino]
        cached_entry = self._cached_digests.get(str(file))
        if cached_entry is not None and cached_entry[0] == file_key:
            return cached_entry[1]
        digest = sha256(file)
        if current_time_ns - file_stat.st_ctime_ns > _MIN_FILE_AGE_NS:
            with self._lock:
                self._cached_digests[str(file)] = (file_key, digest)
                self._cache_path.parent.mkdir(parents=True, exist_ok=True)
                with open(self._cache_path, "a", encoding="utf-8") as cache_file:
                    cache_file.write(json.dumps([str(file), file_key, digest]) + "\n")
        return digest

    def digest_files(self, folder: Path, files: Iterable[Path]) -> str:
        """Return one digest over the contents of files and their names relative to `folder`."""
        digest_lines = [f"{os.path.relpath(file, folder)}\0{self.digest_file(file)}\n" for file in sorted(files)]
        return hashlib.sha256("".join(digest_lines).encode(errors="surrogateescape")).hexdigest()


def shared_digest_cache(output_dir: Path, *, ignores_cache: bool = False) -> DigestCache:
    """Return the cache of digests that all runs in an output folder share."""
    return DigestCache(output_dir / SHARED_FOLDER / "digests.jsonl", ignores_cache=ignores_cache)


def _read_cache(path: Path) -> dict[str, tuple[FileStatKey, str]]:
    """Return the newest entry per file from the lines of the cache file; rewrite the file if most are outdated."""
    all_digests: dict[str, tuple[FileStatKey, str]] = {}
    try:
        cache_lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return all_digests
    for line in cache_lines:
        try:
            file, file_key, digest = json.loads(line)
            all_digests[str(file)] = (list(file_key), str(digest))
        except (ValueError, TypeError, RecursionError):  # skip a truncated or damaged line of the cache
            continue
    if len(cache_lines) > 2 * len(all_digests) + 1000:
        write_text(path, "".join(json.dumps([file, *entry]) + "\n" for file, entry in all_digests.items()), fsync=False)
    return all_digests
