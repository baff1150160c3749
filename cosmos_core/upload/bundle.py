"""Files in a bucket by content: each is stored once under its SHA-256, and a document that is written last names them.

What is fetched is compared with its digest, and fetched again where a network altered it.
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
from cosmos_core.run.bucket import SCHEME, Bucket, is_refused_condition, side_by_side
from cosmos_core.run.files import copy_file, sha256
from cosmos_core.upload.transfer import Journal, Transfer

_ATTEMPTS = 3  # for an object that arrives altered
_AT_ONCE = 4


@dataclass(frozen=True)
class Entry:
    """The content of one file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Entry:
        """Return that of a content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True)
class Bundle:
    """Files by their paths, and what else is said of them."""

    files: Mapping[str, Entry]
    info: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return what `bundle_of` reads."""
        return {"files": {path: [each.size, each.sha256] for path, each in self.files.items()}, "info": self.info}


def bundle_of(value: dict[str, Any]) -> Bundle:
    """Return the bundle of a document."""
    return Bundle({path: Entry(*each) for path, each in value["files"].items()}, value["info"])


class Contents:
    """Files below one prefix of a bucket, named by their SHA-256."""

    def __init__(self, bucket: Bucket, prefix: str, pause: Callable[[], None] = lambda: None) -> None:
        """`pause` is called between files and parts, and raises where the run is to stop."""
        self._bucket, self._prefix, self._pause = bucket, prefix, pause

    def send(self, files: Mapping[str, Path], journal: Path | None = None) -> None:
        """Store files, each under its digest, and read back what was sent; `journal` keeps what arrived over a kill.

        Raises:
            UploadError: one arrives altered each time, or is another meanwhile.
        """
        transfer = Transfer(self._bucket, Journal(journal), self._pause)
        transfer.send({self._key(digest): (file, digest) for digest, file in files.items()})

    def write(self, data: bytes) -> Entry:
        """Store what is small in one request."""
        entry = Entry.of(data)
        self._bucket.write(self._key(entry.sha256), data)
        return entry

    def read(self, entry: Entry) -> bytes | None:
        """Return a content that is small; None: it is not there any more.

        Raises:
            UploadError: it arrives altered each time.
        """
        for _ in range(_ATTEMPTS):
            data = self._bucket.read(self._key(entry.sha256))
            if data is None or hashlib.sha256(data).hexdigest() == entry.sha256:
                return data
        raise UploadError(f"{self._url(entry)} arrived altered {_ATTEMPTS} times")

    def remove(self, entry: Entry) -> None:
        """Remove a content, if it is there."""
        self._bucket.remove(self._key(entry.sha256))

    def missing(self, entries: Iterable[Entry]) -> str:
        """Return the digest of the first content that is not there in its size; empty: all is."""
        for digest, size in {each.sha256: each.size for each in entries}.items():
            self._pause()
            found = self._bucket.head(self._key(digest))
            if found is None or found["size"] != size:
                return digest
        return ""

    def fetch(self, files: Mapping[Path, Entry], here: Mapping[str, Path] | None = None) -> None:
        """Make files hold their content; what they have is not fetched, nor what a file in `here` has, by digest.

        Raises:
            UploadError: a content is gone, or arrives altered each time.
        """
        wanted: dict[Entry, list[Path]] = defaultdict(list)
        for file, entry in files.items():
            if not _has(file, entry):
                wanted[entry].append(file)
        calls = ((entry, paths, here or {}) for entry, paths in wanted.items())
        side_by_side(self._fetch_one, calls, _AT_ONCE, "fetch")

    def keep_only(self, digests: set[str]) -> None:
        """Remove every content that is not named."""
        for each in list(self._bucket.objects(f"{self._prefix}/")):
            if each.key.rpartition("/")[2] not in digests:
                self._bucket.remove(each.key)

    def _fetch_one(self, entry: Entry, paths: list[Path], here: Mapping[str, Path]) -> None:
        self._pause()
        first, *others = paths
        first.parent.mkdir(parents=True, exist_ok=True)
        near = here.get(entry.sha256)
        if near is not None and near not in paths and _has(near, entry):
            copy_file(near, first)
        if not _has(first, entry):
            self._download(entry, first)
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            copy_file(first, other)

    def _download(self, entry: Entry, file: Path) -> None:
        key = self._key(entry.sha256)
        where = self._url(entry)
        if self._bucket.head(key) is None:
            raise UploadError(f"{where}, the content of {file}, is gone; make its stage again (--from-stage)")
        if entry.size > shutil.disk_usage(file.parent).free:
            raise UploadError(f"{where} has {entry.size} bytes, more than are free in {file.parent}; make room")
        for _ in range(_ATTEMPTS):
            self._bucket.download(key, file)
            if _has(file, entry):
                return
            file.unlink()
        raise UploadError(f"{where} arrived altered {_ATTEMPTS} times")

    def _url(self, entry: Entry) -> str:
        return f"{SCHEME}{self._bucket.name}/{self._key(entry.sha256)}"

    def _key(self, digest: str) -> str:
        return f"{self._prefix}/{digest[:2]}/{digest}"


def write_document(bucket: Bucket, key: str, value: dict[str, Any], **only: str) -> str:
    """Replace a document in one request; return its ETag. `only` as in `Bucket.write`."""
    text = json.dumps(value)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return bucket.write(key, json.dumps({"sha256": digest, "text": text}).encode(), **only)


def exchange_document(bucket: Bucket, key: str, value: dict[str, Any], etag: str) -> str:
    """Write a document over the one with this ETag, over none where it is empty; return its ETag, or an empty one:
    something else lies there."""
    from botocore.exceptions import ClientError

    only = {"IfMatch": f'"{etag}"'} if etag else {"IfNoneMatch": "*"}
    try:
        return write_document(bucket, key, value, **only)
    except ClientError as error:
        if not is_refused_condition(error):
            raise
    return ""


def read_document(bucket: Bucket, key: str) -> tuple[dict[str, Any] | None, str]:
    """Return a document and its ETag; None and an empty one: there is none.

    Raises:
        UploadError: it arrives altered each time.
    """
    for _ in range(_ATTEMPTS):
        data, etag = bucket.read_tagged(key)
        if data is None:
            return None, ""
        try:
            found = json.loads(data)
            if hashlib.sha256(found["text"].encode()).hexdigest() == found["sha256"]:
                return json.loads(found["text"]), etag
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise UploadError(f"{SCHEME}{bucket.name}/{key} is damaged, or arrived altered {_ATTEMPTS} times")


def _has(file: Path, entry: Entry) -> bool:
    return file.is_file() and file.stat().st_size == entry.size and sha256(file) == entry.sha256
