"""Refuse settings that the schema accepts but this version does not support, with a one-line error before a run.

A field declares its limits with marks (`planned`, `Only`, ...); `Table.refusals` checks combinations of fields.
"""

from collections.abc import Iterator
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import existing_path, source_of
from cosmos_core.config.override import IMPLIED_SUFFIX
from cosmos_core.config.reported import check_gates
from cosmos_core.config.schema.marks import SupportedValues, find_mark
from cosmos_core.config.schema.recipe import Recipe
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


def check_capabilities(pipeline: Pipeline) -> None:
    """Refuse settings that this version does not support.

    Raises:
        ConfigError: a setting is not supported; the message names its key, its value and what to use instead.
    """
    check_gates(pipeline)
    _check_store(pipeline)
    _check_references(pipeline)
    _check_mixtures(pipeline)
    _check_compared_rows(pipeline)
    for stage in pipeline.stages:
        recipe = pipeline.recipes[stage.name]
        for table in (stage, recipe):
            for problem in _refusals(table, StageContext(recipe, pipeline.kind_of(stage))):
                raise ConfigError(f"{pipeline.source}: stage {stage.name!r}: {problem}")


def _check_store(pipeline: Pipeline) -> None:
    """If the pipeline has an artifact store, refuse a stage that reads checkpoints from another work pool."""
    for stage in pipeline.stages if pipeline.config.artifact_store else ():
        source = source_of(stage.model) if stage.checkpoint else None
        if source is not None and (pool := pipeline.stage(source).work_pool) != stage.work_pool:
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name!r}: checkpoint = {stage.checkpoint!r} is where stage "
                f"{source!r} runs, and with artifact_store machines share no disk; set work_pool = {pool!r} here too"
            )


def _check_references(pipeline: Pipeline) -> None:
    """Refuse a stage that compares with a reference policy whose log-probabilities no earlier stage saves, and a stage
    that reads pass rates from a stage without completions."""
    for stage in pipeline.stages:
        recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
        for key, dataset in recipe.datasets.items():
            source = source_of(dataset.pass_rates)
            if source is not None and not pipeline.kind_of(pipeline.stage(source)).completes_prompts:
                raise ConfigError(
                    f"{pipeline.source}: stage {stage.name!r}: {key}.pass_rates = {dataset.pass_rates!r} completes no "
                    f"prompts; name a stage of kind rl or sample"
                )
        measures = kind.makes == "metrics" and kind.scores and not kind.trains_model
        if not measures or not recipe.train.train_policy.saves_reference_logprobs:
            continue
        trained = [name for name in stage.after if pipeline.kind_of(pipeline.stage(name)).trains_model]
        if not any(pipeline.recipes[name].validation.enable for name in trained):
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name!r}: trainer_type = "
                f"{recipe.train.train_policy.trainer_type!r} compares with the policy that the training started from, "
                f"which {f'stage {trained[0]!r} saves' if trained else 'a training stage in `after` saves'} only with "
                f"validation.enable = true"
            )


def _check_mixtures(pipeline: Pipeline) -> None:
    """Refuse a mixture of data sets in a stage whose key `data` already names its rows."""
    for stage in pipeline.stages:
        if not stage.data or pipeline.kind_of(stage).reads_data != "source":
            continue
        if pipeline.recipes[stage.name].train.train_policy.datasets:
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name.removesuffix(IMPLIED_SUFFIX)!r}: data = {stage.data!r} "
                f"takes the place of train.train_policy.datasets; leave data out, or set "
                f"overrides.train.train_policy.datasets = []"
            )


def _check_compared_rows(pipeline: Pipeline) -> None:
    """Refuse an export in quantised formats if the exported models cannot be compared with the original on any rows."""
    for stage in pipeline.stages:
        if not pipeline.kind_of(stage).reads_key("export.formats") or not pipeline.recipes[stage.name].export.quantized:
            continue
        rows = source_of(stage.data)
        if rows is not None and pipeline.kind_of(pipeline.stage(rows)).makes != "data":
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name!r}: export.formats are compared with the model on prepared rows"
                f", and data = {stage.data!r} has none; name a stage of kind prepare"
            )
        trainings = [other.name for other in pipeline.stages if pipeline.kind_of(other).trains_model]
        if not stage.data and not any(stage.name in pipeline.with_dependents(name) for name in trainings):
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name!r}: export.formats are compared with the model on rows, and no "
                'training comes before the stage; set data = "stage:NAME" of a prepare stage'
            )


def unique_notices(pipeline: Pipeline) -> list[str]:
    """Return one line of text for each setting that is accepted but ignored or changed, without duplicates."""
    stages = [StageContext(recipe, pipeline.kind_of(pipeline.stage(name))) for name, recipe in pipeline.recipes.items()]
    lines = [
        line
        for stage in stages
        for line in (*_ignored_settings(stage.recipe), *_ignored_revisions(stage.recipe), *_disabled_settings(stage))
    ]
    lines += [line for stage in stages for table in active_tables(stage.recipe) for line in table.notices(stage)]
    return list(dict.fromkeys((*pipeline.notices, *lines, *_ignored_timeouts(pipeline))))


def _refusals(table: Table, stage: StageContext) -> Iterator[str]:
    for key, field, value, is_set in active_fields(table):
        support, supported = status(field), find_mark(field, SupportedValues)
        if supported and supported.is_supported(value):
            continue
        if supported or (is_set and support.name in {"planned", "unsupported"}):
            yield f"{key} = {as_toml(value)}: {supported.note if supported else support.note}"
    for subtable in active_tables(table):
        yield from subtable.refusals(stage)


def _ignored_settings(recipe: Recipe) -> Iterator[str]:
    for key, field, value, is_set in active_fields(recipe):
        support = status(field)
        if is_set and support.name == "no effect":
            yield f"{key} = {as_toml(value)} has no effect here: {support.note}"


def _disabled_settings(stage: StageContext) -> Iterator[str]:
    for key, value, switch in unused_settings(stage.recipe):
        if stage.kind.reads_key(key):
            yield f"{key} = {as_toml(value)} has no effect here: {switch} is off"


def _ignored_timeouts(pipeline: Pipeline) -> Iterator[str]:
    for stage in pipeline.stages:
        if stage.timeout and not pipeline.kind_of(stage).in_worker:
            yield (
                f"stage {stage.name!r}: timeout = {stage.timeout!r} has no effect here: kind {stage.kind} has no "
                "worker that could be ended"
            )


def _ignored_revisions(recipe: Recipe) -> Iterator[str]:
    for table, dataset in recipe.datasets.items():
        for key in ("subset", "revision"):
            value = getattr(dataset, key)
            if value and existing_path(dataset.name, Path.cwd()):
                yield f"{table}.{key} = {as_toml(value)} has no effect here: {dataset.name} is on this machine"
