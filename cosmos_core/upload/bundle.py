"""Content-addressed storage in a bucket: each file content is stored once, under its SHA-256. A JSON document lists the
stored contents and is written after them.

A downloaded file is compared with its digest, and downloaded again if the network altered it.
"""

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.errors import DiskFull, UploadError
from cosmos_core.run.bucket import Bucket, thread_map
from cosmos_core.run.files import copy_file, sha256
from cosmos_core.upload.transfer import FileTransfer, UploadJournal

_MAX_DOWNLOAD_ATTEMPTS = 3  # maximum number of downloads of an object whose digest is wrong
_MAX_PARALLEL_FILES = 4


@dataclass(frozen=True)
class ContentEntry:
    """Size in bytes and SHA-256 of the content of one file."""

    size: int
    sha256: str

    @classmethod
    def from_bytes(cls, content_bytes: bytes) -> "ContentEntry":
        """Return the entry of a file with the content `content_bytes`: its size and its SHA-256."""
        return cls(len(content_bytes), hashlib.sha256(content_bytes).hexdigest())


class ContentStore:
    """Storage of files below one prefix of a bucket; the key of each file is the SHA-256 of its content."""

    def __init__(self, bucket: Bucket, key_prefix: str, check_cancellation: Callable[[], None] = lambda: None) -> None:
        """Open the store below `key_prefix` in a bucket. `check_cancellation` is called between the parts of each
        transfer, and can raise an error to end the transfer."""
        self._bucket, self._key_prefix, self._check_cancellation = bucket, key_prefix, check_cancellation

    def send(self, files: Mapping[str, Path], journal_file: Path | None = None) -> None:
        """Upload files and verify the stored objects; the keys of `files` are the SHA-256 digests. With `journal_file`,
        an interrupted upload continues after the parts that have arrived. For errors see `FileTransfer.send`."""
        file_and_digest_by_key = {self._make_object_key(digest): (file, digest) for digest, file in files.items()}
        FileTransfer(self._bucket, UploadJournal(journal_file), self._check_cancellation).send(file_and_digest_by_key)

    def write(self, content_bytes: bytes) -> ContentEntry:
        """Store bytes under their SHA-256 in one request; return their size and digest."""
        content_entry = ContentEntry.from_bytes(content_bytes)
        self._bucket.write(self._make_object_key(content_entry.sha256), content_bytes)
        return content_entry

    def read(self, entry: ContentEntry) -> bytes | None:
        """Download and return the file content whose SHA-256 is `entry.sha256`; None if the bucket does not have it.
        Raise UploadError if the downloaded bytes have another digest at each attempt."""
        key = self._make_object_key(entry.sha256)
        for _ in range(_MAX_DOWNLOAD_ATTEMPTS):
            content_bytes = self._bucket.read(key)
            if content_bytes is None or hashlib.sha256(content_bytes).hexdigest() == entry.sha256:
                return content_bytes
        raise UploadError(f"{self._bucket.url(key)} arrived altered {_MAX_DOWNLOAD_ATTEMPTS} times")

    def remove(self, entry: ContentEntry) -> None:
        """Remove the stored file content whose SHA-256 is `entry.sha256`; do nothing if the bucket does not have it."""
        self._bucket.remove(self._make_object_key(entry.sha256))

    def find_missing_digest(self, size_by_digest: Mapping[str, int]) -> str:
        """Return the first digest in `size_by_digest` whose stored object is missing or has another size; "" if all
        objects are complete."""
        for digest, size in size_by_digest.items():
            self._check_cancellation()
            object_metadata = self._bucket.head(self._make_object_key(digest))
            if object_metadata is None or object_metadata["size"] != size:
                return digest
        return ""

    def fetch(self, target_entries: Mapping[Path, ContentEntry], local_files: Mapping[str, Path] | None = None) -> None:
        """Download the content of each entry in `target_entries` to the entry's file, unless the file has this content
        already. Contents of `local_files`, local files by SHA-256, are copied instead. Raise UploadError if a content
        is missing in the bucket or arrives altered, and DiskFull if the disk has too little space."""
        target_paths_by_entry: dict[ContentEntry, list[Path]] = defaultdict(list)
        for file, entry in target_entries.items():
            if not _matches_content_entry(file, entry):
                target_paths_by_entry[entry].append(file)
        argument_tuples = ((entry, paths, local_files or {}) for entry, paths in target_paths_by_entry.items())
        thread_map(self._fetch_content, argument_tuples, _MAX_PARALLEL_FILES, "fetch")

    def remove_all_except(self, kept_digests: set[str]) -> None:
        """Remove every stored file content whose SHA-256 is not in `kept_digests`."""
        for stored_object in list(self._bucket.list_objects(f"{self._key_prefix}/")):
            if stored_object.key.rpartition("/")[2] not in kept_digests:
                self._bucket.remove(stored_object.key)

    def _fetch_content(self, entry: ContentEntry, target_paths: list[Path], local_files: Mapping[str, Path]) -> None:
        self._check_cancellation()
        for target_path in target_paths:
            target_path.parent.mkdir(parents=True, exist_ok=True)
        first_target_path, *remaining_target_paths = target_paths
        local_copy = local_files.get(entry.sha256)
        if local_copy is not None and local_copy not in target_paths and _matches_content_entry(local_copy, entry):
            copy_file(local_copy, first_target_path)
        if not _matches_content_entry(first_target_path, entry):
            self._download(entry, first_target_path)
        for other_path in remaining_target_paths:
            copy_file(first_target_path, other_path)

    def _download(self, entry: ContentEntry, file: Path) -> None:
        key = self._make_object_key(entry.sha256)
        object_url = self._bucket.url(key)
        if self._bucket.head(key) is None:
            raise UploadError(f"{object_url}, the content of {file}, is gone; make its stage again (--from-stage)")
        if entry.size > shutil.disk_usage(file.parent).free:
            # Raise no UploadError, after which a caller would skip a checkpoint as damaged.
            raise DiskFull(f"{object_url} has {entry.size} bytes, more than are free in {file.parent}; make room")
        for _ in range(_MAX_DOWNLOAD_ATTEMPTS):
            self._bucket.download(key, file)
            if _matches_content_entry(file, entry):
                return
            file.unlink()
        raise UploadError(f"{object_url} arrived altered {_MAX_DOWNLOAD_ATTEMPTS} times")

    def _make_object_key(self, digest: str) -> str:
        return f"{self._key_prefix}/{digest[:2]}/{digest}"


def write_index(bucket: Bucket, key: str, entry_by_path: Mapping[str, ContentEntry], **info: str) -> None:
    """Replace the index at `key`, a JSON document with the size and SHA-256 of each stored file by path. `info` are
    further values about all files together."""
    files = {path: [entry.size, entry.sha256] for path, entry in entry_by_path.items()}
    bucket.write(key, encode_document({"files": files, "info": info}))


def read_index(bucket: Bucket, key: str) -> tuple[dict[str, ContentEntry], dict[str, str], str]:
    """Read the index at `key` (see `write_index`). Return the entry of each file by path, the further values `info`,
    and the ETag of the index; all three are empty if there is no index."""
    document, etag = read_document(bucket, key)
    document = document or {"files": {}, "info": {}}
    return {path: ContentEntry(*entry) for path, entry in document["files"].items()}, document["info"], etag


def encode_document(document: dict[str, Any]) -> bytes:
    """Return the bytes to store for a JSON document: the JSON text with its SHA-256, which `read_document` verifies."""
    document_text = json.dumps(document)
    return json.dumps({"sha256": hashlib.sha256(document_text.encode()).hexdigest(), "text": document_text}).encode()


def read_document(bucket: Bucket, key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON document at `key` (see `encode_document`) and its ETag; None and "" if it does not exist. Raise
    UploadError if the document is damaged."""
    for _ in range(_MAX_DOWNLOAD_ATTEMPTS):
        document_bytes, etag = bucket.read_with_etag(key)
        if document_bytes is None:
            return None, ""
        try:
            document = json.loads(document_bytes)
            if hashlib.sha256(document["text"].encode()).hexdigest() == document["sha256"]:
                return json.loads(document["text"]), etag
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
    raise UploadError(f"{bucket.url(key)} is damaged, or arrived altered {_MAX_DOWNLOAD_ATTEMPTS} times")


def _matches_content_entry(file: Path, entry: ContentEntry) -> bool:
    return file.is_file() and file.stat().st_size == entry.size and sha256(file) == entry.sha256
