"""Publication targets: each stores versions of a model and moves a pointer; each module here is a built-in target."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeGuard

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.target import PUBLICATION_TARGETS_FOLDER, split_publication_target
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, CosmosError, UploadError
from cosmos_core.registry import find_error_location, is_import_path, load_class
from cosmos_core.run.hub import call_with_timeout
from cosmos_core.transient import is_transient

PUBLICATION_FILE = "publication.json"
"""Name of the file in the folder of an upload stage with the record of its publication. The file is written after the
target's pointer to the current version was moved."""
RECORD_FILE = "published.json"
"""Name of the file with the record of a published version; the target stores it next to the files of the model."""
JOURNAL_FILE = "upload.jsonl"
"""Name of the journal file in the folder of an upload stage, with which an interrupted upload continues."""
_READ_TIMEOUT_SECONDS = 30.0
_MAX_VERSIONS = 100
"""Maximum length of the saved history of a publication target: the versions to which its pointer has pointed."""


class PublicationTarget(Protocol):
    """Interface of publication targets: a `target = "NAME://LOCATION"` in a stage selects the class, which stores
    versions of one model at LOCATION.

    A built-in target is `SomeNameTarget` in `some_name.py`; a user's target is `path/file.py:Class` or
    `path/file.py:Class://LOCATION`. These methods are optional; `S3Target` has all of them:

    - `check()` raises ConfigError if the target cannot be written.
    - `prepare_upload(folder, check_cancellation)` lets an interrupted upload continue: the target keeps a journal in
      the folder. The target calls `check_cancellation` repeatedly; this function raises an error to end the upload.
    - `where(version)` and `damage(folder, version, record)`: with both, the same weights are not published
      twice. `damage` returns what is wrong with the files of `record` in a version, or an empty string.
    - `history`, `record_of`, `where` and `point_to`: a target with all four supports rollback of the pointer.
    - `versions` lists all stored versions, including versions from which the pointer was rolled back.
    """

    def published(self) -> dict[str, Any] | None:
        """Return the record of the version to which the target's pointer refers; None if nothing was published yet.

        Raises:
            DamagedRecord: the record cannot be read; `publish` is possible all the same.
            UploadError: the target cannot be reached.
        """

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Store `folder` as `version`, verify the stored files, move the pointer, and return the version's address.

        Safe to repeat after a crash at any point: a complete version is not sent again, an incomplete one is replaced.
        `record["files"]` has the sha256 of each file, `record["metrics"]` the metrics that a gate stage compares.

        Raises:
            UploadError: the target refused, lost or altered a file; the pointer was not moved.
            ConfigError: the target refuses the credentials.
        """


def is_publication_record(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return True if a value is a record of a published version: a dict with the dicts `metrics` and `files`."""
    return isinstance(value, dict) and isinstance(value.get("metrics"), dict) and isinstance(value.get("files"), dict)


def append_version(saved_history: list[str], version: str, history: list[str] | None = None) -> list[str]:
    """Return the history of a publication target after its pointer moves to `version`: at most the 100 last versions to
    which the pointer has pointed. Only a rollback passes `history`: the part of `saved_history` to keep, which is the
    list without its last version, or the whole list if the rollback had already been done. Raise UploadError for any
    other `history` (unless `saved_history` is empty), because another publication has moved the pointer meanwhile."""
    if history is not None and saved_history not in ([], history) and saved_history[:-1] != history:
        raise UploadError(f"{saved_history[-1]!r} was published meanwhile; the pointer was not moved, run it again")
    history = saved_history if history is None else history
    return history[-_MAX_VERSIONS:] if history[-1:] == [version] else [*history[-_MAX_VERSIONS + 1 :], version]


def check_targets(pipeline: Pipeline) -> None:
    """Check the publication targets of a pipeline. Raise ConfigError if a target cannot be opened, cannot be written
    for a stage that publishes, or cannot be read for a gate stage that compares metrics with it. Raise UploadError if a
    target does not respond."""
    for stage in pipeline.stages:
        is_user_code = is_import_path(split_publication_target(stage.target)[0])
        if not stage.target or (is_user_code and stage.work_pool):
            # Skip a user-defined target of a stage on a work pool, because only the machines of the pool have its code.
            continue
        stage_location = f"{pipeline.source_path}: stage {stage.name!r}"
        with convert_errors(partial(_convert_target_error, stage_location, stage.target), ()):
            publication_target: Any = open_target(stage.target)
            if pipeline.stage_kind(stage).makes != "publication":
                _check_published_metrics(stage, call_with_timeout(_READ_TIMEOUT_SECONDS, publication_target.published))
            elif hasattr(publication_target, "check"):
                publication_target.check()


def _check_published_metrics(stage: StageConfig, published_record: dict[str, Any] | None) -> None:
    """Raise ConfigError if a gate stage compares with a metric of the published model that `published_record` lacks."""
    if published_record is None:
        return
    for condition in map(parse_condition, stage.require):
        stage_name_prefix, _, metric = condition.metric.partition(".")
        metric = metric if stage_name_prefix in stage.after else condition.metric
        if condition.needs_published_model and "*" not in metric and metric not in published_record.get("metrics", {}):
            raise ConfigError(f"{condition.text!r}: what is published has no {metric!r}; compare with a number")


def _convert_target_error(stage_location: str, target_setting: str, error: Exception) -> Exception:
    """Return an error whose message names the stage: an UploadError if the publication target can be expected to
    respond later, otherwise a ConfigError. An unexpected error of a built-in target is returned unchanged."""
    setting_text, error_text = f"target = {target_setting!r}: ", str(error)
    if not isinstance(error, (ConfigError, UploadError, TimeoutError)):
        if not is_import_path(split_publication_target(target_setting)[0]):
            return error
        error_text = f"{type(error).__name__}: {error} ({find_error_location(error)})"
    is_error_retryable = type(error) is UploadError if isinstance(error, CosmosError) else is_transient(error)
    error_class = UploadError if is_error_retryable else ConfigError
    return error_class(f"{stage_location}: {setting_text}{error_text.removeprefix(setting_text)}")


def open_target(target_setting: str) -> PublicationTarget:
    """Return the publication target that a stage's `target` selects; raise ConfigError if it cannot be loaded."""
    target_name, location = split_publication_target(target_setting)
    try:
        target_class: Callable[[str], PublicationTarget] = load_class(target_name, PUBLICATION_TARGETS_FOLDER, "Target")
    except ConfigError as error:
        raise ConfigError(f"target = {target_setting!r}: {error}") from error
    return target_class(location)
