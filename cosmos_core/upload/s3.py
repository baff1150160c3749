"""Publication target `s3`: `s3://BUCKET/PREFIX` of any S3-compatible store, with versions in `<prefix>/<version>/...`.

The pointer `<prefix>/latest.json` names the current and the earlier versions; it is written last, after every object
was verified. `AWS_ENDPOINT_URL` or `PROD_S3_CHECKPOINT_ENDPOINT_URL` has the address of the store.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cosmos_core.errors import DamagedRecord, UploadError
from cosmos_core.run.bucket import S3_SCHEME, Bucket, split_s3_url, translate_errors
from cosmos_core.upload.base import JOURNAL_FILE, RECORD_FILE, append_version, is_publication_record
from cosmos_core.upload.transfer import FileTransfer, UploadJournal

POINTER_FILE = "latest.json"
_POINTER_UNCHANGED_NOTE = "the pointer was not moved"
_MAX_POINTER_ATTEMPTS = 50


class S3Target:
    """Publication target that stores versions below one prefix of a bucket."""

    def __init__(self, location: str, *, read_timeout_seconds: float = 20.0) -> None:
        bucket_name, self.prefix = split_s3_url(f"{S3_SCHEME}{location}")
        self.bucket = Bucket(bucket_name, read_timeout_seconds=read_timeout_seconds)
        self.file_transfer = FileTransfer(self.bucket)

    def check(self) -> None:
        """Raise ConfigError or UploadError if the bucket cannot be reached or written; store nothing."""
        self.bucket.check_write_access(self._make_key(POINTER_FILE))

    def prepare_upload(self, folder: Path, check_cancellation: Callable[[], None]) -> None:
        """Keep a journal in `folder`, with which `publish` continues an interrupted upload. `publish` calls
        `check_cancellation` before it sends a part or moves the pointer; the function's errors end the upload."""
        self.file_transfer.journal = UploadJournal(folder / JOURNAL_FILE)
        self.file_transfer.check_cancellation = check_cancellation

    def published(self) -> dict[str, Any] | None:
        history = self.history()
        return self.record_of(history[-1]) if history else None

    def record_of(self, version: str) -> dict[str, Any]:
        """Return the publication record of the model version `version`; raise DamagedRecord if the record is missing
        or damaged."""
        with translate_errors(self.where(version)):
            record = _decode_json(self.bucket.read(self._make_key(f"{version}/{RECORD_FILE}")))
        if not is_publication_record(record):
            raise DamagedRecord(f"{self.where(version)}/{RECORD_FILE} is missing or damaged; publish again")
        return record

    def history(self) -> list[str]:
        """Return the model versions to which the pointer `latest.json` has referred, the current version last; empty
        if nothing was published. Raise DamagedRecord if the pointer is damaged."""
        with translate_errors(self.where(POINTER_FILE)):
            return self._parse_history(self.bucket.read(self._make_key(POINTER_FILE)))

    def _parse_history(self, pointer_bytes: bytes | None) -> list[str]:
        pointer_document = _decode_json(pointer_bytes)
        if pointer_document is None:
            return []
        history = pointer_document.get("history") if isinstance(pointer_document, dict) else None
        if not isinstance(history, list) or not all(isinstance(version, str) for version in history) or not history:
            raise DamagedRecord(f"{self.where(POINTER_FILE)} is damaged; publish again, or remove it")
        return list(history)

    def versions(self) -> list[str]:
        """Return the names of all model versions in the bucket, the version published first at the start."""
        key_prefix, record_suffix = self._make_key(""), f"/{RECORD_FILE}"
        with translate_errors(self.where("")):
            record_objects = [each for each in self.bucket.list_objects(key_prefix) if each.key.endswith(record_suffix)]
        record_objects.sort(key=lambda record_object: (record_object.modified_time, record_object.key))
        names = [each.key.removeprefix(key_prefix).removesuffix(record_suffix) for each in record_objects]
        return [name for name in names if "/" not in name]  # names with "/" belong to another target below this prefix

    def where(self, version: str) -> str:
        """Return the URL of the published model version `version`."""
        return self.bucket.url(self._make_key(version))

    def damage(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Return a message about the first file of `record` that is missing in a stored version, or whose digest or
        size in the store's metadata differs from the file in `folder`; empty if there is none."""
        with translate_errors(self.where(version)):
            for name, sha256 in record["files"].items():
                object_info = self.bucket.head(self._make_key(f"{version}/{name}"))
                digest_and_size = (object_info["metadata"].get("sha256"), object_info["size"]) if object_info else None
                if digest_and_size != (sha256, (folder / name).stat().st_size):
                    return f"{name} is missing or altered"
        return ""

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        with translate_errors(self.where(version), message_hint=_POINTER_UNCHANGED_NOTE):
            version_prefix, record_key = self._make_key(version), self._make_key(f"{version}/{RECORD_FILE}")
            files = {f"{version_prefix}/{name}": (folder / name, digest) for name, digest in record["files"].items()}
            self.file_transfer.send(files)
            stored_keys = {each.key for each in self.bucket.list_objects(f"{version_prefix}/")}
            for extra_key in stored_keys - {*files, record_key}:
                self.bucket.remove(extra_key)
            self.bucket.write(record_key, json.dumps(record, indent=1).encode())
        self.file_transfer.check_cancellation()
        self.point_to(version)
        return self.where(version)

    def point_to(self, version: str, history: list[str] | None = None) -> None:
        """Let the pointer `latest.json` refer to a stored model version. The pointer also contains the list of versions
        to which it has referred: `history`, or the list so far if `history` is None, with `version` appended. Raise
        UploadError if a file of the version is missing."""
        with translate_errors(self.where(version), message_hint=_POINTER_UNCHANGED_NOTE):
            for name in self.record_of(version)["files"]:
                if self.bucket.head(self._make_key(f"{version}/{name}")) is None:
                    raise UploadError(f"{self.where(version)}/{name} is gone; {_POINTER_UNCHANGED_NOTE}")
            for _ in range(_MAX_POINTER_ATTEMPTS):
                if self._replace_pointer(version, history):
                    return
                # Try again unless the run is to stop, because another publication moved the pointer after it was read.
                self.file_transfer.check_cancellation()
            conflict_text = f"the store refused {_MAX_POINTER_ATTEMPTS} writes because the object had changed"
            remedy = f"{_POINTER_UNCHANGED_NOTE}, publish again when no other publication runs"
            raise UploadError(f"{self.where(POINTER_FILE)}: {conflict_text}; {remedy}")

    def _replace_pointer(self, version: str, history: list[str] | None) -> bool:
        """Write the pointer `latest.json` with a new current version; replace a damaged one too. Return False if
        another process changed the pointer after this call read it."""
        from botocore.exceptions import ClientError

        pointer_key = self._make_key(POINTER_FILE)
        pointer_bytes, etag = self.bucket.read_with_etag(pointer_key)
        saved_history: list[str] = []
        with suppress(DamagedRecord):
            saved_history = self._parse_history(pointer_bytes)
        pointer_document = {"version": version, "history": append_version(saved_history, version, history)}
        pointer_json = json.dumps(pointer_document, indent=1).encode()
        try:
            return bool(self.bucket.replace_if_unchanged(pointer_key, pointer_json, etag))
        except ClientError as error:
            if error.response["Error"].get("Code") != "NotImplemented":
                raise
            # Overwrite the pointer without a condition, because the store does not support conditional writes.
            return bool(self.bucket.write(pointer_key, pointer_json))

    def _make_key(self, relative_key: str) -> str:
        return f"{self.prefix}/{relative_key}" if self.prefix else relative_key


def _decode_json(json_bytes: bytes | None) -> Any:
    """Return the value of JSON data; None if `json_bytes` is None, and an empty dict if the data are damaged."""
    try:
        return None if json_bytes is None else json.loads(json_bytes)
    except ValueError:
        return {}
