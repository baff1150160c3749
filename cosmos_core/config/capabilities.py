"""Refuse settings that the schema accepts but this version does not support, with a one-line error before a run.

The metadata of a field, such as `KeyStatus`, declares the limits of this field; `Table.unsupported_setting_errors`
checks combinations of fields.
"""

import itertools
import os
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from cosmos_core.config.compose import Pipeline, StageKinds, stage_references
from cosmos_core.config.conditions import STANDARD_ERROR_SUFFIX, is_lower_better, is_prompt_fraction, parse_condition
from cosmos_core.config.inputs import existing_path, read_card_metadata, referenced_stage
from cosmos_core.config.override import IMPLIED_STAGE_SUFFIX
from cosmos_core.config.schema.field_metadata import SupportedValues, find_metadata
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.table import (
    StageContext,
    active_fields,
    active_tables,
    disabled_settings,
    short_toml,
    support_status,
)
from cosmos_core.config.target import LOCAL_FOLDER_TARGET, split_publication_target
from cosmos_core.errors import ConfigError
from cosmos_core.registry import is_import_path, suggest_names

_VALIDATION_METRIC_PREFIX = "validation/"
_LOSS_METRICS = (
    "loss", "loss/*", "perplexity", "token_accuracy", "tokens", "pairs", "rewards/*", "logps/*", "kl", "samples",
    "diversity",
)  # fmt: skip
_VALIDATION_METRICS = (
    "reward", "reward_stderr", "accuracy", "invalid", "length_mean", "prompts", "pass@*", "reward/*", "turns",
    "tool_calls", "tool_errors", *_LOSS_METRICS
)  # fmt: skip
"""Names of the metrics that validation can report: first metrics of completions, then metrics of the loss. A user's
algorithm can report others."""
MODEL_REFERENCE_KEYS = ("model", "distillation.model_name_or_path")
"""Keys from `stage_references` whose values name models. The values of all other keys from `stage_references` name
rows, or pass rates of rows."""


def check_capabilities(pipeline: Pipeline) -> None:
    """Raise `ConfigError` if this version does not support a setting; the message names key, value and remedy."""
    capability_checks = (_metric_errors, _measured_model_errors, _artifact_store_errors, _missing_statistics_errors,
                        _dataset_mixture_errors, _export_comparison_errors, _referenced_output_errors,
                        _unsupported_setting_errors)  # fmt: skip
    for capability_check, stage in itertools.product(capability_checks, pipeline.stages):
        for message in capability_check(pipeline, stage):
            # An error about an implied stage `NAME-data` names the stage `NAME`, whose keys the user can change.
            is_about_implied_stage = capability_check in (_dataset_mixture_errors, _referenced_output_errors)
            name = stage.name.removesuffix(IMPLIED_STAGE_SUFFIX) if is_about_implied_stage else stage.name
            raise ConfigError(f"{pipeline.source_path}: stage {name!r}: {message}")


def _metric_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for each branch of the stage's sweep in which no stage can report the metric of the sweep. For a
    gate, yield an error if no stage in its `after` can report the metric of a condition, or the standard error that
    `confidence` needs."""
    sweep, validate_stage_hint = stage.sweep, "; add a stage of kind validate to sweep.through"
    for branch in sweep.branches if sweep else ():
        if sweep and not _can_any_report_metric(pipeline, branch.stages, sweep.metric):
            suggestion = _suggest_metric(pipeline, branch.stages, sweep.metric) or validate_stage_hint
            yield f"sweep.metric = {sweep.metric!r}: no stage of branch {branch.stages[0]!r} reports it{suggestion}"
    for condition in map(parse_condition, stage.require):
        stage_name, _, metric = condition.metric.partition(".")
        if stage_name not in stage.after:
            metric = condition.metric
        stage_names = [stage_name] if stage_name in stage.after else stage.after
        if not _can_any_report_metric(pipeline, stage_names, metric):
            suggestion = _suggest_metric(pipeline, stage_names, metric)
            yield f"require = {condition.text!r}: no stage in its `after` reports {metric!r}{suggestion}"
        stderr_metric = metric + STANDARD_ERROR_SUFFIX
        noise_metrics = [stderr_metric, f"{metric.rpartition('/')[0]}/prompts"][: 1 + is_prompt_fraction(metric)]
        is_noise_reported = any(_can_any_report_metric(pipeline, stage_names, each, True) for each in noise_metrics)
        if stage.confidence and condition.allows_for_noise and "*" not in metric and not is_noise_reported:
            reason = f"no stage in its `after` reports {stderr_metric!r}, the noise of {condition.text!r}"
            yield f"confidence = {stage.confidence:g}: {reason}; compare another metric, or leave confidence out"


def _measured_model_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error if the metrics that a gate reads were measured on the final model of a training, but the upload
    after the gate publishes another checkpoint."""
    dependents = pipeline.stage_and_dependents(stage.name) if stage.require else set[str]()
    metric_stages = [name for name in map(pipeline.stage, stage.after) if pipeline.stage_kind(name).makes == "metrics"]
    for upload in pipeline.stages:
        export_name = referenced_stage(upload.model) if pipeline.stage_kind(upload).makes == "publication" else None
        if upload.name not in dependents or export_name is None or any(m.model == upload.model for m in metric_stages):
            continue
        export_stage = pipeline.stage(export_name)
        final_step = pipeline.recipes[referenced_stage(export_stage.model) or export_name].train.max_num_steps
        for metric_stage in metric_stages:
            if export_stage.checkpoint not in {"", str(final_step)} and metric_stage.model == export_stage.model:
                yield (
                    f"after = {list(stage.after)}: {metric_stage.name!r} measures the final model of "
                    f"{export_stage.model!r}, but {upload.name!r} publishes checkpoint = {export_stage.checkpoint!r} "
                    f'of it; write model = "stage:{export_name}" in stage {metric_stage.name!r}'
                )


def _can_any_report_metric(
    pipeline: Pipeline, stage_names: Collection[str], metric: str, needs_exact_name: bool = False
) -> bool:
    return any(_can_report_metric(pipeline, pipeline.stage(name), metric, needs_exact_name) for name in stage_names)


def _suggest_metric(pipeline: Pipeline, stage_names: Collection[str], metric: str) -> str:
    """Return the end of an error message that suggests the validation metric most similar to `metric` among those that
    the stages can report; empty if they report none."""
    metric_names = [_VALIDATION_METRIC_PREFIX + name for name in _VALIDATION_METRICS if "*" not in name]
    metric_names = [each for each in metric_names if _can_any_report_metric(pipeline, stage_names, each)]
    return suggest_names(metric, metric_names) if metric_names else ""


def _can_report_metric(pipeline: Pipeline, stage: StageConfig, metric: str, needs_exact_name: bool) -> bool:
    """Return whether a stage can report a metric. With `needs_exact_name`, patterns such as `reward/*` do not count:
    the metric is then a standard error or a number of prompts, and validation reports neither for a single reward."""
    stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
    if stage_kind.forwards_metrics:
        return _can_any_report_metric(pipeline, stage.after, metric, needs_exact_name)
    if not (stage_kind.scores and stage_kind.makes and metric.startswith(_VALIDATION_METRIC_PREFIX)):
        return any(fnmatchcase(metric, pattern) for pattern in stage_kind.reports)
    has_validation = recipe.validation.enable or not stage_kind.trains_model
    is_user_algorithm = is_import_path(recipe.train.train_policy.trainer_type)
    name, validation_config = metric.removeprefix(_VALIDATION_METRIC_PREFIX), recipe.validation
    # Without reward functions, validation reports only the loss, unless the algorithm itself reports rewards.
    has_rewards = validation_config.reward_function or validation_config.remote_reward_config
    metric_patterns = _VALIDATION_METRICS if has_rewards or recipe.train.train_policy.reports_rewards else _LOSS_METRICS
    matches_metric = any(name == each or (not needs_exact_name and fnmatchcase(name, each)) for each in metric_patterns)
    return has_validation and (is_user_algorithm or matches_metric)


def _artifact_store_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a stage that reads a checkpoint of a training in another work pool, if the pipeline has an
    artifact store: the machines then share no disk."""
    training_name = referenced_stage(stage.model) if pipeline.config.artifact_store and stage.checkpoint else None
    if training_name is not None and (source_pool := pipeline.stage(training_name).work_pool) != stage.work_pool:
        yield (
            f"checkpoint = {stage.checkpoint!r} is where stage {training_name!r} runs, and with artifact_store "
            f"machines share no disk; set work_pool = {source_pool!r} here too"
        )


def _missing_statistics_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a stage that needs log-probabilities of a reference policy if no training in its `after` saves
    them, and for a stage that reads pass rates from a stage that generates no completions."""
    recipe, stage_kind = pipeline.recipes[stage.name], pipeline.stage_kind(stage)
    for key, dataset in recipe.datasets.items():
        source_stage = referenced_stage(dataset.pass_rates)
        if source_stage is not None and not pipeline.stage_kind(pipeline.stage(source_stage)).completes_prompts:
            yield f"{key}.pass_rates = {dataset.pass_rates!r} completes no prompts; name a stage of kind rl or sample"
    is_measurement_stage = stage_kind.makes == "metrics" and stage_kind.scores and not stage_kind.trains_model
    if not is_measurement_stage or not recipe.train.train_policy.saves_reference_logprobs:
        return
    training_names = [name for name in stage.after if pipeline.stage_kind(pipeline.stage(name)).trains_model]
    if not any(pipeline.recipes[name].validation.enable for name in training_names):
        training_stage_text = f"stage {training_names[0]!r}" if training_names else "a training stage in `after`"
        yield (
            f"trainer_type = {recipe.train.train_policy.trainer_type!r} compares with the policy that the training "
            f"started from, which {training_stage_text} saves only with validation.enable = true"
        )


def _dataset_mixture_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a mixture of data sets in a stage whose key `data` already names its rows."""
    data_replaces_dataset = stage.data and pipeline.stage_kind(stage).reads_data == "source"
    if data_replaces_dataset and pipeline.recipes[stage.name].train.train_policy.datasets:
        remedy = "leave data out, or set overrides.train.train_policy.datasets = []"
        yield f"data = {stage.data!r} takes the place of train.train_policy.datasets; {remedy}"


def _export_comparison_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for an `export` stage with quantised formats if it has no rows on which these formats are compared
    with the model."""
    is_export_stage = pipeline.stage_kind(stage).reads_key("export.formats")
    if not is_export_stage or not pipeline.recipes[stage.name].export.quantized_formats:
        return
    rows_stage_name = referenced_stage(stage.data)
    if rows_stage_name is not None and pipeline.stage_kind(pipeline.stage(rows_stage_name)).makes != "data":
        reason = f"are compared with the model on prepared rows, and data = {stage.data!r} has none"
        yield f"export.formats {reason}; name a stage of kind prepare"
    training_names = [other.name for other in pipeline.stages if pipeline.stage_kind(other).trains_model]
    if not stage.data and not any(stage.name in pipeline.stage_and_dependents(name) for name in training_names):
        reason = "are compared with the model on rows, and no training comes before the stage"
        yield f'export.formats {reason}; set data = "stage:NAME" of a prepare stage'


def _referenced_output_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield errors for a stage that refers to the model or rows of a stage that makes none, for a `checkpoint` that the
    referenced training does not save, and for a merge of fewer than two models or with a wrong number of weights."""
    stage_kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
    for key, reference in stage_references(stage, recipe, stage_kind):
        name = referenced_stage(reference)
        output_type = "model" if key in MODEL_REFERENCE_KEYS else "data" if key == "data" else "rows"
        if name is not None and not key.endswith("pass_rates") and not _may_produce_output(pipeline, name, output_type):
            kind_name = pipeline.stage(name).kind
            yield f"{key} = {reference!r}: a stage of kind {kind_name!r} makes no {output_type}; name another stage"
    if stage.checkpoint:
        training_name = referenced_stage(stage.model) or ""
        model_recipe = pipeline.recipes[training_name]
        required_settings = {"train.ckpt.enable_checkpoint": model_recipe.train.ckpt.enable_checkpoint}
        if stage.checkpoint == "best":
            required_settings["validation.enable"] = model_recipe.validation.enable
        missing_settings = " and ".join(f"{key} = true" for key, value in required_settings.items() if not value)
        if missing_settings and stage.checkpoint != str(model_recipe.train.max_num_steps):
            remedy = "set it there, or leave checkpoint out for the final model"
            yield f"checkpoint = {stage.checkpoint!r} needs {missing_settings} in stage {training_name!r}; {remedy}"
        elif stage.checkpoint != "best" and (final_step := model_recipe.train.max_num_steps):
            step, ckpt = int(stage.checkpoint), model_recipe.train.ckpt
            # A step between two regular checkpoints may also be saved, if validation finds that it is the best.
            may_save_step = model_recipe.validation.enable or ckpt.save_freq_in_epoch > 0 or step % ckpt.save_freq == 0
            if step > final_step or (step < final_step and not may_save_step):
                reason = f"saves each {ckpt.save_freq} steps (train.ckpt.save_freq) of {final_step}"
                remedy = "name one of these steps, or leave checkpoint out"
                yield f"checkpoint = {stage.checkpoint!r}: stage {training_name!r} {reason}; {remedy}"
    if stage_kind.table == "merge":
        merge_weights, base_stage_name = recipe.merge.weights, referenced_stage(stage.model)
        merged_stage_names = [name for name in stage.after if name != base_stage_name]
        merged_stage_names = [name for name in merged_stage_names if _may_produce_output(pipeline, name, "model")]
        min_num_models = sum(bool(pipeline.stage_kind(pipeline.stage(name)).entry) for name in merged_stage_names)
        has_weight_per_model = not merge_weights or min_num_models <= len(merge_weights) <= len(merged_stage_names)
        if len(merged_stage_names) < 2 or not has_weight_per_model:
            yield (
                f"after = {list(stage.after)} names {len(merged_stage_names)} models to merge, and merge.weights = "
                f"{list(merge_weights)}; name at least two, and a weight for each or none"
            )


def _unsupported_setting_errors(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    stage_context = StageContext(pipeline.recipes[stage.name], pipeline.stage_kind(stage))
    for table in (stage, stage_context.recipe):
        for key, field_info, setting_value, is_set in active_fields(table):
            field_status, supported_values = support_status(field_info), find_metadata(field_info, SupportedValues)
            if supported_values and not supported_values.is_supported(setting_value):
                yield f"{key} = {short_toml(setting_value)}: {supported_values.note}"
            elif not supported_values and is_set and field_status.name in {"planned", "unsupported"}:
                yield f"{key} = {short_toml(setting_value)}: {field_status.note}"
        for subtable in active_tables(table):
            yield from subtable.unsupported_setting_errors(stage_context)


def _may_produce_output(pipeline: Pipeline, stage_name: str, output_type: str) -> bool:
    """Return True if a stage can make an output of type `model`, `data` (prepared rows) or `rows` (rows that are not
    prepared). A stage that runs a user's program can make all three. A model that is uploaded to a store or a Hub is no
    output."""
    stage, kind = pipeline.stage(stage_name), pipeline.stage_kind(pipeline.stage(stage_name))
    if output_type == "model":
        publication_target = split_publication_target(stage.target)[0]
        is_local_or_user_target = publication_target == LOCAL_FOLDER_TARGET or is_import_path(publication_target)
        return kind.makes == "model" or (kind.makes == "publication" and is_local_or_user_target) or not kind.entry
    return kind.makes == output_type or not kind.entry or (kind.completes_prompts and not kind.trains_model)


def unique_notices(pipeline: Pipeline) -> list[str]:
    """Return one line of text for each setting of the pipeline that is accepted but ignored or changed, without
    duplicates."""
    stage_kinds = {name: pipeline.stage_kind(pipeline.stage(name)) for name in pipeline.recipes}
    stages = [StageContext(pipeline.recipes[name], kind) for name, kind in stage_kinds.items()]
    notices = [notice for stage in stages for notice in _ignored_settings(stage, pipeline.stage_kinds)]
    notices += [text for stage in stages for table in active_tables(stage.recipe) for text in table.notices(stage)]
    ignored_settings = (*_ignored_stage_settings(pipeline), *_ignored_row_settings(pipeline))
    return list(dict.fromkeys((*pipeline.notices, *notices, *ignored_settings)))


def _ignored_settings(stage_context: StageContext, stage_kinds: StageKinds) -> Iterator[str]:
    for key, field, value, is_set in active_fields(stage_context.recipe):
        field_status = support_status(field)
        if is_set and field_status.name == "no effect":
            yield f"{key} = {short_toml(value)} has no effect here: {field_status.note}"
    for dataset_key, dataset in stage_context.recipe.datasets.items():
        dataset_name = getattr(dataset, "local_dir", "") or dataset.name
        for key in ("subset", "revision"):
            value, path = getattr(dataset, key), existing_path(dataset_name, Path.cwd())
            # No notice about the `subset` of media without a metadata file: the `prepare` stage refuses an unknown one.
            is_media_decoded_by_checks = stage_context.recipe.policy.modality.is_media_decoded_by_checks
            is_media_folder = path and path.is_dir() and is_media_decoded_by_checks and not any(path.glob("metadata.*"))
            has_subset_folder = path is not None and (is_media_folder or os.path.isdir(path / value))
            is_subset_used = key == "subset" and path and (has_subset_folder or "configs" in read_card_metadata(path))
            if value and path and not is_subset_used:
                yield f"{dataset_key}.{key} = {short_toml(value)} has no effect here: {dataset_name} is on this machine"
    for key, value, enabling_field in disabled_settings(stage_context.recipe):
        # Report a disabled key that no stage kind lists as read, such as one of the profiler, for stages of every kind.
        if stage_context.kind.reads_key(key) or not any(kind.reads_key(key) for kind in stage_kinds.values()):
            yield f"{key} = {short_toml(value)} has no effect here: {enabling_field} is off"


def _ignored_stage_settings(pipeline: Pipeline) -> Iterator[str]:
    for stage in pipeline.stages:
        recipe, stage_kind = pipeline.recipes[stage.name], pipeline.stage_kind(stage)
        stage_label = f"stage {stage.name!r}"
        if stage.timeout and not stage_kind.in_worker:
            reason = f"kind {stage.kind} has no worker that could be ended"
            yield f"{stage_label}: timeout = {stage.timeout!r} has no effect here: {reason}"
        if stage.confidence and not any(parse_condition(text).needs_published_model for text in stage.require):
            reason = "no condition in require compares with published"
            yield f"{stage_label}: confidence = {stage.confidence:g} has no effect here: {reason}"
        if (sweep := stage.sweep) and is_lower_better(sweep.metric) and "mode" not in sweep.model_fields_set:
            reason = "the branch with its largest value is chosen"
            yield f"{stage_label}: sweep.metric = {sweep.metric!r}: {reason}; set sweep.mode = 'min' for the smallest"
        if stage.data and stage_kind.entry and not stage_kind.reads_data and not stage_kind.reads_key("export.formats"):
            yield f"{stage_label}: data = {stage.data!r} has no effect here: kind {stage.kind} reads no rows"
        has_remote_rewards = recipe.train.train_policy.remote_reward_config or recipe.validation.remote_reward_config
        if stage.reward_service and not stage.entry and not has_remote_rewards:
            reason = "no reward of it comes from a service"
            remedy = "leave it out, or set train.train_policy.use_remote_reward = true"
            yield f"{stage_label}: reward_service = {stage.reward_service!r} has no effect here: {reason}; {remedy}"


def _ignored_row_settings(pipeline: Pipeline) -> Iterator[str]:
    """Yield a notice for each setting that has no effect in the recipe of a stage because it concerns the preparation
    of rows, and a stage with another recipe prepares them."""
    for stage in pipeline.stages:
        kind, recipe = pipeline.stage_kind(stage), pipeline.recipes[stage.name]
        rows_stage_name = referenced_stage(stage.data)
        if rows_stage_name is None or kind.reads_data != "prepared" or recipe == pipeline.recipes[rows_stage_name]:
            continue
        prepare_kind = pipeline.stage_kind(pipeline.stage(rows_stage_name))
        prepare_setting_values = {key: value for key, _, value, _ in active_fields(pipeline.recipes[rows_stage_name])}
        for key, field, value, is_set in active_fields(recipe):
            is_key_unread = is_set and prepare_kind.reads_key(key) and not kind.reads_key(key)
            if is_key_unread and support_status(field).name == "used" and prepare_setting_values.get(key) != value:
                reason = f"{key} = {short_toml(value)} has no effect here: stage {rows_stage_name!r} prepares its rows"
                yield f"stage {stage.name!r}: {reason}; set data to prepare rows of its own"
