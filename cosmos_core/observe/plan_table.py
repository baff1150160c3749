"""Table of the decisions of `cosmos plan`: whether a run would reuse or run each stage, and the reasons."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.conditions import MetricCondition, parse_condition
from cosmos_core.config.mesh import describe_placements
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.target import split_publication_target
from cosmos_core.errors import CosmosError
from cosmos_core.registry import is_import_path
from cosmos_core.run.hub import call_with_timeout
from cosmos_core.run.paired_items import compute_detectable_effect, compute_sample_size, find_published_item_folders
from cosmos_core.run.plan import StageDecision
from cosmos_core.upload.base import open_target

_ACTION_TEXTS = {"adopt": "be reused", "reuse": "be reused", "run": "run", "depends": "run unless unchanged"}
_TARGET_TIMEOUT_SECONDS = 8.0
"""Maximum number of seconds to wait until a publication target returns the record of its published model; then `cosmos
plan` shows that the published model is unknown."""


def make_plan_table(pipeline: Pipeline, decisions: Mapping[str, StageDecision]) -> Table:
    """Return a table of the decision for each stage, run or reuse, with its reason. The caption lists the sweeps, the
    devices for the ranks of each stage, and the smallest differences that gates can detect."""
    table = Table("stage", "kind", "after", "will", "why", title=pipeline.config.name)
    for stage in pipeline.stages:
        decision = decisions[stage.name]
        table.add_row(stage.name, stage.kind, ", ".join(stage.after), _ACTION_TEXTS[decision.action], decision.reason)
    sweeps = [(stage.name, stage.sweep) for stage in pipeline.stages if stage.sweep is not None]
    caption_lines = [f"{name}: {sweep.mode} {sweep.metric} of {len(sweep.branches)} branches" for name, sweep in sweeps]
    caption_lines += [*describe_placements(pipeline), *describe_smallest_effects(pipeline)]
    table.caption = "\n".join(caption_lines) or None
    return table


def describe_smallest_effects(pipeline: Pipeline) -> Iterator[str]:
    """Yield, for each gate stage with the key `confidence`, a line of text for each benchmark metric of its conditions:
    the smallest difference to the published model that the gate detects. Gates with a user-defined publication target
    are left out, because user code is imported only when a stage runs."""
    for stage in pipeline.stages:
        conditions = [each for each in map(parse_condition, stage.require) if each.allows_for_noise]
        has_paired_comparison = conditions and stage.confidence and stage.target
        if not has_paired_comparison or is_import_path(split_publication_target(stage.target)[0]):
            continue
        try:
            published_record = call_with_timeout(_TARGET_TIMEOUT_SECONDS, open_target(stage.target).published)
        except (CosmosError, TimeoutError) as error:
            yield f"{stage.name}: what is published is not known: {error}"
            continue
        for condition in conditions if published_record else ():
            for metric in published_record["metrics"]:
                if any(map(condition.matches_metric, (metric, *(f"{each}.{metric}" for each in stage.after)))):
                    yield from _describe_detectable_effect(stage, condition, metric, published_record)


def _describe_detectable_effect(
    stage: StageConfig, condition: MetricCondition, metric: str, published_record: dict[str, Any]
) -> Iterator[str]:
    items_folder = next(find_published_item_folders(published_record, metric, stage.after), None)
    if items_folder is None:
        return
    min_effect = compute_detectable_effect(metric, published_record["metrics"][metric], items_folder, stage.confidence)
    if min_effect is None:
        return
    (num_items, difference), min_gain = min_effect, abs(condition.published_offset)
    text = f"{stage.name}: {num_items:,} items of {metric} show a difference of {difference:.2g} in 80 of 100 cases"
    yield text + (f"; {min_gain:g} needs {compute_sample_size(num_items, difference, min_gain):,}" if min_gain else "")
