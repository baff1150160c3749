"""Refuse settings that the schema accepts but this version does not support, with a one-line error before a run.

A field declares its limits with marks (`planned`, `Only`, ...); `Table.refusals` checks combinations of fields.
"""

import itertools
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from cosmos_core.config.compose import Pipeline, StageKinds, stage_references
from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.inputs import existing_path, source_of
from cosmos_core.config.override import IMPLIED_SUFFIX
from cosmos_core.config.schema.marks import SupportedValues, find_mark
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.table import (
    StageContext,
    Table,
    active_fields,
    active_tables,
    as_toml,
    status,
    unused_settings,
)
from cosmos_core.errors import ConfigError
from cosmos_core.registry import is_import_path, suggestion

_HELD_OUT = "validation/"
_ROW_METRICS = ("loss", "loss/*", "perplexity", "token_accuracy", "tokens", "pairs", "rewards/*")
_MEASURED_METRICS = (
    "reward", "reward_stderr", "accuracy", "invalid", "length_mean", "prompts", "pass@*", "reward/*", *_ROW_METRICS
)  # fmt: skip
"""Metrics of validation: first of completions, then of the rows themselves. User algorithms may report more."""
_MODEL_KEYS = ("model", "distillation.model_name_or_path")


def check_capabilities(pipeline: Pipeline) -> None:
    """Refuse settings that this version does not support.

    Raises:
        ConfigError: a setting is not supported; the message names its key, its value and what to use instead.
    """
    checks = (_metric_problems, _store_problems, _reference_problems, _mixture_problems, _comparison_problems,
              _product_problems, _setting_problems)  # fmt: skip
    for check, stage in itertools.product(checks, pipeline.stages):
        for problem in check(pipeline, stage):
            is_key_of_other = check in (_mixture_problems, _product_problems)  # an implied stage has keys of another
            name = stage.name.removesuffix(IMPLIED_SUFFIX) if is_key_of_other else stage.name
            raise ConfigError(f"{pipeline.source}: stage {name!r}: {problem}")


def _metric_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a sweep whose metric no stage of a branch can report, and for a condition of a gate on a
    metric that no stage in its `after` can report, with a suggestion for a misspelt metric."""
    sweep, advice = stage.sweep, "; add a stage of kind validate to sweep.through"
    for branch in sweep.branches if sweep else ():
        if sweep and not _can_any_report(pipeline, branch.stages, sweep.metric):
            hint = _suggest_metric(pipeline, branch.stages, sweep.metric) or advice
            yield f"sweep.metric = {sweep.metric!r}: no stage of branch {branch.stages[0]!r} reports it{hint}"
    for condition in map(parse_condition, stage.require):
        first, _, metric = condition.metric.partition(".")
        names, metric = ([first], metric) if first in stage.after else (list(stage.after), condition.metric)
        if not _can_any_report(pipeline, names, metric):
            hint = _suggest_metric(pipeline, names, metric)
            yield f"require = {condition.text!r}: no stage in its `after` reports {metric!r}{hint}"


def _can_any_report(pipeline: Pipeline, stage_names: Collection[str], metric: str) -> bool:
    return any(_can_report(pipeline, pipeline.stage(name), metric) for name in stage_names)


def _suggest_metric(pipeline: Pipeline, stage_names: Collection[str], metric: str) -> str:
    """Return the suggestion of a metric of held-out rows, without patterns, that any of the stages can report; empty if
    they report none."""
    metrics = [_HELD_OUT + name for name in _MEASURED_METRICS if "*" not in name]
    metrics = [each for each in metrics if _can_any_report(pipeline, stage_names, each)]
    return suggestion(metric, metrics) if metrics else ""


def _can_report(pipeline: Pipeline, stage: StageConfig, metric: str) -> bool:
    stage_kind, recipe = pipeline.kind_of(stage), pipeline.recipes[stage.name]
    if stage_kind.forwards_metrics:
        return _can_any_report(pipeline, stage.after, metric)
    if not (stage_kind.scores and stage_kind.makes and metric.startswith(_HELD_OUT)):
        return any(fnmatchcase(metric, pattern) for pattern in stage_kind.reports)
    is_measured = recipe.validation.enable or not stage_kind.trains_model
    is_user_algorithm = is_import_path(recipe.train.train_policy.trainer_type)
    name, validation = metric.removeprefix(_HELD_OUT), recipe.validation
    # Without rewards, a training on data sets measures only the loss of its rows.
    has_rewards = validation.reward_function or validation.remote_rewards
    patterns = _MEASURED_METRICS if has_rewards or recipe.train.train_policy.reports_rewards else _ROW_METRICS
    return is_measured and (is_user_algorithm or any(fnmatchcase(name, pattern) for pattern in patterns))


def _store_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """If the pipeline has an artifact store, yield an error for a stage that reads checkpoints from another work
    pool."""
    source = source_of(stage.model) if pipeline.config.artifact_store and stage.checkpoint else None
    if source is not None and (source_pool := pipeline.stage(source).work_pool) != stage.work_pool:
        yield (
            f"checkpoint = {stage.checkpoint!r} is where stage {source!r} runs, and with artifact_store machines share "
            f"no disk; set work_pool = {source_pool!r} here too"
        )


def _reference_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a stage that compares with a reference policy whose log-probabilities no earlier stage saves,
    and for a stage that reads pass rates from a stage without completions."""
    recipe, stage_kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
    for key, dataset in recipe.datasets.items():
        source = source_of(dataset.pass_rates)
        if source is not None and not pipeline.kind_of(pipeline.stage(source)).completes_prompts:
            yield f"{key}.pass_rates = {dataset.pass_rates!r} completes no prompts; name a stage of kind rl or sample"
    is_measurement = stage_kind.makes == "metrics" and stage_kind.scores and not stage_kind.trains_model
    if not is_measurement or not recipe.train.train_policy.saves_reference_logprobs:
        return
    training_names = [name for name in stage.after if pipeline.kind_of(pipeline.stage(name)).trains_model]
    if not any(pipeline.recipes[name].validation.enable for name in training_names):
        training_stage = f"stage {training_names[0]!r}" if training_names else "a training stage in `after`"
        yield (
            f"trainer_type = {recipe.train.train_policy.trainer_type!r} compares with the policy that the training "
            f"started from, which {training_stage} saves only with validation.enable = true"
        )


def _mixture_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for a mixture of data sets in a stage whose key `data` already names its rows."""
    reads_source = stage.data and pipeline.kind_of(stage).reads_data == "source"
    if reads_source and pipeline.recipes[stage.name].train.train_policy.datasets:
        yield (
            f"data = {stage.data!r} takes the place of train.train_policy.datasets; leave data out, or set "
            f"overrides.train.train_policy.datasets = []"
        )


def _comparison_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield an error for an export in quantised formats if the exported models cannot be compared with the original on
    any rows."""
    if not pipeline.kind_of(stage).reads_key("export.formats") or not pipeline.recipes[stage.name].export.quantized:
        return
    rows_stage_name = source_of(stage.data)
    if rows_stage_name is not None and pipeline.kind_of(pipeline.stage(rows_stage_name)).makes != "data":
        yield (
            f"export.formats are compared with the model on prepared rows, and data = {stage.data!r} has none; name a "
            f"stage of kind prepare"
        )
    training_names = [other.name for other in pipeline.stages if pipeline.kind_of(other).trains_model]
    if not stage.data and not any(stage.name in pipeline.with_dependents(name) for name in training_names):
        yield (
            "export.formats are compared with the model on rows, and no training comes before the stage; set data = "
            '"stage:NAME" of a prepare stage'
        )


def _product_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    """Yield errors for references to a model or to rows of a stage that makes none, for the best checkpoint of a
    training that keeps none, and for a merge of too few models or with another number of weights."""
    kind, recipe = pipeline.kind_of(stage), pipeline.recipes[stage.name]
    for key, reference in stage_references(stage, recipe, kind):
        name, product = source_of(reference), "model" if key in _MODEL_KEYS else "data"
        if name is not None and not key.endswith("pass_rates") and not _may_make(pipeline, name, product):
            source_kind = pipeline.stage(name).kind
            yield f"{key} = {reference!r}: a stage of kind {source_kind!r} makes no {product}; name another stage"
    if stage.checkpoint:
        source = source_of(stage.model) or ""
        trained = pipeline.recipes[source]
        required_keys = {"train.ckpt.enable_checkpoint": trained.train.ckpt.enable_checkpoint}
        if stage.checkpoint == "best":
            required_keys["validation.enable"] = trained.validation.enable
        missing = " and ".join(f"{key} = true" for key, is_enabled in required_keys.items() if not is_enabled)
        if missing and stage.checkpoint != str(trained.train.max_num_steps):
            yield (
                f"checkpoint = {stage.checkpoint!r} needs {missing} in stage {source!r}; set it there, or leave "
                f"checkpoint out for the final model"
            )
    if kind.table == "merge":
        weights, base = recipe.merge.weights, source_of(stage.model)
        names = [name for name in stage.after if name != base and _may_make(pipeline, name, "model")]
        num_certain = sum(bool(pipeline.kind_of(pipeline.stage(name)).entry) for name in names)
        if len(names) < 2 or (weights and not num_certain <= len(weights) <= len(names)):
            yield (
                f"after = {list(stage.after)} names {len(names)} models to merge, and merge.weights = {list(weights)}; "
                f"name at least two, and a weight for each or none"
            )


def _setting_problems(pipeline: Pipeline, stage: StageConfig) -> Iterator[str]:
    recipe = pipeline.recipes[stage.name]
    for table in (stage, recipe):
        yield from _unsupported_settings(table, StageContext(recipe, pipeline.kind_of(stage)))


def _may_make(pipeline: Pipeline, name: str, product: str) -> bool:
    """Return True if a stage may make a `product`, `model` or `data`; a user's program may make both."""
    kind = pipeline.kind_of(pipeline.stage(name))
    if product == "model":
        return kind.makes in {"model", "publication"} or not kind.entry
    return kind.makes == "data" or not kind.entry or (kind.completes_prompts and not kind.trains_model)


def unique_notices(pipeline: Pipeline) -> list[str]:
    """Return one line of text for each setting that is accepted but ignored or changed, without duplicates."""
    stages = [StageContext(recipe, pipeline.kind_of(pipeline.stage(name))) for name, recipe in pipeline.recipes.items()]
    notices = [notice for stage in stages for notice in _ignored_settings(stage, pipeline.kinds)]
    notices += [notice for stage in stages for table in active_tables(stage.recipe) for notice in table.notices(stage)]
    notices += [*_ignored_stage_keys(pipeline), *_ignored_row_keys(pipeline)]
    return list(dict.fromkeys((*pipeline.notices, *notices)))


def _unsupported_settings(table: Table, stage: StageContext) -> Iterator[str]:
    for key, field, value, is_set in active_fields(table):
        field_status, supported_values = status(field), find_mark(field, SupportedValues)
        if supported_values and supported_values.is_supported(value):
            continue
        if supported_values or (is_set and field_status.name in {"planned", "unsupported"}):
            yield f"{key} = {as_toml(value)}: {supported_values.note if supported_values else field_status.note}"
    for subtable in active_tables(table):
        yield from subtable.refusals(stage)


def _ignored_settings(stage: StageContext, kinds: StageKinds) -> Iterator[str]:
    for key, field, value, is_set in active_fields(stage.recipe):
        field_status = status(field)
        if is_set and field_status.name == "no effect":
            yield f"{key} = {as_toml(value)} has no effect here: {field_status.note}"
    for table, dataset in stage.recipe.datasets.items():
        for key in ("subset", "revision"):
            value = getattr(dataset, key)
            if value and existing_path(dataset.name, Path.cwd()):
                yield f"{table}.{key} = {as_toml(value)} has no effect here: {dataset.name} is on this machine"
    for key, value, switch_name in unused_settings(stage.recipe):
        # No stage kind declares keys that do not change results, such as those of the profiler: report them always.
        if stage.kind.reads_key(key) or not any(kind.reads_key(key) for kind in kinds.values()):
            yield f"{key} = {as_toml(value)} has no effect here: {switch_name} is off"


def _ignored_stage_keys(pipeline: Pipeline) -> Iterator[str]:
    for stage in pipeline.stages:
        recipe, kind, location = pipeline.recipes[stage.name], pipeline.kind_of(stage), f"stage {stage.name!r}"
        if stage.timeout and not kind.in_worker:
            yield (
                f"{location}: timeout = {stage.timeout!r} has no effect here: kind {stage.kind} has no worker that "
                f"could be ended"
            )
        if stage.confidence and not any(parse_condition(text).needs_published_model for text in stage.require):
            yield (
                f"{location}: confidence = {stage.confidence:g} has no effect here: no condition in require compares "
                f"with published"
            )
        if stage.data and kind.entry and not kind.reads_data and not kind.reads_key("export.formats"):
            yield f"{location}: data = {stage.data!r} has no effect here: kind {stage.kind} reads no rows"
        has_remote_rewards = recipe.train.train_policy.remote_rewards or recipe.validation.remote_rewards
        if stage.reward_service and not stage.entry and not has_remote_rewards:
            yield (
                f"{location}: reward_service = {stage.reward_service!r} has no effect here: no reward of it comes from "
                f"a service; leave it out, or set train.train_policy.use_remote_reward = true"
            )


def _ignored_row_keys(pipeline: Pipeline) -> Iterator[str]:
    """Yield a notice for each setting of rows in the recipe of a stage whose rows another recipe prepares."""
    for stage in pipeline.stages:
        kind, source, recipe = pipeline.kind_of(stage), source_of(stage.data), pipeline.recipes[stage.name]
        if source is None or kind.reads_data != "prepared" or recipe == pipeline.recipes[source]:
            continue
        prepare_kind = pipeline.kind_of(pipeline.stage(source))
        prepared_values = {key: value for key, _, value, _ in active_fields(pipeline.recipes[source])}
        for key, field, value, is_set in active_fields(recipe):
            is_ignored = is_set and prepare_kind.reads_key(key) and not kind.reads_key(key)
            if is_ignored and status(field).name == "used" and prepared_values.get(key) != value:
                yield (
                    f"stage {stage.name!r}: {key} = {as_toml(value)} has no effect here: stage {source!r} prepares its "
                    f"rows; set data to prepare rows of its own"
                )
