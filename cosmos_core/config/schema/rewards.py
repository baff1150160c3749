"""Reward functions in TOML: one name, a list of names, or names with weights."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from cosmos_core.config.schema.marks import NamedThing


def _parse_weight(value: Any) -> Any:
    if isinstance(value, str):
        return {value: 1.0}
    if isinstance(value, list | tuple) and all(isinstance(name, str) for name in value):
        return dict.fromkeys(value, 1.0)
    if isinstance(value, dict):
        return {name: float(w) if isinstance(w, int) and not isinstance(w, bool) else w for name, w in value.items()}
    return value


RewardWeights = Annotated[
    dict[str, float],
    BeforeValidator(_parse_weight, json_schema_input_type=str | list[str] | dict[str, float]),
    NamedThing.CODE,
]
"""Weight of each reward function by its name or import path `module:function`; a string or a list of strings means
weight 1."""
