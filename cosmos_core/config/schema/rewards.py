"""Reward functions in TOML: one name, a list of names, or names with weights."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

from cosmos_core.config.schema.marks import NamedThing
from cosmos_core.errors import ConfigError


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


class SourceWeights(dict[str, float]):
    """Weights of the reward functions of all sources together, with those of each source; the source "" has the weights
    of rows of no source."""

    def __init__(self, by_source: Mapping[str, Mapping[str, float]]) -> None:
        super().__init__({name: weight for weights in by_source.values() for name, weight in weights.items()})
        self.by_source = by_source

    def __repr__(self) -> str:
        return repr(self.by_source)


def weights_of(weights: Mapping[str, float], source: str) -> Mapping[str, float]:
    """Return the weights of the reward functions that score rows of a source.

    Raises:
        ConfigError: the recipe has data sets, and none of them is the source.
    """
    if not isinstance(weights, SourceWeights):
        return weights
    if source not in weights.by_source:
        source_names = ", ".join(map(repr, filter(None, weights.by_source)))
        raise ConfigError(
            f"train.train_policy.datasets has no data set {source!r}, of which the prepared rows have some, so that "
            f"their reward functions are unknown; it has {source_names}: take the labels of the stage that prepares "
            f"the rows"
        )
    return weights.by_source[source]
