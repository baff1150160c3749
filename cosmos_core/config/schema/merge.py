"""`[merge]`: how a stage of kind `merge` combines models."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from cosmos_core.config.schema.table import StageContext, Table
from cosmos_core.config.schema.value_types import Fraction

_MIN_WEIGHT_SUM = 1e-6


class MergeConfig(Table):
    """`[merge]`: settings that say how models are combined."""

    method: Literal["linear", "ties", "dare_linear", "dare_ties"] = "linear"
    """Rule that combines models. `linear`: weighted sum of the weights (model soup, arXiv 2203.05482). The other rules
    start from the base model, which is the model of the stage, and add the differences of the merged models from it:
    `ties` keeps the largest differences and their majority sign (2306.01708), `dare_linear` keeps random differences,
    scaled up (2311.03099), `dare_ties` does both."""
    weights: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Weight of each merged model, in the order of the stage's `after`; empty: equal weights, with the sum 1 for
    `linear` and `dare_linear`, and 1 each for `ties` and `dare_ties`, which average the differences that they keep."""
    density: Annotated[Fraction, Field(gt=0)] = 0.5
    """Fraction of the differences from the base model that a merge keeps in each tensor; not for `linear`."""

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        if stage.kind.table != "merge":
            return
        if stage.recipe.policy.is_diffusers:
            yield "policy.is_diffusers = true: kind merge combines language models; merge pipelines with a custom stage"
        if self.method == "linear" and self.weights and abs(sum(self.weights)) < _MIN_WEIGHT_SUM:
            problem = "sum to 0, so the merged model would have lost what its models share"
            remedy = "give weights that sum to 1, or add differences with method = 'dare_linear' and density = 1"
            yield f"merge.weights = {list(self.weights)} {problem}; {remedy}"
