"""Differences between two resolved configurations, with all default and derived values."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.describe import toml_text

T = TypeVar("T")

_RECIPE_KEYS = ("recipe", "overrides")


def pipeline_differences(first: Pipeline, second: Pipeline) -> Iterator[str]:
    """Yield lines `key: old -> new` for the pipeline and each stage. Resolved values are compared, with
    defaults; a change that all stages share appears once, without a stage name."""
    old_values, new = (flat(each.config.model_dump(exclude={"stages"})) for each in (first, second))
    yield from _lines("pipeline.", old_values, new)
    names = [stage.name for stage in first.stages]
    shared: dict[str, list[str]] = {}
    for name in names + [stage.name for stage in second.stages if stage.name not in names]:
        stages = [_stage(pipeline, name) for pipeline in (first, second)]
        if stages[0] is None or stages[1] is None:
            yield f"{name}: {'only in the first' if stages[1] is None else 'only in the second'}"
        else:
            shared[name] = list(_lines("", stages[0], stages[1]))
    yield from (f"{name}.{line}" if name else line for name, line in group_by_stage(shared))


def _stage(pipeline: Pipeline, name: str) -> dict[str, Any] | None:
    if name not in pipeline.recipes:
        return None
    entry = {k: v for k, v in pipeline.stage(name).model_dump().items() if k not in _RECIPE_KEYS}
    return flat(entry) | flat(pipeline.recipes[name].model_dump())


def _lines(prefix: str, old_values: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in [*old_values, *(key for key in new if key not in old_values)]:
        was, new_text = (toml_text(values[key]) if key in values else "nothing" for values in (old_values, new))
        if was != new_text:
            yield f"{prefix}{key}: {was} -> {new_text}"


def group_by_stage(changes: Mapping[str, Sequence[T]]) -> Iterator[tuple[str, T]]:
    """Yield pairs of a stage name and a change: first each change that all stages share, once with an empty name, then
    all other changes."""
    common_changes = set.intersection(*map(set, changes.values())) if changes else set()
    shared_changes = dict.fromkeys(each for lines in changes.values() for each in lines if each in common_changes)
    yield from (("", each) for each in shared_changes)
    yield from ((name, each) for name, lines in changes.items() for each in lines if each not in common_changes)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one table with dotted keys; an empty table remains a value."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flattened
