"""Keys of `[merge]`: how tensors of two models are combined."""

from __future__ import annotations

from typing import Any

import torch

from cosmos_core.checkpoint.merge import combine_tensors, get_merge_weights
from cosmos_core.config.schema.recipe import Recipe
from tests.effects.change import SFT, Change, changes

TIES = {**SFT, "merge.method": "ties"}
MODELS = [{"w": torch.tensor([4.0, 1.0])}, {"w": torch.tensor([2.0, 3.0])}]


def merged(recipe: Recipe) -> Any:
    config = recipe.merge
    base = None if config.method == "linear" else {"w": torch.zeros(2)}
    return combine_tensors(config, get_merge_weights(config, 2), MODELS, base, "w", 0).tolist()


@changes(
    (Change("merge.method", "ties", SFT), ([3.0, 2.0], [4.0, 3.0])),
    (Change("merge.weights", (1.0, 2.0), SFT), ([3.0, 2.0], [8.0, 7.0])),
    (Change("merge.density", 1.0, TIES), ([4.0, 3.0], [3.0, 2.0])),
)
def test_it_changes_how_models_are_merged(change: Change, expected: tuple[Any, Any]) -> None:
    assert (merged(change.before), merged(change.after)) == expected
