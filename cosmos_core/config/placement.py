"""Assign GPUs to training and generation: the default of `mode` on a machine, and a description of the assignment."""

from math import gcd

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.types import StageKind


def is_open(recipe: Recipe, kind: StageKind) -> bool:
    """Return True if `mode` depends on the number of GPUs, as in a recipe for Cosmos-RL that leaves `mode` out; the
    default of Cosmos-RL is `disaggregated`."""
    may_be_disaggregated = kind.feed == "rollouts" and recipe.policy.modality.has_engines_of_text
    return may_be_disaggregated and "mode" not in recipe.model_fields_set and recipe.has_cosmos_rl_keys


def choose_default_mode(recipe: Recipe, gpus: int | None) -> tuple[Recipe, str]:
    """Return the recipe with the `mode` that fits `gpus` GPUs, and a notice if this is not `disaggregated`, the default
    of Cosmos-RL. If `gpus` is None, another machine runs the stage and is assumed to have enough GPUs.

    In `colocated` mode, `tp_size` of the engines is changed to a divisor of the number of ranks.
    """
    disaggregated_recipe = recipe.derive(mode="disaggregated")
    num_required = disaggregated_recipe.num_gpus(has_rollouts=True)
    if gpus is None or num_required <= gpus:
        return disaggregated_recipe, ""
    colocated_recipe, change_text = with_engines_in_ranks(recipe)
    return colocated_recipe.derive(mode="colocated"), (
        f"mode is left out, which means 'disaggregated' in a recipe of Cosmos-RL and takes {num_required} GPUs, and "
        f"there are {gpus}: mode = 'colocated'{change_text and f' and {change_text}'}, so that ranks train and "
        f"generate in turns; set mode to choose"
    )


def with_engines_in_ranks(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with a `tp_size` of the rollout engines that divides the number of ranks, and a description of
    the change, which is empty if nothing changed."""
    num_ranks, engine_mesh = recipe.policy.parallelism.world_size, recipe.rollout.parallelism
    if num_ranks % engine_mesh.tp_size == 0:
        return recipe, ""
    parallelism = engine_mesh.derive(tp_size=gcd(num_ranks, engine_mesh.tp_size))
    rollout = recipe.rollout.derive(parallelism=parallelism)
    return recipe.derive(rollout=rollout), f"rollout.parallelism.tp_size = {parallelism.tp_size}"


def needs_gpu(recipe: Recipe, kind: StageKind) -> list[str]:
    """Return the settings of a stage that select number formats for GPUs only; a CPU ignores these settings."""
    settings = []
    if kind.trains_model and recipe.train.fp8.enable_fp8:
        settings.append("train.fp8.enable_fp8 = true")
    if kind.feed == "rollouts" and recipe.rollout.quantization != "none":
        settings.append(f"rollout.quantization = {recipe.rollout.quantization!r}")
    return settings


def placement(recipe: Recipe, kind: StageKind, *, has_gpus: bool) -> str:
    """Return a text with the GPUs (or processes, on a machine without GPUs) on which a stage trains and generates."""
    unit_name = "GPU" if has_gpus else "process"
    mesh, engine_mesh, num_engines = recipe.policy.parallelism, recipe.rollout.parallelism, recipe.num_engines
    num_ranks = mesh.world_size * mesh.n_init_replicas
    ranks_text = _format_range(unit_name, 0, num_ranks)
    if kind.feed != "rollouts":
        return f"{ranks_text} {'train' if kind.trains_model else 'generate' if kind.completes_prompts else 'measure'}"
    if recipe.mode == "colocated":
        return (
            f"{ranks_text} train and generate in turns "
            f"({_describe_engines(num_ranks // engine_mesh.tp_size, engine_mesh.tp_size)} in them)"
        )
    engines_text = _describe_engines(num_engines, engine_mesh.tp_size)
    if recipe.mode == "colocated_separated":
        return f"{ranks_text} train, and generate in turns ({engines_text} in processes of their own)"
    return (
        f"{ranks_text} train, {_format_range(unit_name, num_ranks, num_engines * engine_mesh.tp_size)} generate "
        f"({engines_text})"
    )


def _format_range(unit_name: str, first_index: int, count: int) -> str:
    if count == 1:
        return f"{unit_name} {first_index}"
    return f"{unit_name}{'es' if unit_name.endswith('s') else 's'} {first_index}-{first_index + count - 1}"


def _describe_engines(num_engines: int, engine_size: int) -> str:
    return f"{num_engines} engine{'s' if num_engines > 1 else ''}{f' of {engine_size}' if engine_size > 1 else ''}"
