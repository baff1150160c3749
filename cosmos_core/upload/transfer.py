"""Upload files to a bucket in parallel parts, so that a killed process loses at most a few unfinished parts.

A journal in the folder of the stage records upload ids and parts that arrived; the store's own list of parts takes
precedence. Each part is verified by the MD5 that the store returns, each object by the SHA-256 of its content.
"""

import base64
import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cosmos_core.errors import UploadError
from cosmos_core.run.bucket import Bucket, run_threads
from cosmos_core.run.files import json_objects

PART_BYTES = 16 << 20
_MAX_PARTS = 9000  # maximum number of parts of an upload; S3 allows 10,000
_MAX_PARALLEL_FILES = 4
_MAX_PARALLEL_PARTS = 4
_MAX_ATTEMPTS = 3  # maximum number of uploads of an object whose digest is wrong


@dataclass
class Journal:
    """Journal file of uploads: one JSON line per multipart upload, stored part and verified object."""

    path: Path | None = None
    uploads: dict[str, str] = field(default_factory=dict)
    """Id of the multipart upload of each object, by key."""
    parts: dict[tuple[str, int], str] = field(default_factory=dict)
    """ETag of each stored part, by upload id and part number."""
    verified: dict[str, tuple[str, str]] = field(default_factory=dict)
    """SHA-256 and ETag of each object whose content was verified, by key."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path is None or not self.path.is_file():
            return
        for line in json_objects(self.path.read_text(encoding="utf-8").splitlines()):
            self._apply_journal_line(line)

    def note(self, **line: Any) -> None:
        """Append a line to the journal file and sync the file to disk."""
        with self._lock:
            self._apply_journal_line(line)
            if self.path is not None:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())

    def _apply_journal_line(self, line: dict[str, Any]) -> None:
        match line:
            case {"verified": str(key), "sha256": str(digest), "etag": str(etag)}:
                self.verified[key] = (digest, etag)
            case {"upload": str(upload), "part": int(number), "etag": str(etag)}:
                self.parts[upload, number] = etag
            case {"upload": str(upload), "key": str(key)}:
                self.uploads[key] = upload
            case {"gone": str(key)}:
                self.uploads.pop(key, None)
                self.verified.pop(key, None)


@dataclass
class Transfer:
    """Upload of files to one bucket."""

    bucket: Bucket
    journal: Journal = field(default_factory=Journal)
    pause: Callable[[], None] = lambda: None
    """Function that is called between parts of a file; it raises an error if the run is to stop."""
    part_bytes: int = PART_BYTES

    def send(self, files: dict[str, tuple[Path, str]]) -> None:
        """Store files in the bucket; `files` maps each key to a file and its SHA-256. Objects that are already stored
        are not sent.

        Raises:
            UploadError: a stored object has the wrong digest after each attempt, or its file changed meanwhile.
        """
        run_threads(self._send_file, ((key, *source) for key, source in files.items()), _MAX_PARALLEL_FILES, "upload")

    def _send_file(self, key: str, file: Path, sha256: str) -> None:
        self.pause()
        object_info = self.bucket.head(key)
        if object_info and self.journal.verified.get(key) == (sha256, object_info["etag"]):
            return
        is_sent = object_info is not None and object_info["metadata"].get("sha256") == sha256
        for _ in range(_MAX_ATTEMPTS):
            if not is_sent:
                self._upload_object(key, file, sha256)
            object_info = self.bucket.head(key)
            if object_info is not None and self.bucket.sha256(key) == sha256:
                self.journal.note(verified=key, sha256=sha256, etag=object_info["etag"])
                return
            is_sent = False
            self.bucket.remove(key)
            self.journal.note(gone=key)
        raise UploadError(
            f"{self.bucket.url(key)} arrived altered {_MAX_ATTEMPTS} times: its sha256 is not that of {file}"
        )

    def _upload_object(self, key: str, file: Path, sha256: str) -> None:
        from botocore.exceptions import ClientError

        size = file.stat().st_size
        part_bytes = max(self.part_bytes, -(-size // _MAX_PARTS))
        if size <= part_bytes:
            data = file.read_bytes()
            md5, content_md5 = _compute_md5(data)
            for _ in range(_MAX_ATTEMPTS):
                response = self.bucket.client.put_object(
                    Bucket=self.bucket.name, Key=key, Body=data, ContentMD5=content_md5, Metadata={"sha256": sha256}
                )
                if _is_upload_confirmed(response, md5):
                    return
            return  # no error: the caller verifies the digest of the stored object
        try:
            self._upload_in_parts(key, file, size, part_bytes, sha256)
        except ClientError as error:
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise
            # The store does not know the upload: it was aborted, or it was completed and the response was lost. The
            # caller verifies the stored object.
        self.journal.note(gone=key)

    def _upload_in_parts(self, key: str, file: Path, size: int, part_bytes: int, sha256: str) -> None:
        upload_id = self._get_upload_id(key, sha256)
        parts = range(1, -(-size // part_bytes) + 1)
        part_paginator = self.bucket.client.get_paginator("list_parts")
        pages = part_paginator.paginate(Bucket=self.bucket.name, Key=key, UploadId=upload_id)
        stored_etags = {part["PartNumber"]: part["ETag"].strip('"') for page in pages for part in page.get("Parts", ())}
        part_arguments = (
            (key, upload_id, number, (file, (number - 1) * part_bytes, part_bytes), stored_etags) for number in parts
        )
        etags = run_threads(self._upload_part, part_arguments, _MAX_PARALLEL_PARTS, "part")
        completed_parts = [
            {"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in zip(parts, etags, strict=True)
        ]
        self.bucket.client.complete_multipart_upload(
            Bucket=self.bucket.name, Key=key, UploadId=upload_id, MultipartUpload={"Parts": completed_parts}
        )

    def _get_upload_id(self, key: str, sha256: str) -> str:
        """Return the id of the multipart upload in the journal, or of a new upload. Other uploads of the same key are
        kept, because another machine may be sending the same content."""
        client, name = self.bucket.client, self.bucket.name
        previous_id = self.journal.uploads.get(key)
        uploads = client.list_multipart_uploads(Bucket=name, Prefix=key).get("Uploads", ()) if previous_id else ()
        if any(
            pending_upload["Key"] == key and pending_upload["UploadId"] == previous_id for pending_upload in uploads
        ):
            return str(previous_id)
        upload_id: str = client.create_multipart_upload(Bucket=name, Key=key, Metadata={"sha256": sha256})["UploadId"]
        self.journal.note(upload=upload_id, key=key)
        return upload_id

    def _upload_part(
        self, key: str, upload: str, number: int, file_slice: tuple[Path, int, int], stored_etags: dict[int, str]
    ) -> str:
        self.pause()
        file, offset, length = file_slice
        with open(file, "rb") as source:
            source.seek(offset)
            data = source.read(length)
        md5, content_md5 = _compute_md5(data)
        etag = stored_etags.get(number, "")
        if etag and etag in {md5, self.journal.parts.get((upload, number))}:
            return etag
        for _ in range(_MAX_ATTEMPTS):
            response = self.bucket.client.upload_part(
                Bucket=self.bucket.name, Key=key, UploadId=upload, PartNumber=number, Body=data, ContentMD5=content_md5
            )
            if _is_upload_confirmed(response, md5):
                break
        etag = response["ETag"].strip('"')
        self.journal.note(upload=upload, part=number, etag=etag)
        return str(etag)


def _compute_md5(data: bytes) -> tuple[str, str]:
    """Return the MD5 of data in two forms: hexadecimal as in an ETag, and base64 as in a request."""
    digest = hashlib.md5(data, usedforsecurity=False)
    return digest.hexdigest(), base64.b64encode(digest.digest()).decode()


def _is_upload_confirmed(response: dict[str, Any], md5: str) -> bool:
    """Return True if the store's response confirms the bytes that were sent. The ETag of an encrypted object is no MD5,
    so its response always counts as a confirmation."""
    return "ServerSideEncryption" in response or response["ETag"].strip('"') == md5
