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
from cosmos_core.run.bucket import Bucket, may_content_have_md5, thread_map
from cosmos_core.run.files import parse_json_objects
from cosmos_core.transient import is_transient

PART_BYTES = 16 << 20
_MAX_PARTS_PER_UPLOAD = 9000  # maximum number of parts of an upload; S3 allows 10,000
_MAX_PARALLEL_FILES = 4
_MAX_PARALLEL_PARTS = 4
_MAX_UPLOAD_ATTEMPTS = 3  # maximum number of uploads of an object whose digest is wrong


@dataclass
class UploadJournal:
    """Journal file of uploads: one JSON line per multipart upload, stored part and verified object."""

    path: Path | None = None
    upload_ids: dict[str, str] = field(default_factory=dict)
    """Id of the unfinished multipart upload of each object, by the key of the object."""
    part_etags: dict[tuple[str, int], str] = field(default_factory=dict)
    """ETag of each stored part, by upload id and part number."""
    verified_objects: dict[str, tuple[str, str]] = field(default_factory=dict)
    """SHA-256 and ETag of each object whose content was verified, by the key of the object."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.is_file():
            for journal_line in parse_json_objects(self.path.read_text(encoding="utf-8").splitlines()):
                self._apply_journal_line(journal_line)

    def append_line(self, **journal_line: Any) -> None:
        """Append a line to the journal file and sync the file to disk."""
        with self._lock:
            self._apply_journal_line(journal_line)
            if self.path is not None:
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(journal_line) + "\n")
                    file.flush()
                    os.fsync(file.fileno())

    def _apply_journal_line(self, journal_line: dict[str, Any]) -> None:
        match journal_line:
            case {"verified": str(key), "sha256": str(digest), "etag": str(etag)}:
                self.verified_objects[key] = (digest, etag)
            case {"upload": str(upload_id), "part": int(part_number), "etag": str(etag)}:
                self.part_etags[upload_id, part_number] = etag
            case {"upload": str(upload_id), "key": str(key)}:
                self.upload_ids[key] = upload_id
            case {"gone": str(key)}:
                self.upload_ids.pop(key, None)
                self.verified_objects.pop(key, None)


@dataclass
class FileTransfer:
    """Upload of files to one bucket."""

    bucket: Bucket
    journal: UploadJournal = field(default_factory=UploadJournal)
    check_cancellation: Callable[[], None] = lambda: None
    """Function that is called before each part of a file; it raises an error if the run is to stop."""
    part_bytes: int = PART_BYTES

    def send(self, files: dict[str, tuple[Path, str]]) -> None:
        """Upload files to the bucket, except those that it has; `files` maps each object key to a file and its SHA-256.
        Raise UploadError if the stored object has another SHA-256 after each attempt, as after a change of the file."""
        file_arguments = ((key, *file_and_digest) for key, file_and_digest in files.items())
        thread_map(self._send_file, file_arguments, _MAX_PARALLEL_FILES, "upload")

    def _send_file(self, key: str, file: Path, sha256: str) -> None:
        self.check_cancellation()
        object_info = self.bucket.head(key)
        if object_info and self.journal.verified_objects.get(key) == (sha256, object_info["etag"]):
            return
        is_object_stored = object_info is not None and object_info["metadata"].get("sha256") == sha256
        for _ in range(_MAX_UPLOAD_ATTEMPTS):
            if not is_object_stored:
                self._upload_object(key, file, sha256)
            object_info = self.bucket.head(key)
            if object_info is not None and self.bucket.sha256(key) == sha256:
                self.journal.append_line(verified=key, sha256=sha256, etag=object_info["etag"])
                return
            is_object_stored = False
            self.bucket.remove(key)
            self.journal.append_line(gone=key)
        mismatch_text = f"arrived altered {_MAX_UPLOAD_ATTEMPTS} times: its sha256 is not that of {file}"
        raise UploadError(f"{self.bucket.url(key)} {mismatch_text}")

    def _upload_object(self, key: str, file: Path, sha256: str) -> None:
        from botocore.exceptions import ClientError

        file_size = file.stat().st_size
        part_bytes = max(self.part_bytes, -(-file_size // _MAX_PARTS_PER_UPLOAD))
        if file_size <= part_bytes:
            put_object, file_content = self.bucket.s3_client.put_object, file.read_bytes()
            self._send_with_md5(put_object, file_content, Key=key, Metadata={"sha256": sha256})
            return
        try:
            self._upload_in_parts(key, file, file_size, part_bytes, sha256)
        except ClientError as error:
            if error.response["Error"].get("Code") != "NoSuchUpload":
                raise
            # The upload was aborted, or completed without a response: the caller finds out when it verifies the object.
        self.journal.append_line(gone=key)

    def _upload_in_parts(self, key: str, file: Path, file_size: int, part_bytes: int, sha256: str) -> None:
        upload_id, stored_etags = self._open_upload(key, sha256)
        part_numbers = range(1, -(-file_size // part_bytes) + 1)
        numbered_file_slices = [(number, (file, (number - 1) * part_bytes, part_bytes)) for number in part_numbers]
        part_arguments = (
            (key, upload_id, number, file_slice, stored_etags) for number, file_slice in numbered_file_slices
        )
        part_etags = thread_map(self._upload_part, part_arguments, _MAX_PARALLEL_PARTS, "part")
        sent_parts = [
            {"PartNumber": number, "ETag": f'"{etag}"'} for number, etag in zip(part_numbers, part_etags, strict=True)
        ]
        self.bucket.s3_client.complete_multipart_upload(
            Bucket=self.bucket.name, Key=key, UploadId=upload_id, MultipartUpload={"Parts": sent_parts}
        )

    def _open_upload(self, key: str, sha256: str) -> tuple[str, dict[int, str]]:
        """Return the id of the multipart upload of `key` in the journal, and the ETags of its stored parts by number.
        Start a new upload if the journal has none, or if the store refuses to list the parts because the upload is gone
        (status 404, in some stores 400) or because this account can only write. Other uploads of the key, possibly of
        other machines, are kept."""
        from botocore.exceptions import ClientError

        s3, object_arguments = self.bucket.s3_client, {"Bucket": self.bucket.name, "Key": key}
        if upload_id := self.journal.upload_ids.get(key):
            try:
                part_list_pages = s3.get_paginator("list_parts").paginate(**object_arguments, UploadId=upload_id)
                stored_parts = [part for page in part_list_pages for part in page.get("Parts", ())]
                return upload_id, {part["PartNumber"]: part["ETag"].strip('"') for part in stored_parts}
            except ClientError as error:
                # A failing store may still have the parts, unless it cannot list parts at all (501).
                if is_transient(error) and error.response["ResponseMetadata"].get("HTTPStatusCode") != 501:
                    raise
        upload_id = str(s3.create_multipart_upload(**object_arguments, Metadata={"sha256": sha256})["UploadId"])
        self.journal.append_line(upload=upload_id, key=key)
        return upload_id, {}

    def _upload_part(
        self, key: str, upload_id: str, number: int, file_slice: tuple[Path, int, int], etags_by_number: dict[int, str]
    ) -> str:
        self.check_cancellation()
        file, offset_bytes, num_bytes = file_slice
        with open(file, "rb") as part_source:
            part_source.seek(offset_bytes)
            part_content = part_source.read(num_bytes)
        etag = etags_by_number.get(number, "")
        part_md5 = hashlib.md5(part_content, usedforsecurity=False).hexdigest() if etag else ""
        if etag and etag in {part_md5, self.journal.part_etags.get((upload_id, number))}:
            return etag
        upload_part = self.bucket.s3_client.upload_part
        etag = self._send_with_md5(upload_part, part_content, Key=key, UploadId=upload_id, PartNumber=number)
        self.journal.append_line(upload=upload_id, part=number, etag=etag)
        return etag

    def _send_with_md5(self, send_request: Callable[..., Any], content: bytes, **request_arguments: Any) -> str:
        """Send `content` in one request, up to three times if it arrives altered; return its ETag."""
        md5_hash = hashlib.md5(content, usedforsecurity=False)
        content_md5 = base64.b64encode(md5_hash.digest()).decode()
        for _ in range(_MAX_UPLOAD_ATTEMPTS):
            response = send_request(Bucket=self.bucket.name, Body=content, ContentMD5=content_md5, **request_arguments)
            if may_content_have_md5(response, md5_hash.hexdigest()):
                break
        return str(response["ETag"].strip('"'))
