"""Differences between two resolved configurations, with all default and derived values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.describe import toml_text
from cosmos_core.environment import mask_settings

ChangeT = TypeVar("ChangeT")

_STAGE_RECIPE_KEYS = ("recipe", "overrides")


def pipeline_differences(old_pipeline: Pipeline, new_pipeline: Pipeline) -> Iterator[str]:
    """Yield lines `key: old -> new`, with a stage name unless the change is the same in all stages."""
    pipelines = (old_pipeline, new_pipeline)
    pipeline_settings = (flatten_tables(pipeline.config.model_dump(exclude={"stages"})) for pipeline in pipelines)
    yield from _format_differences("pipeline.", *pipeline_settings)
    changes_by_stage: dict[str, list[str]] = {}
    for name in dict.fromkeys(stage.name for pipeline in pipelines for stage in pipeline.stages):
        old_settings, new_settings = (_flatten_stage_settings(pipeline, name) for pipeline in pipelines)
        if old_settings is None or new_settings is None:
            yield f"{name}: {'only in the first' if new_settings is None else 'only in the second'}"
        else:
            changes_by_stage[name] = list(_format_differences("", old_settings, new_settings))
    yield from (f"{name}.{line}" if name else line for name, line in group_changes_by_stage(changes_by_stage))


def _flatten_stage_settings(pipeline: Pipeline, name: str) -> dict[str, Any] | None:
    if name not in pipeline.recipes:
        return None
    stage_settings = {k: v for k, v in pipeline.stage(name).model_dump().items() if k not in _STAGE_RECIPE_KEYS}
    return flatten_tables(stage_settings) | flatten_tables(pipeline.recipes[name].model_dump())


def _format_differences(key_prefix: str, old_settings: dict[str, Any], new_settings: dict[str, Any]) -> Iterator[str]:
    settings = (old_settings, new_settings)
    for key in old_settings | new_settings:
        if len({toml_text(table[key]) if key in table else None for table in settings}) > 1:
            value_texts = (toml_text(mask_settings(each[key], key)) if key in each else "nothing" for each in settings)
            yield f"{key_prefix}{key}: {' -> '.join(value_texts)}"


def group_changes_by_stage(changes: Mapping[str, Sequence[ChangeT]]) -> Iterator[tuple[str, ChangeT]]:
    """Yield pairs of a stage name and a change, from the lists of changes by stage name. A change that all stages have
    in common is yielded once, before the others, with an empty stage name."""
    common_changes = set.intersection(*map(set, changes.values())) if changes else set()
    common_changes_in_order = dict.fromkeys(
        change for lines in changes.values() for change in lines if change in common_changes
    )
    yield from (("", change) for change in common_changes_in_order)
    yield from ((name, change) for name, lines in changes.items() for change in lines if change not in common_changes)


def flatten_tables(nested_tables: Mapping[str, Any], key_prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys; an empty table remains a value."""
    flat_table: dict[str, Any] = {}
    for key, setting in nested_tables.items():
        is_table = isinstance(setting, dict) and setting
        flat_table |= flatten_tables(setting, f"{key_prefix}{key}.") if is_table else {key_prefix + key: setting}
    return flat_table
