"""Check which metrics each stage can report, so that a gate on any other metric is refused before a run."""

from collections.abc import Collection
from fnmatch import fnmatchcase

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.conditions import parse_condition
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError
from cosmos_core.registry import is_import_path, suggestion

HELD_OUT = "validation/"
_ROW_METRICS = ("loss", "loss/*", "perplexity", "token_accuracy", "tokens", "pairs", "rewards/*")
MEASURED_METRICS = (
    "reward", "reward_stderr", "accuracy", "invalid", "length_mean", "prompts", "pass@*", "reward/*", *_ROW_METRICS
)  # fmt: skip
"""Metrics of validation: first of completions, then of the rows themselves. User algorithms may report more."""


def check_gates(pipeline: Pipeline) -> None:
    """Refuse the conditions of a gate on metrics that no stage in its `after` can report.

    Raises:
        ConfigError: the message names the condition and, for a misspelt metric, a suggestion.
    """
    for stage in pipeline.stages:
        _check_sweep_metric(pipeline, stage)
        for condition in map(parse_condition, stage.require):
            first, _, metric_suffix = condition.metric.partition(".")
            names, metric = ([first], metric_suffix) if first in stage.after else (list(stage.after), condition.metric)
            if not _can_any_report(pipeline, names, metric):
                reportable_metrics = _held_out_metrics(pipeline, names)
                raise ConfigError(
                    f"{pipeline.source}: stage {stage.name!r}: require = {condition.text!r}: no stage in its `after` "
                    f"reports {metric!r}{suggestion(metric, reportable_metrics) if reportable_metrics else ''}"
                )


def _check_sweep_metric(pipeline: Pipeline, stage: StageConfig) -> None:
    """Refuse a sweep metric that no stage of a branch can report."""
    if stage.sweep is None:
        return
    metric = stage.sweep.metric
    for branch in stage.sweep.branches:
        if not _can_any_report(pipeline, branch.stages, metric):
            reportable_metrics = _held_out_metrics(pipeline, branch.stages)
            advice = "; add a stage of kind validate to sweep.through"
            suggestion_text = suggestion(metric, reportable_metrics) if reportable_metrics else advice
            raise ConfigError(
                f"{pipeline.source}: stage {stage.name!r}: sweep.metric = {metric!r}: no stage of branch "
                f"{branch.stages[0]!r} reports it{suggestion_text}"
            )


def _can_any_report(pipeline: Pipeline, stage_names: Collection[str], metric: str) -> bool:
    return any(_can_report(pipeline, pipeline.stage(name), metric) for name in stage_names)


def _held_out_metrics(pipeline: Pipeline, stage_names: Collection[str]) -> list[str]:
    """Return the metrics of held-out rows, without patterns, that any of the stages `stage_names` can report."""
    metrics = [HELD_OUT + name for name in MEASURED_METRICS if "*" not in name]
    return [metric for metric in metrics if _can_any_report(pipeline, stage_names, metric)]


def _can_report(pipeline: Pipeline, stage: StageConfig, metric: str) -> bool:
    stage_kind, recipe = pipeline.kind_of(stage), pipeline.recipes[stage.name]
    if stage_kind.forwards_metrics:
        return _can_any_report(pipeline, stage.after, metric)
    if stage_kind.scores and stage_kind.makes and metric.startswith(HELD_OUT):
        is_measured = recipe.validation.enable or not stage_kind.trains_model
        is_user_algorithm = is_import_path(recipe.train.train_policy.trainer_type)
        name, validation = metric.removeprefix(HELD_OUT), recipe.validation
        # Without rewards, a training on data sets measures only the loss of its rows.
        has_rewards = validation.reward_function or validation.remote_rewards
        patterns = MEASURED_METRICS if has_rewards or recipe.train.train_policy.reports_rewards else _ROW_METRICS
        return is_measured and (is_user_algorithm or any(fnmatchcase(name, pattern) for pattern in patterns))
    return any(fnmatchcase(metric, pattern) for pattern in stage_kind.reports)
