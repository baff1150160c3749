"""Which algorithm a recipe gets: what `cosmos_core/algorithms/NAME.py` exports as `ALGORITHM`, or a user's class."""

from __future__ import annotations

import importlib

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_thing, is_import_path
from cosmos_core.types import Sampling

_KEY = "train.train_policy.trainer_type"


def make_algorithm(recipe: Recipe, sampling: Sampling | None = None) -> Algorithm:
    """Return the algorithm of `train.train_policy.trainer_type`; `sampling` says how its completions are
    drawn; None: there are none.

    Raises:
        ConfigError: a user's path leads to no subclass of `Algorithm`.
    """
    policy = recipe.train.train_policy
    if is_import_path(policy.trainer_type):
        found = import_thing(policy.trainer_type)
        if not (isinstance(found, type) and issubclass(found, Algorithm)):
            raise ConfigError(
                f"{_KEY} = {policy.trainer_type!r} is no algorithm; it must be a subclass of "
                f"cosmos_core.algorithms.base.Algorithm"
            )
    else:
        found = importlib.import_module(f"cosmos_core.algorithms.{policy.algorithm}").ALGORITHM
    made: Algorithm = found(policy, recipe.custom, sampling)
    made.diffusers, made.max_tokens = recipe.policy.diffusers, recipe.policy.model_max_length
    if sampling is not None:
        made.teacher = recipe.teacher
    return made
