"""`cosmos check`: models, tokenizers, every row, masks, lengths and rewards, looked at in workers before a run."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from cosmos_core.config.compose import Pipeline, source_of
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.launch.worker import Launch, run, stoppable
from cosmos_core.run.fingerprint import threads
from cosmos_core.run.manifest import Result
from cosmos_core.run.stage import Stage

_PROGRAM = "cosmos_core.train.check:run"
_PREFIX = "cosmos-look-"


def check_in_worker(pipeline: Pipeline) -> Iterator[str]:
    """Look at each stage in turn; a line of what was found, or of what cannot be looked at yet.

    Raises:
        ConfigError, DataError, ModelError, RewardError: the first mistake.
        StageFailed: a check crashed.
    """
    for stage in pipeline.stages:
        if not pipeline.kind_of(stage).reads_model:
            continue
        unknown = _unknown(pipeline, stage)
        if unknown:
            yield f"{stage.name}: not looked at: it starts from what stage {unknown!r} will make"
            continue
        result = look(pipeline, stage, _PROGRAM, data="" if source_of(stage.data) else stage.data)
        yield f"{stage.name}: {result['info']['found']}"


def look(
    pipeline: Pipeline,
    stage: StageConfig,
    program: str,
    *,
    model: str = "",
    data: str = "",
    recipe: Recipe | None = None,
) -> Result:
    """Return what a program of the back half finds out about a stage, in a worker and a folder that is gone afterwards.

    Raises:
        ConfigError, DataError, ModelError, RewardError: the first mistake.
        StageFailed: the program crashed.
    """
    recipe = recipe or pipeline.recipes[stage.name]
    _remove_leftovers()
    with stoppable(), tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-") as folder:
        path = Path(folder) / "stages" / stage.name
        path.mkdir(parents=True)
        Stage(
            path=path,
            config=stage,
            recipe=recipe,
            model=model or stage.model or recipe.policy.model_name_or_path,
            data=Path(data) if data else None,
            inputs={},
            fingerprint="look",
            kind=replace(pipeline.kind_of(stage), entry=program),
        ).save()
        return run(
            Launch(
                stage_path=path,
                python=pipeline.config.python,
                threads=threads(pipeline),
                grace_seconds=pipeline.config.grace_seconds,
            )
        )


def _remove_leftovers() -> None:
    """Remove the folders of looks whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _unknown(pipeline: Pipeline, stage: StageConfig) -> str | None:
    """Return the stage that has to run before this one can be looked at; rows are looked at where they are made."""
    model = source_of(stage.model)
    data = source_of(stage.data)
    if data and pipeline.kind_of(pipeline.stage(data)).makes == "data":
        data = None
    return model or data
