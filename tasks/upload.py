"""Kind `upload`: publish a model; the source is hashed again before, the copy after, the pointer moves last."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, DamagedRecord, UploadError
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.files import files_below, sha256
from cosmos_core.run.manifest import problem, read_result
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome, StageKind
from cosmos_core.upload.base import Target, open_target
from cosmos_core.upload.saves import Saves, saves_url

logger = logging.getLogger(__name__)

KIND = StageKind(
    name="upload",
    entry="tasks.upload:run",
    result_version=1,
    makes="publication",
    required_keys={"model": '"stage:NAME"', "target": '"FOLDER"'},
    allowed_keys=("target",),
    in_worker=False,
    is_reusable=False,
    hands_on_metrics=True,
)


def run(stage: Stage) -> Outcome:
    """Publish `stage.model` to `target`.

    Raises:
        ConfigError: there is no model to publish.
        UploadError: the model was altered since it was made, or the target failed.
    """
    folder = Path(stage.model)
    if not folder.is_dir():
        raise ConfigError(
            f'stage {stage.name!r}: model = {stage.config.model!r} is no folder to publish; write model = "stage:NAME"'
        )
    for name, result in stage.inputs.items():
        source = read_result(Path(result["path"]))
        damage = problem(Path(result["path"]), source, thorough=True) if source else "its result is gone"
        if damage:
            raise UploadError(f"stage {stage.name!r} publishes nothing: stage {name!r}: {damage}")
    metrics = {key: value for result in stage.inputs.values() for key, value in result["metrics"].items()}
    version = f"{stage.run_path.name}-{stage.fingerprint[:8]}"
    record = {
        "version": version,
        "run_id": stage.run_path.name,
        "stage": str(stage.path),
        "metrics": metrics,
        "inputs": {name: result["digest"] for name, result in stage.inputs.items()},
        "files": {str(file.relative_to(folder)): sha256(file) for file in files_below(folder)},
    }
    target = open_target(stage.config.target)
    if attend := getattr(target, "attend", None):
        attend(stage.path, partial(sleep_unless_stopping, 0))
    _send_saves(stage)
    if same := _same_weights(target, folder, record):
        return Outcome(metrics=metrics, info={"model": same, "published": same, "was_published": True})
    published = target.publish(folder, version, record)
    return Outcome(metrics=metrics, info={"model": published, "published": published})


def _same_weights(target: Target, folder: Path, record: dict[str, Any]) -> str:
    """Return what is published now, if it is another run's and has the same files, undamaged, but for its card; else an
    empty string."""
    where: Callable[[str], str] | None = getattr(target, "where", None)
    damage: Callable[[Path, str, dict[str, Any]], str] | None = getattr(target, "damage", None)
    if where is None or damage is None:
        return ""
    try:
        current = target.published()
    except DamagedRecord as error:
        logger.warning("what was published cannot be told and is published anew: %s", error)
        return ""
    if current is None or current.get("version") in {None, record["version"]}:
        return ""  # publishing the same version again mends what was damaged
    version, weights = str(current["version"]), _weights(record)
    if _weights(current) != weights:
        return ""
    if found := damage(folder, version, {"files": weights}):
        logger.warning("%s has the same weights but is damaged, they are published anew: %s", where(version), found)
        return ""
    return where(version)


def _weights(record: dict[str, Any]) -> dict[str, str]:
    return {name: digest for name, digest in record["files"].items() if not name.endswith(".md")}


def _send_saves(stage: Stage) -> None:
    """Send the checkpoints of the training that were not sent while it went on."""
    ckpt, parent = stage.recipe.train.ckpt, stage.config.target.rpartition("/")[0]
    if ckpt.upload_s3 == "all" and parent and parent.startswith(ckpt.s3_url()):
        for name, result in stage.inputs.items():
            Saves(Path(result["path"]), saves_url(parent, name, stage.run_path.name)).push()
