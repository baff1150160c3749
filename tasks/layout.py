"""Prepare the folder of a stage before the stage starts: write its inputs and settings, and move files of another
fingerprint to `superseded/`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from cosmos_core.config.compose import source_of
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run import manifest
from cosmos_core.run.directory import Run, supersede
from cosmos_core.run.files import read_object
from cosmos_core.run.fingerprint import Fingerprint
from cosmos_core.run.inputs import data_sources, model_source, teacher_source
from cosmos_core.run.lineage import origin
from cosmos_core.run.manifest import Result, Source, read_result
from cosmos_core.run.plan import FINGERPRINT, save_fingerprint
from cosmos_core.run.remote import localised
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import record_event
from cosmos_core.run.weights import overlaid, weights_source

logger = logging.getLogger(__name__)


def inputs_of(run: Run, stage: StageConfig) -> dict[str, Result]:
    """Return the results of the stages in `after`, each with its `path`.

    Raises:
        StageFailed: a stage in `after` has no result.
    """
    inputs = {}
    for name in stage.after:
        result = read_result(run.stage_path(name))
        if result is None:
            raise StageFailed(f"stage {stage.name!r} needs the result of {name!r}, which is not there")
        inputs[name] = {**result, "path": str(run.stage_path(name))}
    return inputs


def lay_out(run: Run, stage: StageConfig, expected: Fingerprint) -> Stage:
    """Write the folder of a stage that is about to run, and return the stage; files of another training are moved
    aside."""
    path = run.stage_path(stage.name)
    make_room(path, expected)
    (path / manifest.RESULT).unlink(missing_ok=True)
    save_fingerprint(path, expected, stage.work_pool)
    inputs, sources = inputs_of(run, stage), _sources(run, stage, expected)
    its_origin = origin(run.pipeline, stage)
    stage, recipe = localised(run.pipeline, stage, partial(sleep_unless_stopping, 0))
    recipe, data = _with_teacher(run, stage, recipe, inputs), _output(stage.name, "data", stage.data, inputs)
    laid_out = Stage(
        path=path,
        config=stage,
        recipe=recipe,
        model=_model(run, stage, recipe, inputs),
        data=Path(data) if data else None,
        inputs=inputs,
        fingerprint=expected.value,
        of_training=expected.of_training,
        kind=run.pipeline.kind_of(stage),
        sources=sources,
        origin=its_origin,
    )
    laid_out.save()
    return laid_out


def _model(run: Run, stage: StageConfig, recipe: Recipe, inputs: dict[str, Result]) -> str:
    kind = run.pipeline.kind_of(stage)
    source = model_source(stage, recipe, kind)
    if weights := weights_source(source, recipe, kind):
        return str(overlaid(Path(str(source)), weights, run.stage_path(stage.name) / "base_model"))
    return _output(stage.name, "model", stage.model, inputs) or recipe.policy.model_name_or_path


def _sources(run: Run, stage: StageConfig, expected: Fingerprint) -> tuple[Source, ...]:
    recipe, kind = run.pipeline.recipes[stage.name], run.pipeline.kind_of(stage)
    model, data = model_source(stage, recipe, kind), data_sources(stage, recipe, kind)
    models = [
        (model, expected.ingredients["model"]),
        (teacher_source(recipe, kind), expected.ingredients.get("teacher")),
    ]
    models = [(name, digest) for name, digest in models if name is not None and source_of(str(name)) is None]
    named = [("model", *each) for each in models]
    named += [("data", *each) for each in zip(data, expected.ingredients["data"], strict=True)]
    return tuple(Source.model_validate({"kind": what, "name": str(name), "digest": d}) for what, name, d in named)


def make_room(path: Path, expected: Fingerprint) -> None:
    """Move the content of a stage folder aside, with a warning, if another training wrote it: its checkpoints will not
    be continued."""
    saved = read_object(path / FINGERPRINT)
    if saved and saved.get("of_training") != expected.of_training:
        changed = "; ".join(expected.difference(saved["ingredients"])[:3])
        supersede(path)
        record_event(path, "superseded", changed)
        logger.warning("stage %s starts anew, its earlier files are in superseded/: %s", path.name, changed)
    path.mkdir(parents=True, exist_ok=True)


def _with_teacher(run: Run, stage: StageConfig, recipe: Recipe, inputs: dict[str, Result]) -> Recipe:
    """Return the recipe of a stage in which a teacher made by another stage is replaced by the folder of its model."""
    teacher = recipe.teacher_of(run.pipeline.kind_of(stage))
    if teacher is None:
        return recipe
    folder = _output(stage.name, "model", teacher.model_name_or_path, inputs)
    return recipe.derived(distillation=teacher.derived(model_name_or_path=folder))


def _output(stage: str, key: str, reference: str, inputs: dict[str, Result]) -> str:
    """Return the folder to which `model = "stage:NAME"` or `data = "stage:NAME"` refers; any other value is returned as
    it is."""
    name = source_of(reference)
    if name is None:
        return reference
    output = inputs[name]["info"].get(key)
    if not output:
        raise ConfigError(
            f"stage {stage!r}: {key} = {reference!r}, but stage {name!r} (kind {inputs[name]['kind']}) makes no {key}"
        )
    if "://" in str(output):
        raise ConfigError(
            f"stage {stage!r}: {key} = {reference!r} is published at {output}; name the stage that {name!r} publishes"
        )
    return str(Path(inputs[name]["path"]) / str(output))
