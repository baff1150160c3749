"""Check that device meshes fit the available GPUs and the sizes of the model; choose the mesh sizes and the `mode` that
depend on the number of GPUs.

Every error message names the nearest possible size. The sizes of a model are read from its `config.json`; a size that
the file does not contain is not checked.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import gcd
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import existing_path, referenced_stage
from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.machine_properties import measure_worker_machine

_HEAD_COUNT_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_mesh(recipe: Recipe, num_gpus: int | None, model_config: Mapping[str, Any]) -> int:
    """Return the number of GPUs that a training stage uses, including the GPUs of its rollout engines.

    `num_gpus` is the number of available GPUs (None: unknown), `model_config` the result of `read_text_model_config`.
    Raises `ConfigError` if the mesh is not possible; the message names the nearest possible size.
    """
    _check_mesh_sizes("policy.parallelism", recipe.policy.parallelism, model_config)
    if recipe.train.train_policy.has_rollouts:
        _check_mesh_sizes("rollout.parallelism", recipe.rollout.parallelism, model_config)
    recipe_with_shard_size = with_dp_shard_size(recipe, num_gpus)
    mesh = recipe_with_shard_size.policy.parallelism
    _check_batch_size(recipe, abs(mesh.dp_shard_size))
    num_required_gpus = recipe_with_shard_size.num_gpus(has_rollouts=recipe.train.train_policy.has_rollouts)
    if num_gpus is not None and num_required_gpus > num_gpus:
        raise ConfigError(_too_many_gpus_message(mesh, num_required_gpus, num_gpus))
    return num_required_gpus


def check_meshes(pipeline: Pipeline) -> dict[str, int]:
    """Return the number of GPUs of each stage that runs on a device mesh, by stage name; raise `ConfigError` if a mesh
    is not possible."""
    num_gpus_by_stage = {}
    for stage in pipeline.stages:
        if not pipeline.stage_kind(stage).has_mesh:
            continue
        recipe = pipeline.recipes[stage.name]
        model_name = stage.model or recipe.policy.model_name_or_path
        model_dir = None if referenced_stage(model_name) else existing_path(model_name, Path.cwd())
        try:
            num_gpus_by_stage[stage.name] = check_mesh(recipe, pipeline.config.gpus, read_text_model_config(model_dir))
        except ConfigError as error:
            raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: {error}") from error
    return num_gpus_by_stage


def resolve_gpu_settings(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with the settings resolved that depend on the number of GPUs: a `dp_shard_size` of -1, which
    is kept if there is no GPU, and a `mode` that a recipe of Cosmos-RL leaves out. The number of GPUs is
    `pipeline.gpus` or, if that is unset, the number of GPUs of the machine that runs the stages. Raises `ConfigError`
    if the other mesh sizes do not divide the number of GPUs."""
    recipes, notices = dict(pipeline.recipes), list(pipeline.notices)
    for stage in pipeline.stages:
        kind, recipe = pipeline.stage_kind(stage), recipes[stage.name]
        if not kind.has_mesh:
            continue
        has_text_rollouts = kind.feed == "rollouts" and recipe.policy.modality.has_text_engines
        if has_text_rollouts and "mode" not in recipe.model_fields_set and recipe.has_cosmos_rl_keys:
            is_gpu_count_unknown = bool(stage.work_pool) and not pipeline.config.gpus
            recipe, notice = _choose_default_mode(recipe, None if is_gpu_count_unknown else num_worker_gpus(pipeline))
            notices += [notice] if notice else []
        elif kind.makes == "metrics" and (recipe.mode == "disaggregated" or recipe.has_cosmos_rl_keys):
            recipe, engine_setting = _with_colocated_engine_size(recipe)
            notices += [f"stage {stage.name!r}: {engine_setting}, because its ranks generate"] if engine_setting else []
        if recipe.policy.parallelism.dp_shard_size == -1:
            try:
                recipe = with_dp_shard_size(recipe, num_worker_gpus(pipeline) or None)
            except ConfigError as error:
                raise ConfigError(f"{pipeline.source_path}: stage {stage.name!r}: {error}") from error
        gpu_settings = []  # settings of number formats that only GPUs have, which a CPU ignores
        if kind.trains_model and recipe.train.fp8.enable_fp8:
            gpu_settings.append("train.fp8.enable_fp8 = true")
        if kind.feed == "rollouts" and recipe.rollout.quantization != "none":
            gpu_settings.append(f"rollout.quantization = {recipe.rollout.quantization!r}")
        if gpu_settings and not stage.work_pool and not num_worker_gpus(pipeline):
            notices.append(f"{', '.join(gpu_settings)}: there is no GPU; numbers are those of train.param_dtype here")
        recipes[stage.name] = recipe
    return replace(pipeline, recipes=recipes, notices=tuple(dict.fromkeys(notices)))


def num_worker_gpus(pipeline: Pipeline) -> int:
    """Return `pipeline.gpus` or, if unset, the number of GPUs of the machine or cluster that runs the stages."""
    config = pipeline.config
    return config.gpus or len(measure_worker_machine(python_path=config.python, may_use_ray=True).gpus)


def describe_placements(pipeline: Pipeline) -> list[str]:
    """Return one line of text for each stage that runs on a device mesh: which GPUs train, generate or measure."""
    stages = [stage for stage in pipeline.stages if pipeline.stage_kind(stage).has_mesh]
    has_gpu_worker = any(stage.work_pool for stage in stages) or (bool(stages) and num_worker_gpus(pipeline) > 0)
    return [f"{stage.name}: {_describe_placement(pipeline, stage, has_gpu_worker=has_gpu_worker)}" for stage in stages]


def with_dp_shard_size(recipe: Recipe, num_gpus: int | None) -> Recipe:
    """Return the recipe with `dp_shard_size = -1` replaced by the size with which mesh and rollout engines use
    `num_gpus` GPUs; unchanged if `num_gpus` is None. Raises `ConfigError` if the other sizes do not divide the number
    of GPUs."""
    mesh = recipe.policy.parallelism
    if mesh.dp_shard_size != -1 or num_gpus is None:
        return recipe
    has_rollouts = recipe.train.train_policy.has_rollouts
    num_engine_gpus = recipe.num_gpus(has_rollouts=has_rollouts) - recipe.num_gpus(has_rollouts=False)
    ranks_per_shard, num_replica_gpus = _ranks_per_shard(mesh), (num_gpus - num_engine_gpus) // mesh.n_init_replicas
    dp_shard_size = max(1, num_replica_gpus // ranks_per_shard)
    if dp_shard_size * ranks_per_shard != num_replica_gpus:
        engine_gpus_text = " without those of the engines" if num_engine_gpus else ""
        raise ConfigError(
            f"policy.parallelism.dp_shard_size = -1: {num_replica_gpus} GPUs{engine_gpus_text} are no multiple of the "
            f"{ranks_per_shard} that the other sizes take; the nearest is dp_shard_size = {dp_shard_size}, with "
            f"{dp_shard_size * ranks_per_shard * mesh.n_init_replicas + num_engine_gpus} GPUs"
        )
    return recipe.copy_with(policy=recipe.policy.copy_with(parallelism=mesh.copy_with(dp_shard_size=dp_shard_size)))


def read_text_model_config(model_folder: Path | None) -> dict[str, Any]:
    """Return the settings of the text model in config.json of a model folder; empty if the file is missing or
    invalid."""
    try:
        hf_config = json.loads((model_folder / "config.json").read_text(encoding="utf-8")) if model_folder else {}
    except (OSError, ValueError):  # ignore a damaged config.json, because a later check of the model reports it
        return {}
    text_config = hf_config.get("text_config") if isinstance(hf_config, dict) else None
    text_model_config = text_config if isinstance(text_config, dict) else hf_config
    return text_model_config if isinstance(text_model_config, dict) else {}


def _ranks_per_shard(mesh: ParallelismConfig) -> int:
    """Return the product of all sizes of a mesh except `dp_shard_size`: the number of ranks per unit of
    `dp_shard_size`."""
    return mesh.world_size // abs(mesh.dp_shard_size)


def _check_mesh_sizes(key_prefix: str, mesh: ParallelismConfig, model: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the model cannot be distributed over a mesh: `tp_size` and `cp_size` must divide its
    attention heads, `tp_size` also its feed-forward features, `ep_size` its experts, and each pipeline stage needs a
    layer. Vocabularies of any size can be split."""
    count_keys = (_HEAD_COUNT_KEYS, _LAYER_COUNT_KEYS)
    num_heads, num_layers = (next((model[key] for key in key_group if key in model), None) for key_group in count_keys)
    num_kv_heads = model.get("num_key_value_heads")
    # vLLM replicates key-value heads if their number divides `tp_size`, so do not check that `tp_size` divides it.
    if key_prefix == "rollout.parallelism":
        replicates_kv_heads = isinstance(num_kv_heads, int) and num_kv_heads > 0 and mesh.tp_size % num_kv_heads == 0
        num_kv_heads = None if replicates_kv_heads else num_kv_heads
    named_sizes = (
        ("attention heads", num_heads),
        ("key-value heads", num_kv_heads),
        ("features of the feed-forward part", model.get("intermediate_size")),
    )
    for count_name, count in named_sizes:
        _check_divisibility(f"{key_prefix}.tp_size", mesh.tp_size, count_name, count)
    if isinstance(num_heads, int):
        count_name = f"attention heads of tp_size = {mesh.tp_size}"
        _check_divisibility(f"{key_prefix}.cp_size", mesh.cp_size, count_name, num_heads // mesh.tp_size)
    num_experts = next((model[key] for key in _EXPERT_COUNT_KEYS if isinstance(model.get(key), int)), None)
    if mesh.ep_size > 1 and model and num_experts is None:
        raise ConfigError(f"{key_prefix}.ep_size = {mesh.ep_size}: the model has no experts; set it to 1")
    _check_divisibility(f"{key_prefix}.ep_size", mesh.ep_size, "experts", num_experts)
    if mesh.dp_shard_size > 0:
        num_shard_ranks = mesh.dp_shard_size * mesh.cp_size
        _check_divisibility(f"{key_prefix}.ep_size", mesh.ep_size, "ranks of dp_shard_size x cp_size", num_shard_ranks)
    if isinstance(num_layers, int):
        _check_pipeline_stages(key_prefix, mesh, num_layers)


def _check_pipeline_stages(key_prefix: str, mesh: ParallelismConfig, num_layers: int) -> None:
    """Raise `ConfigError` if a pipeline-parallel stage would get no layer of the model."""
    if mesh.pp_size > num_layers:
        reason = f"the model has {num_layers} layers"
        raise ConfigError(f"{key_prefix}.pp_size = {mesh.pp_size}: {reason}; the nearest is {num_layers}")
    if (num_stages := mesh.num_pipeline_stages(num_layers)) > num_layers:
        larger_layer_counts = range(mesh.pp_layers_per_stage + 1, num_layers + 1)
        meshes = (mesh.copy_with(pp_layers_per_stage=layer_count) for layer_count in larger_layer_counts)
        nearest_size = next(m.pp_layers_per_stage for m in meshes if m.num_pipeline_stages(num_layers) <= num_layers)
        layers_per_stage_text = f"{key_prefix}.pp_layers_per_stage = {mesh.pp_layers_per_stage}"
        problem = f"makes {num_stages} stages of the model's {num_layers} layers"
        raise ConfigError(f"{layers_per_stage_text} {problem}; the nearest is {nearest_size}")


def _check_divisibility(key: str, size: int, count_name: str, count: Any) -> None:
    if isinstance(count, int) and count > 0 and count % size:
        nearest_divisor = max(divisor for divisor in range(1, size + 1) if count % divisor == 0)
        raise ConfigError(f"{key} = {size} does not divide the {count} {count_name}; the nearest is {nearest_divisor}")


def _check_batch_size(recipe: Recipe, num_shards: int) -> None:
    """Raise `ConfigError` if the completions of a train step cannot be distributed to the data-parallel ranks of a
    replica in equal micro-batches."""
    train_config, train_policy = recipe.train, recipe.train.train_policy
    rows_per_pass = 1 if train_policy.mini_batch == "auto" else train_policy.mini_batch
    min_batch_size = num_shards * rows_per_pass
    if not train_policy.has_rollouts or train_config.train_batch_per_replica % min_batch_size == 0:
        return
    nearest_batch_size = max(min_batch_size, train_config.train_batch_per_replica // min_batch_size * min_batch_size)
    shard_size = gcd(train_config.train_batch_per_replica, num_shards)
    raise ConfigError(
        f"train.train_batch_per_replica = {train_config.train_batch_per_replica} must be a multiple of dp_shard_size x "
        f"mini_batch = {num_shards} x {rows_per_pass}; the nearest is {nearest_batch_size}, or dp_shard_size = "
        f"{shard_size} with mini_batch = {gcd(train_config.train_batch_per_replica // shard_size, rows_per_pass)}"
    )


def _too_many_gpus_message(mesh: ParallelismConfig, num_required_gpus: int, num_gpus: int) -> str:
    num_engine_gpus = num_required_gpus - mesh.world_size * mesh.n_init_replicas
    max_shards = (num_gpus - num_engine_gpus) // (_ranks_per_shard(mesh) * mesh.n_init_replicas)
    suggested_setting = f"policy.parallelism.dp_shard_size = {max_shards}"
    if max_shards < 1 and num_engine_gpus:
        suggested_setting = f"mode = 'colocated', without the {num_engine_gpus} GPUs of the engines"
    elif max_shards == 0:
        tp_size = max(size for size in range(1, mesh.tp_size + 1) if mesh.tp_size % size == 0 and size <= num_gpus)
        suggested_setting = f"policy.parallelism.tp_size = {tp_size} with the other sizes 1"
    return f"the mesh takes {num_required_gpus} GPUs, of {num_gpus} that there are; the nearest is {suggested_setting}"


def _choose_default_mode(recipe: Recipe, num_gpus: int | None) -> tuple[Recipe, str]:
    """Return the recipe with a value for `mode`, and a notice for the user. `mode` becomes `disaggregated`, the default
    of Cosmos-RL, without a notice, if that needs at most `num_gpus` GPUs or `num_gpus` is None. Otherwise `mode`
    becomes `colocated`, and `tp_size` of the engines a divisor of the number of ranks."""
    disaggregated_recipe = recipe.copy_with(mode="disaggregated")
    num_required_gpus = disaggregated_recipe.num_gpus(has_rollouts=True)
    if num_gpus is None or num_required_gpus <= num_gpus:
        return disaggregated_recipe, ""
    colocated_recipe, engine_setting = _with_colocated_engine_size(recipe)
    return colocated_recipe.copy_with(mode="colocated"), (
        f"mode is left out, which means 'disaggregated' in a recipe of Cosmos-RL and takes {num_required_gpus} GPUs, "
        f"and there are {num_gpus}: mode = 'colocated'{engine_setting and f' and {engine_setting}'}, so that ranks "
        f"train and generate in turns; set mode to choose"
    )


def _with_colocated_engine_size(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with a `tp_size` of the rollout engines that divides the number of ranks, and the new setting
    as a text for a notice, which is empty if nothing changes."""
    num_ranks, engine_mesh = recipe.policy.parallelism.world_size, recipe.rollout.parallelism
    if num_ranks % engine_mesh.tp_size == 0:
        return recipe, ""
    colocated_engine_mesh = engine_mesh.copy_with(tp_size=gcd(num_ranks, engine_mesh.tp_size))
    rollout_config = recipe.rollout.copy_with(parallelism=colocated_engine_mesh)
    return recipe.copy_with(rollout=rollout_config), f"rollout.parallelism.tp_size = {colocated_engine_mesh.tp_size}"


def _describe_placement(pipeline: Pipeline, stage: StageConfig, *, has_gpu_worker: bool) -> str:
    """Return a text with the GPUs (or processes, on a machine without GPUs) on which a stage trains and generates."""
    recipe, kind = pipeline.recipes[stage.name], pipeline.stage_kind(stage)
    device_name = "GPU" if has_gpu_worker else "process"
    mesh, engine_mesh, num_engines = recipe.policy.parallelism, recipe.rollout.parallelism, recipe.num_engines
    num_ranks = mesh.world_size * mesh.n_init_replicas
    ranks_text = _format_range(device_name, 0, num_ranks)
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
        f"{ranks_text} train, {_format_range(device_name, num_ranks, num_engines * engine_mesh.tp_size)} generate "
        f"({engines_text})"
    )


def _format_range(device_name: str, first_device: int, num_devices: int) -> str:
    if num_devices == 1:
        return f"{device_name} {first_device}"
    return f"{device_name}{'es' if device_name.endswith('s') else 's'} {first_device}-{first_device + num_devices - 1}"


def _describe_engines(num_engines: int, num_ranks: int) -> str:
    return f"{num_engines} engine{'s' if num_engines > 1 else ''}{f' of {num_ranks}' if num_ranks > 1 else ''}"
