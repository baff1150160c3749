"""Algorithm registry: `ALGORITHM` of the module `cosmos_core/algorithms/NAME.py`, or a user-defined class."""

import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from cosmos_core.algorithms.base import Algorithm, TrainerView, Update
from cosmos_core.config.schema.algorithm import AlgorithmConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_user_code, is_import_path
from cosmos_core.types import Sampling, ScoredGroup


def algorithm_class(config: AlgorithmConfig) -> type[Algorithm]:
    """Return the class that `train.train_policy.trainer_type` names. Raise ConfigError if the import path of a
    user-defined algorithm names no subclass of `Algorithm`, or a class that takes other arguments."""
    if not is_import_path(config.trainer_type):
        algorithm_module: Any = importlib.import_module(f"cosmos_core.algorithms.{config.algorithm}")
        return algorithm_module.ALGORITHM  # type: ignore[no-any-return]
    user_class = import_user_code(config.trainer_type)
    if not (isinstance(user_class, type) and issubclass(user_class, Algorithm)):
        raise ConfigError(
            f"train.train_policy.trainer_type = {config.trainer_type!r} is no algorithm; it must be a subclass of "
            f"cosmos_core.algorithms.base.Algorithm"
        )
    try:
        inspect.signature(user_class).bind(config, {}, None)
    except TypeError as error:
        problem = f"it is called with config, custom and sampling: {error}"
        raise make_algorithm_error(config, user_class.__init__, problem) from error
    return user_class


def make_algorithm(recipe: Recipe, sampling: Sampling | None = None) -> Algorithm:
    """Return the algorithm that `train.train_policy.trainer_type` names, with its settings. Raise ConfigError if a
    user-defined algorithm cannot be used. `sampling`: sampling settings of the completions to train on; None: the
    training has no rollouts."""
    algorithm_config = recipe.train.train_policy
    algorithm = algorithm_class(algorithm_config)(algorithm_config, recipe.custom, sampling)
    for name, value in vars(Algorithm(algorithm_config, recipe.custom, sampling)).items():
        vars(algorithm).setdefault(name, value)  # set what a user's class lacks if it does not call `super().__init__`
    algorithm.diffusers, algorithm.max_tokens = recipe.policy.diffusers, recipe.policy.model_max_length
    if sampling is not None:
        algorithm.teacher = recipe.teacher
    return algorithm


def credit_groups(algorithm: Algorithm, groups: Sequence[ScoredGroup]) -> tuple[list[Any], dict[str, float]]:
    """Return the samples and metrics that the algorithm's method `credit` makes of groups of completions with rewards;
    raise ConfigError if a user-defined method returns a value of another type."""
    credit_result: Any = algorithm.credit(groups)
    if isinstance(credit_result, tuple) and len(credit_result) == 2 and isinstance(credit_result[1], Mapping):
        # A user's generator is exhausted first, so that its own errors are not taken for a wrong return value.
        samples = list(credit_result[0]) if isinstance(credit_result[0], Iterator) else credit_result[0]
        with suppress(TypeError, ValueError):
            return list(samples), {name: float(value) for name, value in credit_result[1].items()}
    user_method = algorithm_class(algorithm.config).credit
    problem = f"it returned a {type(credit_result).__name__}, not a tuple of samples and a dict of numbers"
    raise make_algorithm_error(algorithm.config, user_method, problem)


def iterate_optimizer_updates(algorithm: Algorithm, samples: Sequence[Any], view: TrainerView) -> Iterator[Update]:
    """Yield the optimizer steps that the algorithm's method `updates` makes of `samples`; raise ConfigError if a
    user-defined method yields anything but an `Update`."""
    updates: Any = algorithm.updates(samples, view)
    for update in updates if isinstance(updates, Iterable) else [updates]:
        if not isinstance(update, Update):
            user_method = algorithm_class(algorithm.config).updates
            problem = f"it gave a {type(update).__name__}, not an Update of cosmos_core.algorithms.base"
            raise make_algorithm_error(algorithm.config, user_method, problem)
        yield update


def make_algorithm_error(config: AlgorithmConfig, user_function: Any, problem: str) -> ConfigError:
    """Return the ConfigError for a `problem` of a user-defined algorithm, with the file and line of `user_function`,
    the function of the algorithm that causes it."""
    code_object = getattr(inspect.unwrap(user_function), "__code__", None)
    source_location = f" ({code_object.co_filename}:{code_object.co_firstlineno})" if code_object else ""
    name = getattr(user_function, "__name__", "its loss")
    return ConfigError(f"train.train_policy.trainer_type = {config.trainer_type!r}: {name}: {problem}{source_location}")
