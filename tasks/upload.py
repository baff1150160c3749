"""Kind `upload`: publish a model; the source is hashed again before, the copy after, the pointer moves last."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.run.files import files_below, sha256
from cosmos_core.run.manifest import problem, read_result
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome, StageKind
from cosmos_core.upload.base import open_target

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
    published = open_target(stage.config.target).publish(folder, version, record)
    return Outcome(metrics=metrics, info={"model": published, "published": published})
