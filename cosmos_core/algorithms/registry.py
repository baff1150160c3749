"""Algorithm registry: `ALGORITHM` of the module `cosmos_core/algorithms/NAME.py`, or a user-defined class."""

import importlib

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_object, is_import_path
from cosmos_core.types import Sampling

_TRAINER_TYPE_KEY = "train.train_policy.trainer_type"


def make_algorithm(recipe: Recipe, sampling: Sampling | None = None) -> Algorithm:
    """Return the algorithm that `train.train_policy.trainer_type` names, with its settings.

    `sampling`: sampling settings of the completions to train on; None: the training has no rollouts.

    Raises:
        ConfigError: the import path of a user-defined algorithm does not name a subclass of `Algorithm`.
    """
    policy = recipe.train.train_policy
    if is_import_path(policy.trainer_type):
        algorithm_class = import_object(policy.trainer_type)
        if not (isinstance(algorithm_class, type) and issubclass(algorithm_class, Algorithm)):
            raise ConfigError(
                f"{_TRAINER_TYPE_KEY} = {policy.trainer_type!r} is no algorithm; it must be a subclass of "
                f"cosmos_core.algorithms.base.Algorithm"
            )
    else:
        algorithm_class = importlib.import_module(f"cosmos_core.algorithms.{policy.algorithm}").ALGORITHM
    algorithm: Algorithm = algorithm_class(policy, recipe.custom, sampling)
    algorithm.diffusers, algorithm.max_tokens = recipe.policy.diffusers, recipe.policy.model_max_length
    if sampling is not None:
        algorithm.teacher = recipe.teacher
    return algorithm
