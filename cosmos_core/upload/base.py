"""Where models are published. A target is one file in this folder; it stores versions and moves a pointer last."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from cosmos_core.errors import ConfigError
from cosmos_core.upload.local import LocalTarget


class Target(Protocol):
    """A place that holds published versions of one model."""

    def published(self) -> dict[str, Any] | None:
        """The record of the version that the pointer names; None: nothing was published yet."""

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Store `folder` as `version`, verify what arrived, then move the pointer; the place of the version.

        Safe to repeat after a crash at any point: a complete version is not sent again, a part of one is replaced.

        Raises:
            UploadError: the target refused, lost or altered something; the pointer was not moved.
        """


def target_of(url: str) -> Target:
    """The target that a URL or folder names.

    Raises:
        ConfigError: this version cannot publish there.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalTarget(Path(url))
    if scheme == "file":
        return LocalTarget(Path(rest))
    raise ConfigError(f"target = {url!r}: this version publishes to local folders only; give a path or file:///...")
