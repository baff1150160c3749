"""Weights of reward functions by data set. Pydantic is not imported, so that reward processes start fast."""

from collections.abc import Mapping

from cosmos_core.errors import ConfigError


class RewardWeightsBySource(dict[str, float]):
    """Weights of all reward functions of a recipe. `by_source` maps the label of each data set to the weights for its
    rows, and "" to the weights for all other rows."""

    def __init__(self, weights_by_source: Mapping[str, Mapping[str, float]]) -> None:
        super().__init__({name: weight for weights in weights_by_source.values() for name, weight in weights.items()})
        self.by_source = weights_by_source

    def __repr__(self) -> str:
        return repr(self.by_source)


def reward_weights_of_source(weights: Mapping[str, float], dataset_label: str) -> Mapping[str, float]:
    """Return the weights of the reward functions for rows of the data set with the label `dataset_label`; these are all
    of `weights` unless the recipe has several data sets. Raises `ConfigError` if none of several data sets has this
    label."""
    if not isinstance(weights, RewardWeightsBySource):
        return weights
    if dataset_label not in weights.by_source:
        source_labels = ", ".join(map(repr, filter(None, weights.by_source)))
        raise ConfigError(
            f"train.train_policy.datasets has no data set {dataset_label!r}, of which the prepared rows have some, so "
            f"that their reward functions are unknown; it has {source_labels}: take the labels of the stage that "
            f"prepares the rows"
        )
    return weights.by_source[dataset_label]
