"""What two configurations do differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.describe import toml_text

_IN_RECIPE = ("recipe", "overrides")


def difference(first: Pipeline, second: Pipeline) -> Iterator[str]:
    """Yield lines `key: old -> new`, of the pipeline and of each stage, after composition, defaults and rules; what is
    the same in all stages once, without their names."""
    old, new = _flat(first.config.model_dump(exclude={"stages"})), _flat(second.config.model_dump(exclude={"stages"}))
    yield from _lines("pipeline.", old, new)
    names = [stage.name for stage in first.stages]
    shared: dict[str, list[str]] = {}
    for name in names + [stage.name for stage in second.stages if stage.name not in names]:
        stages = [_stage(pipeline, name) for pipeline in (first, second)]
        if stages[0] is None or stages[1] is None:
            yield f"{name}: {'only in the first' if stages[1] is None else 'only in the second'}"
        else:
            shared[name] = list(_lines("", stages[0], stages[1]))
    common = set.intersection(*map(set, shared.values())) if shared else set()
    yield from dict.fromkeys(line for lines in shared.values() for line in lines if line in common)
    yield from (f"{name}.{line}" for name, lines in shared.items() for line in lines if line not in common)


def _stage(pipeline: Pipeline, name: str) -> dict[str, Any] | None:
    if name not in pipeline.recipes:
        return None
    entry = {k: v for k, v in pipeline.stage(name).model_dump().items() if k not in _IN_RECIPE}
    return _flat(entry) | _flat(pipeline.recipes[name].model_dump())


def _lines(prefix: str, old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for key in [*old, *(key for key in new if key not in old)]:
        was, now = (toml_text(values[key]) if key in values else "nothing" for values in (old, new))
        if was != now:
            yield f"{prefix}{key}: {was} -> {now}"


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat
