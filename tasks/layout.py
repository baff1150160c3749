"""Prepare the folder of a stage before the stage starts: write its inputs and settings, and move files that were made
with another fingerprint to `superseded/`."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from cosmos_core.config.inputs import inputs_of, source_of
from cosmos_core.config.schema.dataset import PASS_RATES
from cosmos_core.config.schema.export import UNQUANTIZED_FORMAT
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run import manifest
from cosmos_core.run.content import link_weights_over_model
from cosmos_core.run.directory import Run, supersede_stage
from cosmos_core.run.fingerprint import Fingerprint
from cosmos_core.run.hub import with_value
from cosmos_core.run.lineage import model_origin
from cosmos_core.run.manifest import Result, Source, read_result
from cosmos_core.run.plan import read_fingerprint, reason_to_rerun, save_fingerprint
from cosmos_core.run.remote import download_inputs
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import RERUN_EVENT, record_event

logger = logging.getLogger(__name__)

_SOURCE_KIND_BY_ROLE: dict[str, Literal["model", "data"]] = {"model": "model", "teacher": "model", "data": "data"}
"""Kind of the external source, model or data, that a manifest records for an input, by the role of the input."""


def results_of(run: Run, stage: StageConfig) -> dict[str, Result]:
    """Return the manifests of the stages in `after` by stage name, each with the added key `path`, the folder of that
    stage. Raises `StageFailed` if a stage in `after` has no result."""
    inputs = {}
    for name in stage.after:
        result = read_result(run.stage_path(name))
        if result is None:
            raise StageFailed(f"stage {stage.name!r} needs the result of {name!r}, which is not there")
        inputs[name] = {**result, "path": str(run.stage_path(name))}
    return inputs


def prepare_stage_folder(
    run: Run, stage: StageConfig, expected: Fingerprint, on_line: Callable[[str], None] = lambda line: None
) -> Stage:
    """Write the folder of a stage that is about to run, and return the stage as its program receives it. Files of a
    training with another fingerprint are moved to `superseded/`. If the stage has a result already, the reason to make
    it again is recorded as an event and passed to `on_line`."""
    path, kind, reason = run.stage_path(stage.name), run.pipeline.kind_of(stage), reason_to_rerun(run, stage, expected)
    supersede_if_changed(path, expected)
    if reason:
        record_event(path, RERUN_EVENT, reason)
        on_line(f"{RERUN_EVENT}: {reason}")
    (path / manifest.RESULT).unlink(missing_ok=True)
    save_fingerprint(path, expected, stage.work_pool)
    inputs, kinds = results_of(run, stage), _SOURCE_KIND_BY_ROLE
    # Several inputs may have the same key: the fingerprint has them in the same order.
    digests = [digest for role, *_, digest in expected.inputs if role in kinds and not source_of(digest)]
    external_inputs = [each for each in run.pipeline.inputs(stage) if each.form != "stage" and each.role in kinds]
    sources = tuple(
        Source(kind=kinds[each.role], name=each.location, digest=digest)
        for each, digest in zip(external_inputs, digests, strict=True)
    )
    origin_of_stage = model_origin(run.pipeline, stage)
    stage, recipe = download_inputs(run.pipeline, stage, partial(sleep_unless_stopping, 0))
    if teacher := recipe.teacher_of(kind):
        teacher_path = output_folder(stage.name, "model", teacher.model_name_or_path, inputs)
        recipe = recipe.derive(distillation=teacher.derive(model_name_or_path=teacher_path))
    for key, dataset in recipe.datasets.items() if kind.reads_data == "source" else ():
        if source_of(dataset.name):
            recipe = with_value(recipe, f"{key}.name", output_folder(stage.name, "data", dataset.name, inputs))
        if source := source_of(dataset.pass_rates):
            recipe = with_value(recipe, f"{key}.pass_rates", str(Path(inputs[source]["path"]) / PASS_RATES))
    model = output_folder(stage.name, "model", stage.model, inputs, stage.format)
    data = output_folder(stage.name, "data", stage.data, inputs)
    merged_model_path = link_weights_over_model(inputs_of(stage, recipe, kind), path / "base_model")
    prepared_stage = Stage(
        path=path, config=stage, recipe=recipe, model=merged_model_path or model or recipe.policy.model_name_or_path,
        data=Path(data) if data else None, inputs=inputs, fingerprint=expected.value,
        of_training=expected.training_hash, kind=kind, sources=sources, origin=origin_of_stage,
    )  # fmt: skip
    prepared_stage.save()
    return prepared_stage


def supersede_if_changed(path: Path, expected: Fingerprint) -> None:
    """Move the folder of a stage with another training to `superseded/`: its checkpoints must not be continued."""
    saved_fingerprint = read_fingerprint(path)
    if saved_fingerprint is not None and saved_fingerprint.training_hash != expected.training_hash:
        supersede_stage(path)
        logger.warning("stage %s starts anew, its earlier files are in superseded/", path.name)
    path.mkdir(parents=True, exist_ok=True)


def output_folder(stage: str, key: str, reference: str, inputs: dict[str, Result], model_format: str = "") -> str:
    """Return the folder to which `model = "stage:NAME"` or `data = "stage:NAME"` refers, of the model in the format
    `model_format` (empty or `bf16`: without quantisation); return any other value unchanged."""
    name = source_of(reference)
    if name is None:
        return reference
    info, setting = inputs[name]["info"], f"stage {stage!r}: {key} = {reference!r}"
    output = info.get(key) if model_format in {"", UNQUANTIZED_FORMAT} else info.get("formats", {}).get(model_format)
    if not output:
        raise ConfigError(f"{setting}, but stage {name!r} (kind {inputs[name]['kind']}) makes no {key}")
    if "://" in str(output):
        raise ConfigError(f"{setting} is published at {output}; name the stage that {name!r} publishes")
    return str(Path(inputs[name]["path"]) / str(output))
