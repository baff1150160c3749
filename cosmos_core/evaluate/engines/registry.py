"""Registry of the engines that run benchmarks; each engine is a file of this folder with a function `open_model`."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.run.stage import Stage


def engine_of(recipe: Recipe) -> str:
    """Return the name of the engine that runs the benchmarks of a recipe."""
    if recipe.evaluate.engine != "auto":
        return recipe.evaluate.engine
    has_vllm = recipe.rollout.backend == "vllm" and importlib.util.find_spec("vllm") is not None
    return "vllm" if has_vllm else "hf"


def open_model(stage: Stage, on_response: Callable[[], None]) -> Any:
    """Return lm-eval's model object for the stage's model, which calls `on_response` after each response.

    Raises:
        ConfigError: the engine cannot load the model.
    """
    module = importlib.import_module(f"cosmos_core.evaluate.engines.{engine_of(stage.recipe)}")
    model = module.open_model(stage)
    set_cache_hook = model.set_cache_hook
    model.set_cache_hook = lambda cache_hook: set_cache_hook(_ResponseHook(cache_hook, on_response))
    return model


class _ResponseHook:
    """Hook that lm-eval's model object calls with each response, to cache the response and then call `on_response`."""

    def __init__(self, cache_hook: Any, on_response: Callable[[], None]) -> None:
        self._inner, self._on_response = cache_hook, on_response

    def add_partial(self, kind: str, request: Any, response: Any) -> None:
        self._inner.add_partial(kind, request, response)
        self._on_response()
