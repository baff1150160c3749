"""Algorithm registry: `ALGORITHM` of the module `cosmos_core/algorithms/NAME.py`, or a user-defined class."""

import importlib
from typing import Any

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_user_code, is_import_path
from cosmos_core.types import Sampling


def algorithm_class(policy: AlgorithmConfig) -> type[Algorithm]:
    """Return the class that `train.train_policy.trainer_type` names. Raise ConfigError if the import path of a
    user-defined algorithm does not name a subclass of `Algorithm`."""
    if not is_import_path(policy.trainer_type):
        module: Any = importlib.import_module(f"cosmos_core.algorithms.{policy.algorithm}")
        return module.ALGORITHM  # type: ignore[no-any-return]
    user_class = import_user_code(policy.trainer_type)
    if isinstance(user_class, type) and issubclass(user_class, Algorithm):
        return user_class
    raise ConfigError(
        f"train.train_policy.trainer_type = {policy.trainer_type!r} is no algorithm; it must be a subclass of "
        f"cosmos_core.algorithms.base.Algorithm"
    )


def make_algorithm(recipe: Recipe, sampling: Sampling | None = None) -> Algorithm:
    """Return the algorithm that `train.train_policy.trainer_type` names, with its settings; see `algorithm_class`.
    `sampling`: sampling settings of the completions to train on; None: the training has no rollouts."""
    policy = recipe.train.train_policy
    algorithm = algorithm_class(policy)(policy, recipe.custom, sampling)
    algorithm.diffusers, algorithm.max_tokens = recipe.policy.diffusers, recipe.policy.model_max_length
    if sampling is not None:
        algorithm.teacher = recipe.teacher
    return algorithm
