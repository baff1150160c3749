"""Where models are published. A target is one file in this folder; it stores versions and moves a pointer last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.target import TARGETS_FOLDER, split_target
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.registry import is_import_path, load_named

RECORD = "published.json"
"""What a version says of itself, beside its files."""
JOURNAL = "upload.jsonl"
"""What an upload keeps in the folder of its stage, to go on after a kill."""
_MOST_KEPT = 100


class Target(Protocol):
    """What `target` names: a class that is called with the location behind `NAME://`, and holds versions of one model.

    A target that can tell beforehand whether it can be written has a method `check`, which raises ConfigError. One that
    can go on with an interrupted upload has `attend(folder, pause)`: it keeps notes in the folder, and calls `pause`
    now and then and before its pointer moves, which raises where the run is to stop. One with `where` and
    `damage(folder, version, record)`, which returns what is wrong with the files of `record` in a version, or an empty
    string, is not sent weights a second time that it has as its published version. One whose pointer can go back has
    `history`, `record_of`, `where` and `point_to`, and `versions` if it can list those too that a rollback left behind,
    as `S3Target`.
    One of ours is `SomeNameTarget` in `some_name.py`; a user's is `path/file.py:Class` or `path/file.py:Class://LOCATION`.
    """

    def published(self) -> dict[str, Any] | None:
        """Return the record of the version that the pointer names; None: nothing was published yet.

        Raises:
            DamagedRecord: something was, but nobody can tell what; `publish` goes on all the same.
            UploadError: the target cannot be asked.
        """

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Store `folder` as `version`, verify what arrived, then move the pointer; return where the version is.

        Safe to repeat after a crash at any point: a complete version is not sent again, a part of one is replaced.
        `record["files"]` has the sha256 of each file, `record["metrics"]` what a gate compares with.

        Raises:
            UploadError: the target refused, lost or altered something; the pointer was not moved.
        """


def is_record(value: Any) -> bool:
    """Return whether a value is what `publish` was given as a record."""
    return isinstance(value, dict) and isinstance(value.get("metrics"), dict) and isinstance(value.get("files"), dict)


def moved(history: list[str], version: str) -> list[str]:
    """Return the versions that the pointer has named once it names this one too."""
    return history[-_MOST_KEPT:] if history[-1:] == [version] else [*history[-_MOST_KEPT + 1 :], version]


def check_targets(pipeline: Pipeline) -> None:
    """Ask each target of ours that a stage publishes to whether it can be written, where it can tell beforehand.

    Raises:
        ConfigError: it cannot.
    """
    for stage in pipeline.stages:
        is_own = is_import_path(split_target(stage.target)[0])  # which is not imported before it is needed
        if is_own or pipeline.kind_of(stage).makes != "publication":
            continue
        check: Callable[[], None] | None = getattr(open_target(stage.target), "check", None)
        try:
            if check:
                check()
        except (ConfigError, UploadError) as error:
            raise ConfigError(f"{pipeline.source}: stage {stage.name!r}: target = {stage.target!r}: {error}") from error


def open_target(target: str) -> Target:
    """Return the target that a stage names.

    Raises:
        ConfigError: there is none of this name, or a user's file cannot be imported.
    """
    name, location = split_target(target)
    try:
        opener: Callable[[str], Target] = load_named(name, TARGETS_FOLDER, "Target")
    except ConfigError as error:
        raise ConfigError(f"target = {target!r}: {error}") from error
    return opener(location)
