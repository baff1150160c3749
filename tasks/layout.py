"""Prepare the folder of a stage before the stage starts: write inputs and settings, and move outdated files away."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import STAGE_PREFIX, referenced_stage, stage_inputs
from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.config.schema.export import UNQUANTIZED_FORMAT
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run import manifest
from cosmos_core.run.content import create_linked_model_folder
from cosmos_core.run.directory import Run, supersede_stage
from cosmos_core.run.fingerprint import Fingerprint
from cosmos_core.run.hub import replace_setting
from cosmos_core.run.lineage import find_model_origin
from cosmos_core.run.manifest import METRICS_FILE, ExternalSource, Result, read_result
from cosmos_core.run.plan import explain_rerun, read_fingerprint, save_fingerprint
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.remote import download_inputs
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import RERUN_EVENT, record_event

logger = logging.getLogger(__name__)

_SOURCE_KIND_BY_ROLE: dict[str, Literal["model", "data"]] = {"model": "model", "teacher": "model", "data": "data"}
"""Kind, `model` or `data`, under which a manifest records an input from outside the run, by its role."""


def read_upstream_results(run: Run, stage: StageConfig) -> dict[str, Result]:
    """Return the manifests of the stages in `after` by stage name; to each manifest, the folder of its stage is added
    under the key `path`. If `stage` exports a checkpoint of a training, or passes metrics on as a gate does, the
    metrics in the manifest of the training are those of the exported checkpoint. Raises `StageFailed` if a stage in
    `after` has no result."""
    upstream_results = {}
    reads_checkpoint_metrics = run.pipeline.stage_kind(stage).forwards_metrics or stage.checkpoint
    for name in stage.after:
        result = read_result(run.stage_path(name))
        if result is None:
            raise StageFailed(f"stage {stage.name!r} needs the result of {name!r}, which is not there")
        if reads_checkpoint_metrics and (checkpoint := _find_exported_checkpoint(run.pipeline, stage, name)):
            result |= _read_checkpoint_metrics(run.stage_path(name), result, checkpoint)
        upstream_results[name] = {**result, "path": str(run.stage_path(name))}
    return upstream_results


def _find_exported_checkpoint(pipeline: Pipeline, reading_stage: StageConfig, name: str) -> str:
    """Return which checkpoint of the training `name` was exported as the model of `reading_stage`, or as an ancestor of
    this model: "best" or the number of a step. Return "" if the final model was exported, or several checkpoints. For a
    stage without a model, such as a gate, use the models of the uploads that depend on it. A Python flow may have no
    upload yet: then use the exports in the stage's `after`, or else all exports."""
    dependent_names = pipeline.stage_and_dependents(reading_stage.name)
    publishing_stages = [each for each in pipeline.stages if pipeline.stage_kind(each).makes == "publication"]
    dependent_uploads = [each for each in publishing_stages if each.name in dependent_names]
    ancestor_names = _collect_model_ancestors(
        pipeline, [reading_stage] if reading_stage.model or reading_stage.sweep else dependent_uploads
    )
    for stage_names in (ancestor_names, reading_stage.after, [stage.name for stage in pipeline.stages]):
        reading_stages = [stage for stage in map(pipeline.stage, stage_names) if stage.model == f"{STAGE_PREFIX}{name}"]
        # Count a training that starts from the checkpoint only if the model of `reading_stage` descends from it.
        exported_checkpoints = {
            stage.checkpoint
            for stage, kind in ((stage, pipeline.stage_kind(stage)) for stage in reading_stages)
            if kind.makes in {"model", "publication"} and (stage_names is ancestor_names or not kind.trains_model)
        }
        if exported_checkpoints:
            return exported_checkpoints.pop() if len(exported_checkpoints) == 1 else ""
    return ""


def _collect_model_ancestors(pipeline: Pipeline, stages: list[StageConfig]) -> set[str]:
    """Return the names of `stages` and of the stages from which their models descend."""
    pending_stages, ancestor_names = [stage.name for stage in stages], set[str]()
    while pending_stages:
        if (name := pending_stages.pop()) in ancestor_names:
            continue
        ancestor_names.add(name)
        stage = pipeline.stage(name)
        pending_stages += filter(None, [referenced_stage(stage.model)])
        pending_stages += [each for branch in (stage.sweep.branches if stage.sweep else ()) for each in branch.stages]
        # A stage that merges models names them only in `after`, so its model descends from all stages in `after`.
        pending_stages += stage.after if pipeline.stage_kind(stage).merges_models else ()
    return ancestor_names


def _read_checkpoint_metrics(path: Path, result: Result, checkpoint: str) -> Result:
    """Return `metrics` and `hint` to put into the result of the training in `path`: the metrics of a checkpoint, `best`
    or a step, instead of those of the last step; empty if the checkpoint is of the last step. Validation metrics of
    other steps are left out. The hint is added to an error about a missing metric; it is empty unless `metrics.jsonl`
    is missing on this machine."""
    best_step = result["info"].get("best") or {}
    step = best_step.get("step") if checkpoint == "best" else int(checkpoint)
    if step == result["info"].get("step"):
        return {}
    metrics = {key: value for key, value in result["metrics"].items() if not key.startswith("validation/")}
    if step == best_step.get("step"):
        metrics[best_step["metric"]] = best_step["value"]
    for line in read_metrics(path / METRICS_FILE):
        if line["step"] == step:
            metrics |= {key: value for key, value in line.items() if key not in {"step", "time"}}
    if (metrics_file := path / METRICS_FILE).is_file():
        return {"metrics": metrics, "hint": ""}
    missing_file_hint = f"; those of step {step} of {path.name!r} are in {metrics_file}, which is not on this machine"
    return {"metrics": metrics, "hint": missing_file_hint}


def prepare_stage_folder(
    run: Run, stage: StageConfig, fingerprint: Fingerprint, report_line: Callable[[str], None] = lambda _: None
) -> Stage:
    """Write the folder of a stage that is about to run, and return the `Stage` that its program receives. Files of a
    training with another fingerprint are moved to `superseded/`. If the stage has a result already, the reason to make
    it again is recorded as an event and passed to `report_line`."""
    path, stage_kind = run.stage_path(stage.name), run.pipeline.stage_kind(stage)
    rerun_reason = explain_rerun(run, stage, fingerprint)
    supersede_outdated_stage(path, fingerprint)
    if rerun_reason:
        record_event(path, RERUN_EVENT, rerun_reason)
        report_line(f"{RERUN_EVENT}: {rerun_reason}")
    (path / manifest.RESULT_FILE).unlink(missing_ok=True)
    save_fingerprint(path, fingerprint, stage.work_pool)
    upstream_results, kind_by_input_role = read_upstream_results(run, stage), _SOURCE_KIND_BY_ROLE
    # Inputs and digests are matched by their order, because several inputs may have the same key.
    source_digests = [
        value for role, *_, value in fingerprint.inputs if role in kind_by_input_role and not referenced_stage(value)
    ]
    external_inputs = [
        each for each in run.pipeline.inputs(stage) if each.location_type != "stage" and each.role in kind_by_input_role
    ]
    external_sources = tuple(
        ExternalSource(kind=kind_by_input_role[each.role], name=each.location, digest=digest)
        for each, digest in zip(external_inputs, source_digests, strict=True)
    )
    model_origin = find_model_origin(run.pipeline, stage)
    stage, recipe = download_inputs(run.pipeline, stage, run.output_dir, partial(sleep_unless_stopping, 0))
    if teacher_config := recipe.teacher_for_stage(stage_kind):
        teacher_path = resolve_output(stage.name, "model", teacher_config.model_name_or_path, upstream_results)
        recipe = recipe.copy_with(distillation=teacher_config.copy_with(model_name_or_path=teacher_path))
    for key, dataset in recipe.datasets.items() if stage_kind.reads_data == "source" else ():
        if referenced_stage(dataset.name):
            recipe = replace_setting(
                recipe, f"{key}.name", resolve_output(stage.name, "data", dataset.name, upstream_results)
            )
        if name := referenced_stage(dataset.pass_rates):
            recipe = replace_setting(
                recipe, f"{key}.pass_rates", str(Path(upstream_results[name]["path"]) / PASS_RATES_FILE)
            )
    model_path = resolve_output(stage.name, "model", stage.model, upstream_results, stage.format)
    data_path = resolve_output(stage.name, "data", stage.data, upstream_results)
    linked_model = create_linked_model_folder(stage_inputs(stage, recipe, stage_kind), path / "base_model")
    prepared_stage = Stage(
        path=path, config=stage, recipe=recipe, model=linked_model or model_path or recipe.policy.model_name_or_path,
        data=Path(data_path) if data_path else None, inputs=upstream_results, fingerprint=fingerprint.value,
        training_fingerprint=fingerprint.training_hash, kind=stage_kind, sources=external_sources, origin=model_origin,
    )  # fmt: skip
    prepared_stage.save()
    return prepared_stage


def supersede_outdated_stage(stage_path: Path, fingerprint: Fingerprint) -> None:
    """Move the folder of a stage to `superseded/` if its checkpoints were made with another training fingerprint;
    create the folder if it is missing."""
    saved_fingerprint = read_fingerprint(stage_path)
    if saved_fingerprint is not None and saved_fingerprint.training_hash != fingerprint.training_hash:
        supersede_stage(stage_path)
        logger.warning("stage %s starts anew, its earlier files are in superseded/", stage_path.name)
    stage_path.mkdir(parents=True, exist_ok=True)


def resolve_output(
    stage: str, key: str, reference: str, upstream_results: dict[str, Result], model_format: str = ""
) -> str:
    """Return the folder to which `model = "stage:NAME"` or `data = "stage:NAME"` refers; return any other value
    unchanged. `model_format` selects a format of the model; empty or `bf16`: the model without quantisation. Raises
    `ConfigError` if the stage NAME has no such output."""
    name = referenced_stage(reference)
    if name is None:
        return reference
    info, setting_text = upstream_results[name]["info"], f"stage {stage!r}: {key} = {reference!r}"
    output = info.get(key) if model_format in {"", UNQUANTIZED_FORMAT} else info.get("formats", {}).get(model_format)
    if not output:
        raise ConfigError(f"{setting_text}, but stage {name!r} (kind {upstream_results[name]['kind']}) makes no {key}")
    if "://" in str(output):
        raise ConfigError(f"{setting_text} is published at {output}; name the stage that {name!r} publishes")
    return str(Path(upstream_results[name]["path"]) / str(output))
