"""Stage kind `upload`: publish a model. The model is verified by its hashes before the upload and the copy afterwards;
the pointer to the current version is moved last."""

import logging
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, DamagedRecord, UploadError
from cosmos_core.run.directory import list_attempt_folders
from cosmos_core.run.files import list_files_below, read_json_object, sha256, write_json
from cosmos_core.run.manifest import find_output_damage, read_result
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import read_state
from cosmos_core.types import Outcome, StageKind
from cosmos_core.upload.base import PUBLICATION_FILE, RECORD_FILE, open_target
from cosmos_core.upload.checkpoint_upload import CheckpointUploader, checkpoint_url

logger = logging.getLogger(__name__)

_EXCLUDED_FOLDERS = {".git", ".cache"}

KIND = StageKind(
    name="upload",
    entry="tasks.stages.upload:run",
    result_version=1,
    makes="publication",
    required_keys={"model": '"stage:NAME"', "target": '"FOLDER"'},
    allowed_keys=("target", "format"),
    in_worker=False,
    is_reusable=False,
    forwards_metrics=True,
)


def run(stage: Stage) -> Outcome:
    """Publish the model folder `stage.model` to the publication target `stage.config.target`. Raises `ConfigError` if
    the model folder does not exist, `UploadError` if the model has changed since it was made or the target failed."""
    # Import the module only when a stage publishes, because it imports Prefect.
    from tasks.cancellation import make_publication_check

    model_folder = Path(stage.model)
    if not model_folder.is_dir():
        raise ConfigError(
            f'stage {stage.name!r}: model = {stage.config.model!r} is no folder to publish; write model = "stage:NAME"'
        )
    for name, result in stage.inputs.items():
        path = Path(result["path"])
        source_result = read_result(path)
        damage = find_output_damage(path, source_result, ignores_cache=True) if source_result else "its result is gone"
        if damage:
            raise UploadError(f"stage {stage.name!r} publishes nothing: stage {name!r}: {damage}")
    metrics = {key: value for result in stage.inputs.values() for key, value in result["metrics"].items()}
    version_name = f"{stage.run_path.name}-{stage.fingerprint[:8]}"
    # Neither the record of an earlier publication nor what git and `hf download` keep in a folder is part of the model.
    model_files = [file for file in list_files_below(model_folder) if file != model_folder / RECORD_FILE]
    model_files = [each for each in model_files if _EXCLUDED_FOLDERS.isdisjoint(each.relative_to(model_folder).parts)]
    record = {
        "version": version_name,
        "run_id": stage.run_path.name,
        "stage": str(stage.path),
        "metrics": metrics,
        "inputs": {name: result["digest"] for name, result in stage.inputs.items()},
        "files": {str(file.relative_to(model_folder)): sha256(file) for file in model_files},
    }
    publication_target, check_cancellation = open_target(stage.config.target), make_publication_check()
    check_cancellation()
    if prepare_upload := getattr(publication_target, "prepare_upload", None):
        prepare_upload(stage.path, check_cancellation)
    _send_checkpoints(stage, check_cancellation)
    if address := _find_published_model(stage, publication_target, model_folder, record):
        return Outcome(metrics=metrics, info={"model": address, "published": address, "was_published": True})
    published_address = str(publication_target.publish(model_folder, version_name, record) or stage.config.target)
    write_json(stage.path / PUBLICATION_FILE, record)
    return Outcome(metrics=metrics, info={"model": published_address, "published": published_address})


def _find_published_model(stage: Stage, target: Any, model_folder: Path, record: dict[str, Any]) -> str:
    """Return the address of the model if it is already published and needs no upload; otherwise an empty string."""
    if not (hasattr(target, "where") and hasattr(target, "damage")):
        return ""
    try:
        current_record = target.published()
    except DamagedRecord as error:
        logger.warning("what was published cannot be told and is published anew: %s", error)
        return ""
    if current_record is None or current_record.get("version") in {None, record["version"]}:
        return ""  # publish the same version again, to repair damaged files
    if superseded_address := _find_superseded_version(stage, target, model_folder, record, current_record):
        return superseded_address
    current_version, weight_digests = str(current_record["version"]), _read_digests(record)
    if _read_digests(current_record) != weight_digests:
        return ""
    # Another run has published the same weights.
    current_location = str(target.where(current_version))
    if damage := target.damage(model_folder, current_version, {"files": weight_digests}):
        logger.warning("%s has the same weights but is damaged, they are published anew: %s", current_location, damage)
        return ""
    # Remember the version of the other run as a publication of this stage, for `_find_superseded_version`.
    write_json(stage.path / PUBLICATION_FILE, record | {"version": current_record["version"]})
    return current_location


def _find_superseded_version(
    stage: Stage, target: Any, model_folder: Path, record: dict[str, Any], current_record: dict[str, Any]
) -> str:
    """Return the address at which this stage has published the same weights before, if they are intact and another
    version has become the current one since; otherwise an empty string. So a resumed run undoes neither a rollback nor
    a newer publication, unless the stage is forced to run again."""
    attempt_folders, weight_digests = list_attempt_folders(stage.run_path, stage.name), _read_digests(record)
    publication_records = [read_json_object(each / PUBLICATION_FILE) for each in attempt_folders]
    published_versions = {
        str(each["version"])
        for each in publication_records
        if "files" in each and _read_digests(each) == weight_digests
    }
    # If the process was killed before it wrote the record, only the history of the target has the publication.
    is_later_attempt = read_state(stage.path).attempt > 1
    if is_later_attempt and hasattr(target, "history") and record["version"] in target.history():
        published_versions.add(record["version"])
    if current_record["version"] in published_versions or read_state(stage.path).forced:
        return ""
    for version in sorted(published_versions):
        if not target.damage(model_folder, version, {"files": weight_digests}):
            command = f"cosmos promote {shlex.quote(stage.config.target)} {version}"
            if not hasattr(target, "point_to"):
                quoted_run_path = shlex.quote(str(stage.run_path))
                command = f"cosmos resume {quoted_run_path} --from-stage {stage.name}, not cosmos promote,"
            old_location = str(target.where(version))
            logger.warning("%s is not what is published now, which stays; %s publishes it again", old_location, command)
            return old_location
    return ""


def _read_digests(record: dict[str, Any]) -> dict[str, str]:
    return {name: digest for name, digest in record["files"].items() if not name.endswith(".md")}


def _send_checkpoints(stage: Stage, raise_if_cancelled: Callable[[], None]) -> None:
    """Send the checkpoints of the trainings that were not sent during the training; call `raise_if_cancelled` between
    requests."""
    checkpoint_config, target_folder = stage.recipe.train.ckpt, stage.config.target.rpartition("/")[0]
    if checkpoint_config.upload_s3 == "all" and target_folder and target_folder.startswith(checkpoint_config.s3_url()):
        for name, result in stage.inputs.items():
            upload_url = checkpoint_url(target_folder, name, stage.run_path.name)
            list(CheckpointUploader(Path(result["path"]), upload_url).push(raise_if_cancelled))
