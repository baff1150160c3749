"""Estimate parameters, memory per GPU, tokens, steps and GPUs of every training stage for `cosmos plan --estimate`.

Workers make the estimates (`cosmos_core.train.estimate`) of the models and rows that this module selects.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import referenced_stage
from cosmos_core.config.mesh import with_dp_shard_size
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.launch.check import run_check
from cosmos_core.launch.machine import BYTES_PER_GIB
from cosmos_core.run.hub import replace_setting
from cosmos_core.run.plan import StageDecision
from cosmos_core.run.remote import download_inputs

_ESTIMATE_PROGRAM = "cosmos_core.train.estimate:run"

StageEstimate = dict[str, Any] | str
"""Fields of `cosmos_core.train.estimate.TrainingEstimate`, or the reason why a training stage has no estimate."""


def estimate_stages_in_worker(
    pipeline: Pipeline, decision_by_stage: Mapping[str, StageDecision]
) -> Iterator[tuple[str, StageEstimate]]:
    """Estimate each training stage in turn; yield its name and the estimate. `decision_by_stage` shows which stages are
    finished. Raises `ConfigError`, `DataError` or `ModelError` for a wrong input, and `StageFailed` after a crash."""
    for stage in pipeline.stages:
        if not pipeline.stage_kind(stage).trains_model:
            continue
        if not pipeline.recipes[stage.name].policy.modality.supports_cost_estimates:
            yield stage.name, "not estimated: this version estimates language models alone"
            continue
        start_model = _find_start_model(pipeline, stage, decision_by_stage)
        if not start_model:
            missing_model_text = "it starts from a model that another stage will make; once that is made, ask again"
            yield stage.name, f"not estimated: {missing_model_text}"
            continue
        data_path = _find_output_path(stage.data, "data", decision_by_stage)
        recipe = with_dp_shard_size(_replace_dataset(pipeline, stage, decision_by_stage), pipeline.config.gpus)
        check_result = run_check(pipeline, stage, _ESTIMATE_PROGRAM, model=start_model, data=data_path, recipe=recipe)
        yield stage.name, check_result["info"]["estimate"]


def render_estimate_table(
    named_estimates: Sequence[tuple[str, StageEstimate]], gpu_count_by_stage: Mapping[str, int], gpus_per_node: int
) -> Table:
    """Return a table with the estimate, the GPUs and the nodes of each training stage, and notes about the values; a
    stage that has no estimate gets `?` and the reason."""
    table_title = "per GPU in GiB, at the peak of a train step"
    estimate_table = Table("stage", "parameters", "trained", title=table_title, caption_justify="left")
    memory_column_names = ("weights", "gradients", "optimizer", "activations", "peak", "rollout")
    for column in (*memory_column_names, "row length", "steps", "tokens", "GPUs", "nodes"):
        estimate_table.add_column(column, justify="right")
    caption_lines = [
        "weights: with copies in param_dtype, the reference model and the moving average; rollout: weights of the "
        "engine and KV cache"
    ]
    for name, stage_estimate in named_estimates:
        if isinstance(stage_estimate, str):
            estimate_cells, stage_notes = ["?"] * (len(estimate_table.columns) - 3), [stage_estimate]
        else:
            estimate_cells, stage_notes = _format_estimate_cells(stage_estimate), stage_estimate["notes"]
        estimate_table.add_row(
            name, *estimate_cells, str(gpu_count_by_stage[name]), str(-(-gpu_count_by_stage[name] // gpus_per_node))
        )
        caption_lines += [f"{name}: {note}" for note in stage_notes]
    estimate_table.caption = "\n".join(caption_lines)
    return estimate_table


def _format_estimate_cells(estimate: dict[str, Any]) -> list[str]:
    gpu_memory, num_steps, num_tokens = estimate["memory"], estimate["steps"], estimate["tokens"]
    rollout_bytes = None if estimate["kv_cache"] is None else estimate["engine_weights"] + estimate["kv_cache"]
    weight_bytes = gpu_memory["weights"] + (gpu_memory["casts"] or 0) + gpu_memory["reference"] + gpu_memory["average"]
    return [
        *map(_format_count, (estimate["parameters"], estimate["trainable"])),
        *map(_format_gib, (weight_bytes, gpu_memory["gradients"], gpu_memory["optimizer"], gpu_memory["activations"])),
        f"{'> ' if gpu_memory['activations'] is None else ''}{_format_gib(estimate['peak'])}",
        _format_gib(rollout_bytes),
        f"{estimate['sequence_length']:,}",
        "?" if num_steps is None else f"{'<= ' if estimate['is_steps_bound'] else ''}{num_steps:,}",
        "?" if num_tokens is None else f"{'<= ' if estimate['is_tokens_bound'] else ''}{_format_count(num_tokens)}",
    ]


def _format_gib(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / BYTES_PER_GIB:,.1f}"


def _format_count(count: int) -> str:
    """Return a count with two decimals and a unit: 8,190,735,360 as 8.19B."""
    for threshold, unit_suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= threshold:
            return f"{count / threshold:.2f}{unit_suffix}"
    return f"{count:,}"


def _find_start_model(pipeline: Pipeline, stage: StageConfig, decision_by_stage: Mapping[str, StageDecision]) -> str:
    """Return the model from which the stage starts. If it does not exist yet, return the nearest existing model, of the
    same architecture, in the chain of stages that will make it; return an empty string if there is none."""
    while (upstream_name := referenced_stage(model_reference := pipeline.initial_model(stage))) is not None:
        if model_folder := _find_output_path(model_reference, "model", decision_by_stage):
            return model_folder
        stage = pipeline.stage(upstream_name)
        if pipeline.stage_kind(stage).makes != "model":
            return ""
    return stage.model or pipeline.recipes[stage.name].policy.model_name_or_path


def _find_output_path(input_reference: str, output_key: str, decision_by_stage: Mapping[str, StageDecision]) -> str:
    """Return the path of the output `output_key` of the stage in a reference `stage:NAME`, or an empty string if the
    stage has not run; return any other path unchanged."""
    if (stage_name := referenced_stage(input_reference)) is None:
        return input_reference
    upstream = decision_by_stage.get(stage_name)
    output_subpath = upstream.result["info"].get(output_key) if upstream and upstream.result else None
    return str(upstream.source / str(output_subpath)) if upstream and upstream.source and output_subpath else ""


def _replace_dataset(pipeline: Pipeline, stage: StageConfig, decisions: Mapping[str, StageDecision]) -> Recipe:
    """Return a stage's recipe with the data sets and validation settings of the `prepare` stage whose rows it reads."""
    recipe = pipeline.recipes[stage.name]
    prepare_stage = pipeline.stage(referenced_stage(stage.data) or stage.name)
    prepare_stage, dataset_recipe = download_inputs(pipeline, prepare_stage, pipeline.output_dir, lambda: None)
    dataset, datasets = dataset_recipe.train.train_policy.dataset, dataset_recipe.train.train_policy.datasets
    if prepare_stage.name != stage.name and prepare_stage.data:
        data_folder = _find_output_path(prepare_stage.data, "data", decisions)
        dataset, datasets = DatasetConfig(name=data_folder, test_size=dataset.test_size), ()
    recipe = replace_setting(recipe, "train.train_policy.dataset", dataset)
    recipe = replace_setting(recipe, "validation", dataset_recipe.validation)
    return replace_setting(recipe, "train.train_policy.datasets", datasets)
