"""Differences between two resolved configurations, with all default and derived values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.describe import toml_text

T = TypeVar("T")

_RECIPE_KEYS = ("recipe", "overrides")


def pipeline_differences(old_pipeline: Pipeline, new_pipeline: Pipeline) -> Iterator[str]:
    """Yield lines `key: old -> new` for the pipeline and each stage. Resolved values are compared, with
    defaults; a change that all stages share appears once, without a stage name."""
    old_values, new_values = (flat(each.config.model_dump(exclude={"stages"})) for each in (old_pipeline, new_pipeline))
    yield from _difference_lines("pipeline.", old_values, new_values)
    stage_names = [stage.name for stage in old_pipeline.stages]
    changes_by_stage: dict[str, list[str]] = {}
    for name in stage_names + [stage.name for stage in new_pipeline.stages if stage.name not in stage_names]:
        stage_values = [_flatten_stage(pipeline, name) for pipeline in (old_pipeline, new_pipeline)]
        if stage_values[0] is None or stage_values[1] is None:
            yield f"{name}: {'only in the first' if stage_values[1] is None else 'only in the second'}"
        else:
            changes_by_stage[name] = list(_difference_lines("", stage_values[0], stage_values[1]))
    yield from (f"{name}.{line}" if name else line for name, line in group_by_stage(changes_by_stage))


def _flatten_stage(pipeline: Pipeline, name: str) -> dict[str, Any] | None:
    if name not in pipeline.recipes:
        return None
    stage_settings = {k: v for k, v in pipeline.stage(name).model_dump().items() if k not in _RECIPE_KEYS}
    return flat(stage_settings) | flat(pipeline.recipes[name].model_dump())


def _difference_lines(prefix: str, old_values: dict[str, Any], new_values: dict[str, Any]) -> Iterator[str]:
    for key in [*old_values, *(key for key in new_values if key not in old_values)]:
        sides = (old_values, new_values)
        old_text, new_text = (toml_text(values[key]) if key in values else "nothing" for values in sides)
        if old_text != new_text:
            yield f"{prefix}{key}: {old_text} -> {new_text}"


def group_by_stage(changes: Mapping[str, Sequence[T]]) -> Iterator[tuple[str, T]]:
    """Yield pairs of a stage name and a change: first each change that all stages share, once with an empty name, then
    all other changes."""
    common_changes = set.intersection(*map(set, changes.values())) if changes else set()
    shared_changes = dict.fromkeys(change for lines in changes.values() for change in lines if change in common_changes)
    yield from (("", change) for change in shared_changes)
    yield from ((name, change) for name, lines in changes.items() for change in lines if change not in common_changes)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys; an empty table remains a value."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flattened
