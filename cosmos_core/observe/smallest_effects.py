"""Smallest differences from the published model that the gates of a pipeline can detect, for `cosmos plan`. They are
computed before the run from the benchmark items on which the published model was measured."""

from collections.abc import Iterator
from typing import Any

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.conditions import MetricCondition, parse_condition
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.target import split_target
from cosmos_core.errors import CosmosError
from cosmos_core.registry import is_import_path
from cosmos_core.run.hub import call_with_timeout
from cosmos_core.run.paired_items import num_required_items, published_item_folders, smallest_effect
from cosmos_core.upload.base import open_target

_SECONDS = 8.0
"""Maximum number of seconds to wait for the record of a publication target."""


def smallest_effects(pipeline: Pipeline) -> Iterator[str]:
    """Yield a line of text for each benchmark that a gate with `confidence` compares with the published model per item.
    User-defined publication targets are left out, because user code is imported only when a stage runs."""
    for stage in pipeline.stages:
        conditions = [each for each in map(parse_condition, stage.require) if each.needs_published_model]
        if not (conditions and stage.confidence and stage.target) or is_import_path(split_target(stage.target)[0]):
            continue
        try:
            record = call_with_timeout(_SECONDS, open_target(stage.target).published)
        except (CosmosError, TimeoutError) as error:
            yield f"{stage.name}: what is published is not known: {error}"
            continue
        for condition in conditions if record else ():
            for metric in record["metrics"]:
                if any(map(condition.matches_metric, (metric, *(f"{each}.{metric}" for each in stage.after)))):
                    yield from _describe_effects(stage, condition, metric, record)


def _describe_effects(
    stage: StageConfig, condition: MetricCondition, metric: str, record: dict[str, Any]
) -> Iterator[str]:
    items_folder = next(published_item_folders(record, metric), None)
    if condition.comparison == "==" or items_folder is None:
        return
    if (count_and_effect := smallest_effect(metric, record["metrics"][metric], items_folder, stage.confidence)) is None:
        return
    num_items, detectable_effect = count_and_effect
    margin = abs(condition.offset)
    required_items_text = (
        f"; {margin:g} needs {num_required_items(num_items, detectable_effect, margin):,}" if margin else ""
    )
    yield (
        f"{stage.name}: {num_items:,} items of {metric} show a difference of {detectable_effect:.2g} in 80 of 100 "
        f"cases{required_items_text}"
    )
