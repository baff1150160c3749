"""Target `s3`: publish to `s3://BUCKET/PREFIX` of any S3-compatible store, `<prefix>/<version>/...`.

`<prefix>/latest.json` is the pointer: it is written last, when every object was read back, and names the version and
those before it. The store may be any; `AWS_ENDPOINT_URL` or `PROD_S3_CHECKPOINT_ENDPOINT_URL` says where it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_core.errors import DamagedRecord, UploadError
from cosmos_core.run.bucket import SCHEME, Bucket, split_url, translate_errors
from cosmos_core.upload.base import JOURNAL, RECORD, is_record, moved
from cosmos_core.upload.transfer import Journal, Transfer

POINTER = "latest.json"
_STAYS = "the pointer was not moved"


class S3Target:
    """Holds versions side by side below one prefix."""

    def __init__(self, location: str, *, read_seconds: float = 20.0) -> None:
        name, self.prefix = split_url(f"{SCHEME}{location}")
        self.bucket = Bucket(name, read_seconds=read_seconds)
        self.transfer = Transfer(self.bucket)

    def check(self) -> None:
        """Find out whether the bucket can be reached, and change nothing.

        Raises:
            ConfigError, UploadError: it cannot.
        """
        self.bucket.check()

    def attend(self, folder: Path, pause: Callable[[], None]) -> None:
        """Keep in `folder` what has arrived, and call `pause` between parts and before the pointer moves."""
        self.transfer.journal, self.transfer.pause = Journal(folder / JOURNAL), pause

    def published(self) -> dict[str, Any] | None:
        """Return the record of what the pointer names; None: nothing was published yet.

        Raises:
            DamagedRecord: something was, but nobody can tell what.
            UploadError: the store is not reached.
        """
        history = self.history()
        return self.record_of(history[-1]) if history else None

    def record_of(self, version: str) -> dict[str, Any]:
        """Return the record of a version.

        Raises:
            DamagedRecord: there is none, or it is damaged.
        """
        record = self._read(f"{version}/{RECORD}")
        if record is None or not is_record(record):
            raise DamagedRecord(f"{self.where(version)}/{RECORD} is missing or damaged; publish again")
        return record

    def history(self) -> list[str]:
        """Return the versions that the pointer has named, the present one last.

        Raises:
            DamagedRecord: the pointer cannot be read.
        """
        pointer = self._read(POINTER)
        if pointer is None:
            return []
        found = pointer.get("history") if isinstance(pointer, dict) else None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found) or not found:
            raise DamagedRecord(f"{self.where(POINTER)} is damaged; publish again, or remove it")
        return list(found)

    def versions(self) -> list[str]:
        """Return all versions that are there, by the time at which they arrived."""
        head, tail = self._key(""), f"/{RECORD}"
        with translate_errors(self.where("")):
            found = [(each.modified, each.key) for each in self.bucket.objects(head) if each.key.endswith(tail)]
        names = [key.removeprefix(head).removesuffix(tail) for _, key in sorted(found)]
        return [name for name in names if "/" not in name]  # else of another target below this one

    def where(self, version: str) -> str:
        """Return the URL of a version."""
        return f"{SCHEME}{self.bucket.name}/{self._key(version)}"

    def damage(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Return which file of `record`, as in `folder`, a version lacks or has altered as far as the store tells, or
        an empty string."""
        with translate_errors(self.where(version)):
            for name, sha256 in record["files"].items():
                there = self.bucket.head(self._key(f"{version}/{name}"))
                sent = (sha256, (folder / name).stat().st_size)
                if there is None or (there["metadata"].get("sha256"), there["size"]) != sent:
                    return f"{name} is missing or altered"
        return ""

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Send what is not there, read it all back, move the pointer; return the URL of the version.

        Raises:
            UploadError: the store is not reached, or something arrives altered.
            ConfigError: it refuses the credentials.
        """
        with translate_errors(self.where(version), note=_STAYS):
            files = {self._key(f"{version}/{name}"): (folder / name, sha) for name, sha in record["files"].items()}
            known = {*files, self._key(f"{version}/{RECORD}")}
            self.transfer.send(files)
            for extra in {each.key for each in self.bucket.objects(self._key(f"{version}/"))} - known:
                self.bucket.client.delete_object(Bucket=self.bucket.name, Key=extra)
            self.bucket.write(self._key(f"{version}/{RECORD}"), _json(record))
        self.transfer.pause()
        self.point_to(version)
        return self.where(version)

    def point_to(self, version: str, history: list[str] | None = None) -> None:
        """Make `version`, which is there, the published one; `history` is what `history()` returns then.

        Raises:
            UploadError: it is not there.
        """
        with translate_errors(self.where(version), note=_STAYS):
            record = self.record_of(version)
            for name in record["files"]:
                if self.bucket.head(self._key(f"{version}/{name}")) is None:
                    raise UploadError(f"{self.where(version)}/{name} is gone; {_STAYS}")
            names = moved(self._history_or_none(), version) if history is None else history
            self.bucket.write(self._key(POINTER), _json({"version": version, "history": names}))

    def _history_or_none(self) -> list[str]:
        """Return the history, which begins anew where the pointer is damaged: it could not be replaced otherwise."""
        try:
            return self.history()
        except DamagedRecord:
            return []

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _read(self, name: str) -> Any:
        with translate_errors(self.where(name)):
            data = self.bucket.read(self._key(name))
        try:
            return None if data is None else json.loads(data)
        except ValueError:
            return {}


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()
