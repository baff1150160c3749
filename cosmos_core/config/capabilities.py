"""What the schema accepts and this version cannot do yet: refused in one line before anything runs, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cosmos_core.config.compose import Pipeline, existing
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import Only, mark, set_fields, status
from cosmos_core.config.target import TARGETS_FOLDER, split_target
from cosmos_core.errors import ConfigError
from cosmos_core.registry import is_import_path, offered_names, suggestion
from cosmos_core.types import StageKind


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
        name = split_target(stage.target)[0]
        if not is_import_path(name) and name not in (known := offered_names(TARGETS_FOLDER, "Target")):
            raise ConfigError(
                f"{where}: target = {stage.target!r}: there is no target {name!r}{suggestion(name, known)}; "
                f"give a folder, or a class of your own as path/file.py:Class"
            )
        recipe, kind = pipeline.recipes[stage.name], pipeline.kind_of(stage)
        for problem in (*_of_recipe(recipe, kind), *_of_mesh(recipe, kind)):
            raise ConfigError(f"{where}: {problem}")


def notices_of(pipeline: Pipeline) -> list[str]:
    """What is accepted but not taken as it stands, once each."""
    recipes = pipeline.recipes.values()
    found = (_without_effect, _of_local_data, _of_ranks, _of_stages, _of_algorithm, _of_sampling)
    inert = [line for recipe in recipes for notices in found for line in notices(recipe)]
    return list(dict.fromkeys((*pipeline.notices, *inert)))


def _without_effect(recipe: Recipe) -> Iterator[str]:
    for key, field, value, is_set in set_fields(recipe):
        found = status(field)
        if is_set and found.name == "no effect":
            yield f"{key} = {_toml(value)} has no effect here: {found.note}"


def _of_ranks(recipe: Recipe) -> Iterator[str]:
    """A batch that means another number of rows than in Cosmos-RL."""
    mesh, train = recipe.policy.parallelism, recipe.train
    ranks = abs(mesh.dp_shard_size) * mesh.dp_replicate_size
    if train.train_policy.rows != "prompts" and ranks > 1:
        yield (
            f"train.train_batch_per_replica = {train.train_batch_per_replica}: rows of an optimizer step, of all "
            f"{ranks} data-parallel ranks together (Cosmos-RL: of each)"
        )


def _of_stages(recipe: Recipe) -> Iterator[str]:
    """A pipeline in which most ranks wait most of the time."""
    mesh, mini_batch = recipe.policy.parallelism, recipe.train.train_policy.mini_batch
    if mini_batch < mesh.pp_size * mesh.pp_micro_batch_size and mesh.pp_size > 1:
        yield (
            f"train.train_policy.mini_batch = {mini_batch}: rows that go through the pipeline between two waits, fewer "
            f"than pp_size x pp_micro_batch_size = {mesh.pp_size} x {mesh.pp_micro_batch_size}; raise it to keep the "
            f"ranks busy"
        )


def _of_algorithm(recipe: Recipe) -> Iterator[str]:
    return recipe.train.train_policy.notices()


def _of_local_data(recipe: Recipe) -> Iterator[str]:
    datasets = {"train.train_policy": recipe.train.train_policy.dataset, "validation": recipe.validation.dataset}
    for table, dataset in datasets.items():
        for key in ("subset", "revision"):
            value = getattr(dataset, key)
            if value and existing(dataset.name, Path.cwd()):
                yield f"{table}.dataset.{key} = {_toml(value)} has no effect here: {dataset.name} is on this machine"


def _of_recipe(recipe: Recipe, kind: StageKind) -> Iterator[str]:
    for key, field, value, is_set in set_fields(recipe):
        found, only = status(field), mark(field, Only)
        if only and only.allows(value):
            continue
        if only:
            yield f"{key} = {_toml(value)}: {only.note}"
        elif is_set and found.name in {"planned", "unsupported"}:
            yield f"{key} = {_toml(value)}: {found.note}"
    if recipe.policy.lora and recipe.policy.lora.init_lora_weights == "eva":
        yield "policy.lora.init_lora_weights = 'eva' needs data before the first step; use 'pissa' or true"
    train, rollout = recipe.train, recipe.rollout
    if kind.feed == "rollouts":
        if rollout.n_generation < 2:
            yield "rollout.n_generation = 1: advantages compare answers of one group; make it at least 2"
        if train.train_batch_per_replica % rollout.n_generation:
            yield (
                f"train.train_batch_per_replica = {train.train_batch_per_replica}: this version trains whole groups; "
                f"make it a multiple of rollout.n_generation = {rollout.n_generation}"
            )
        if rollout.max_response_length >= recipe.policy.model_max_length:
            yield (
                f"rollout.max_response_length = {rollout.max_response_length} leaves no room for a prompt in "
                f"policy.model_max_length = {recipe.policy.model_max_length}; lower it"
            )
    if train.fp8.enable_fp8 and recipe.policy.lora is not None:
        yield "train.fp8.enable_fp8 = true excludes policy.lora, whose base is not trained; leave [train.fp8] out"
    if train.fp8.enable_fp8 and train.param_dtype != "bfloat16":
        yield f"train.fp8.enable_fp8 = true needs train.param_dtype = 'bfloat16', not {train.param_dtype!r}"
    if train.train_policy.rows == "pairs" and recipe.validation.reward_function:
        yield "validation.reward_function: the held-out rows are pairs, and nothing is generated; leave it out"
    if isinstance(train.optm_lr, tuple):
        yield f"train.optm_lr = {_toml(train.optm_lr)}: a model is one part here; give rates by module path"
    if isinstance(train.optm_impl, tuple):
        yield f"train.optm_impl = {_toml(train.optm_impl)}: this version has one optimizer; give one name"
    if train.optm_name.endswith("8bit") and recipe.policy.parallelism.world_size > 1:
        yield f"train.optm_name = {train.optm_name!r}: this version has 8-bit moments on one rank alone; use 'AdamW'"
    if train.master_dtype == "bfloat16" and train.param_dtype == "float32":
        yield "train.param_dtype = 'float32' is wider than train.master_dtype = 'bfloat16'; make them equal"


def _of_mesh(recipe: Recipe, kind: StageKind) -> Iterator[str]:
    """What stages on several ranks cannot do."""
    mesh = recipe.policy.parallelism
    if not kind.has_mesh:
        return
    yield from _of_engines(recipe, kind)
    if recipe.train.fsdp_offload and (mesh.ep_size > 1 or abs(mesh.dp_shard_size) * mesh.cp_size == 1):
        yield (
            f"train.fsdp_offload = true is for weights that dp_shard_size x cp_size = {abs(mesh.dp_shard_size)} x "
            f"{mesh.cp_size} ranks shard, with ep_size = 1; leave it out"
        )
    if mesh.world_size == 1:
        return
    where = f"policy.parallelism has {mesh.world_size} ranks"
    if recipe.train.compile and mesh.tp_size > 1:
        yield f"{where}: train.compile = true excludes tp_size = {mesh.tp_size} in this version; set it to false"
    kernels = {
        "train.fp8.enable_fp8": recipe.train.fp8.enable_fp8,
        "policy.enable_liger_kernel": recipe.policy.enable_liger_kernel,
    }
    for key in (key for key, is_set in kernels.items() if is_set):
        for axis in ("tp_size", "cp_size", "pp_size", "ep_size"):
            if getattr(mesh, axis) > 1:
                yield f"{key} = true excludes policy.parallelism.{axis} = {getattr(mesh, axis)} here; set it to 1"


def _of_engines(recipe: Recipe, kind: StageKind) -> Iterator[str]:
    """Engines that share the ranks of the model in a way that they cannot."""
    if kind.feed == "dataset" and not recipe.validation.reward_function:
        return
    ranks, each = recipe.policy.parallelism.world_size, recipe.rollout.parallelism.tp_size
    key = f"rollout.parallelism.tp_size = {each}"
    if ranks % each:
        yield f"{key}: engines share the ranks of policy.parallelism, which are {ranks}; take a divisor of that"
    elif each > 1 and recipe.rollout.backend == "hf":
        yield f"{key}: backend 'hf' has the whole model on each rank; set it to 1"


def _toml(value: object) -> str:
    """A value in a message: as TOML writes it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."
