"""What the schema accepts and this version cannot do yet: refused in one line before anything runs, never ignored."""

from __future__ import annotations

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.recipe import Recipe
from cosmos_core.errors import ConfigError


def check_capabilities(pipeline: Pipeline) -> None:
    """Refuse what this version cannot do.

    Raises:
        ConfigError: naming the key, its value and what to use instead.
    """
    for stage in pipeline.stages:
        where = f"{pipeline.source}: stage {stage.name!r}"
        if stage.work_pool:
            raise ConfigError(
                f"{where}: work_pool = {stage.work_pool!r}: this version runs every stage on the flow's "
                f"machine; leave it out"
            )
        if "://" in stage.target and not stage.target.startswith("file://"):
            raise ConfigError(
                f"{where}: target = {stage.target!r}: this version publishes to local folders only; give a path"
            )
        problem = _of_recipe(pipeline.recipes[stage.name])
        if problem:
            raise ConfigError(f"{where}: {problem}")


def _of_recipe(recipe: Recipe) -> str:
    mesh = recipe.policy.parallelism
    for key in type(mesh).model_fields:
        if abs(getattr(mesh, key)) != 1:
            return f"policy.parallelism.{key} = {getattr(mesh, key)}: this version trains on one rank; set it to 1"
    train = recipe.train
    if train.param_dtype == "float16":
        return "train.param_dtype = 'float16': this version does not scale losses, so gradients vanish; use 'bfloat16'"
    if train.master_dtype == "bfloat16" and train.param_dtype == "float32":
        return "train.param_dtype = 'float32' is wider than train.master_dtype = 'bfloat16'; make them equal"
    return ""
