"""Content-addressed storage in a bucket: each content is stored once, under its SHA-256, and a JSON document that is
written last names the contents.

A fetched file is compared with its digest, and fetched again if the network altered it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_core.errors import UploadError
from cosmos_core.run.bucket import Bucket, run_threads
from cosmos_core.run.files import copy_file, sha256
from cosmos_core.upload.transfer import Journal, Transfer

_MAX_ATTEMPTS = 3  # maximum number of downloads of an object whose digest is wrong
_MAX_PARALLEL_FILES = 4


@dataclass(frozen=True)
class Entry:
    """Size and digest of the content of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Entry:
        """Return the size and digest of `data`."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Bundle:
    """Set of stored files, as a size and digest for each path, with a dict of further information."""

    files: Mapping[str, Entry]
    info: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the bundle as a dict for a JSON document, from which `bundle_of` creates the bundle again."""
        return {"files": {path: [entry.size, entry.sha256] for path, entry in self.files.items()}, "info": self.info}


def bundle_of(value: dict[str, Any]) -> Bundle:
    """Return the bundle that a dict of `Bundle.as_json` describes."""
    return Bundle({path: Entry(*size_and_digest) for path, size_and_digest in value["files"].items()}, value["info"])


class ContentStore:
    """Storage of files below one prefix of a bucket; the key of each file is the SHA-256 of its content."""

    def __init__(self, bucket: Bucket, prefix: str, pause: Callable[[], None] = lambda: None) -> None:
        """Store contents below `prefix`; `pause` is called between files and their parts, and may raise an error."""
        self._bucket, self._prefix, self._pause = bucket, prefix, pause

    def send(self, files: Mapping[str, Path], journal: Path | None = None) -> None:
        """Store files under their digests and verify them, with the journal file also after an interruption; for errors
        see `Transfer.send`."""
        sources = {self._make_object_key(digest): (file, digest) for digest, file in files.items()}
        Transfer(self._bucket, Journal(journal), self._pause).send(sources)

    def write(self, data: bytes) -> Entry:
        """Store bytes in one request; return their size and digest."""
        entry = Entry.of(data)
        self._bucket.write(self._make_object_key(entry.sha256), data)
        return entry

    def read(self, entry: Entry) -> bytes | None:
        """Return the bytes with the digest of `entry`, or None; raise UploadError if they are altered."""
        key = self._make_object_key(entry.sha256)
        for _ in range(_MAX_ATTEMPTS):
            data = self._bucket.read(key)
            if data is None or hashlib.sha256(data).hexdigest() == entry.sha256:
                return data
        raise UploadError(f"{self._bucket.url(key)} arrived altered {_MAX_ATTEMPTS} times")

    def remove(self, entry: Entry) -> None:
        """Remove the object with the digest of `entry`, if it exists."""
        self._bucket.remove(self._make_object_key(entry.sha256))

    def missing(self, entries: Iterable[Entry]) -> str:
        """Return the first digest whose object is missing or has another size; an empty string if all exist."""
        for digest, size in {entry.sha256: entry.size for entry in entries}.items():
            self._pause()
            object_info = self._bucket.head(self._make_object_key(digest))
            if object_info is None or object_info["size"] != size:
                return digest
        return ""

    def fetch(self, files: Mapping[Path, Entry], local_files: Mapping[str, Path] | None = None) -> None:
        """Download contents to local files that lack them; copy them from `local_files`, files by digest, if possible.
        Raise UploadError if a content is missing or altered."""
        files_by_entry: dict[Entry, list[Path]] = defaultdict(list)
        for file, entry in files.items():
            if not _has_entry_content(file, entry):
                files_by_entry[entry].append(file)
        fetch_arguments = ((entry, paths, local_files or {}) for entry, paths in files_by_entry.items())
        run_threads(self._fetch_content, fetch_arguments, _MAX_PARALLEL_FILES, "fetch")

    def remove_all_except(self, digests: set[str]) -> None:
        """Remove every object below the prefix whose digest is not in `digests`."""
        for stored_object in list(self._bucket.list_objects(f"{self._prefix}/")):
            if stored_object.key.rpartition("/")[2] not in digests:
                self._bucket.remove(stored_object.key)

    def _fetch_content(self, entry: Entry, paths: list[Path], local_files: Mapping[str, Path]) -> None:
        self._pause()
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        first_path, *other_paths = paths
        local_file = local_files.get(entry.sha256)
        if local_file is not None and local_file not in paths and _has_entry_content(local_file, entry):
            copy_file(local_file, first_path)
        if not _has_entry_content(first_path, entry):
            self._download(entry, first_path)
        for other_path in other_paths:
            copy_file(first_path, other_path)

    def _download(self, entry: Entry, file: Path) -> None:
        key = self._make_object_key(entry.sha256)
        object_url = self._bucket.url(key)
        if self._bucket.head(key) is None:
            raise UploadError(f"{object_url}, the content of {file}, is gone; make its stage again (--from-stage)")
        if entry.size > shutil.disk_usage(file.parent).free:
            raise UploadError(f"{object_url} has {entry.size} bytes, more than are free in {file.parent}; make room")
        for _ in range(_MAX_ATTEMPTS):
            self._bucket.download(key, file)
            if _has_entry_content(file, entry):
                return
            file.unlink()
        raise UploadError(f"{object_url} arrived altered {_MAX_ATTEMPTS} times")

    def _make_object_key(self, digest: str) -> str:
        return f"{self._prefix}/{digest[:2]}/{digest}"


def write_document(bucket: Bucket, key: str, value: dict[str, Any]) -> None:
    """Replace a JSON document in one request."""
    bucket.write(key, encode_document(value))


def encode_document(value: dict[str, Any]) -> bytes:
    """Return the content of a JSON document with its digest, which `read_document` verifies."""
    text = json.dumps(value)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}).encode()


def read_document(bucket: Bucket, key: str) -> tuple[dict[str, Any] | None, str]:
    """Return a JSON document and its ETag, None and "" if it does not exist; raise UploadError if it is damaged."""
    for _ in range(_MAX_ATTEMPTS):
        data, etag = bucket.read_tagged(key)
        if data is None:
            return None, ""
        try:
            document = json.loads(data)
            if hashlib.sha256(document["text"].encode()).hexdigest() == document["sha256"]:
                return json.loads(document["text"]), etag
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise UploadError(f"{bucket.url(key)} is damaged, or arrived altered {_MAX_ATTEMPTS} times")


def _has_entry_content(file: Path, entry: Entry) -> bool:
    return file.is_file() and file.stat().st_size == entry.size and sha256(file) == entry.sha256
