"""Recipes of every generation in today's names: moved keys, keys that never did anything, the deprecated schema."""

from __future__ import annotations

from typing import Any

from cosmos_core.config.load import Values, short
from cosmos_core.config.wfm import from_wfm, is_wfm
from cosmos_core.errors import ConfigError

_POLICY = "train.train_policy."

MOVED = {
    "train.enable_validation": "validation.enable",
    "train.validation_step": "validation.freq",
    "train.validation_freq": "validation.freq",
    "train.validation_batch_per_replica": "validation.batch_size",
    "rollout.val_batch_size": "validation.batch_size",
    "validation.dataset.test_split": "validation.dataset.split",
    "policy.model_gradient_checkpointig": "policy.model_gradient_checkpointing",
    "policy.diffusers_config": "policy.diffusers",
    "policy.diffusers.timestep_fraction": "policy.diffusers.timesteps_fraction",
    "policy.diffusers.main_dtype": "policy.diffusers.dtype",
    "policy.lora.lora_name": "policy.lora.lora_names",
    "custom.dpo_beta": _POLICY + "dpo.beta",
    "custom.dpo_loss_type": _POLICY + "dpo.loss_type",
    "custom.dpo_loss_weights": _POLICY + "dpo.loss_weights",
    "vla.num_parallel_envs": "vla.num_envs",
    "vla.traj_chunk_size": "vla.training_chunk_size",
    "vla.max_episode_length": "vla.max_steps",
    _POLICY + "enable_validation": "validation.enable",
    _POLICY + "validation_freq": "validation.freq",
    _POLICY + "validation_batch_per_replica": "validation.batch_size",
    _POLICY + "dataset_name": _POLICY + "dataset.name",
    _POLICY + "dataset_subset": _POLICY + "dataset.subset",
    _POLICY + "dataset_train_split": _POLICY + "dataset.split",
    _POLICY + "dataset_test_size": _POLICY + "dataset.test_size",
    _POLICY + "dataset.train_split": _POLICY + "dataset.split",
    _POLICY + "dataset.repo_id": _POLICY + "dataset.name",
    _POLICY + "dataset.root": _POLICY + "dataset.local_dir",
    _POLICY + "grpo.kl_beta": _POLICY + "kl_beta",
    _POLICY + "grpo.advantage_low": _POLICY + "advantage_low",
    _POLICY + "grpo.advantage_high": _POLICY + "advantage_high",
}
"""Key of an older generation to today's."""

_HELD_OUT = "the split to validate on: set validation.dataset.name and validation.dataset.split"
_OF_A_TRAINER = "what another trainer calls it"
_OF_A_SCRIPT = "what an example's own script reads: put it into [custom]"
_OF_A_ROBOT = "an option of a simulator or of a model of actions"
DEAD = {
    "policy.parallelism.cp_rotate_method": "how context-parallel ranks passed keys and values on, before Ulysses",
    "rollout.parallelism.cp_rotate_method": "how context-parallel ranks passed keys and values on, before Ulysses",
    "policy.diffusers.training_dtype": "the dtype of compute, which is train.param_dtype",
    "policy.diffusers.use_pipeline": "sampling by the pipeline of diffusers",
    "policy.diffusers.onload_multistream": "loading modules back on several streams",
    "distillation.model_max_length": "the longest sequence of the teacher, which is policy.model_max_length",
    "rollout.completion_admission": "whether completions are taken as they come, in order of admission",
    "model": _OF_A_SCRIPT,
    "env": _OF_A_SCRIPT,
    _POLICY + "grpo": "the settings of GRPO, which are those of train.train_policy itself",
    _POLICY + "no_outdated_rollout": "no rollout of older weights: set allowed_outdated_steps = 0",
    _POLICY + "clip_ratio_c": "the constant of the dual clip: set lower_bound_ratio",
    _POLICY + "dataset.test_split": _HELD_OUT,
    _POLICY + "dataset_test_split": _HELD_OUT,
    _POLICY + "vision_asset_column_name": "the column of images or videos, which are found in the conversation",
    _POLICY + "fps": "frames per second of videos: set custom.vision.fps",
    _POLICY + "max_pixels": "the largest image: set custom.vision.max_pixels",
    "logging.enable_logging": "logging to Weights & Biases: set logging.logger",
    "train.scheduler": "the curve of the learning rate: set train.optm_decay_type",
    "train.moe_backend": "the kernels of expert layers, which transformers chooses",
    "train.quantization": "an early form of [train.fp8]",
    "train.fp8.fqn_filter": "the modules that stay out of fp8",
    "train.eval_policy": f"{_OF_A_TRAINER}: set validation.dataset.name",
    "train.eval_steps": f"{_OF_A_TRAINER}: set validation.freq",
    "train.evaluation_strategy": f"{_OF_A_TRAINER}: set validation.enable",
    "train.save_strategy": f"{_OF_A_TRAINER}: set train.ckpt.enable_checkpoint",
    "train.load_best_model_at_end": f"{_OF_A_TRAINER}: add a stage of kind gate",
    "train.metric_for_best_model": f"{_OF_A_TRAINER}: add a stage of kind gate",
} | {
    f"{table}.{key}": _OF_A_ROBOT
    for table, keys in {
        "vla": (
            "filter_lower_bound", "filter_upper_bound", "task_suite", "action_dim", "image_size", "use_multi_view",
            "use_wrist_camera", "action_normalization", "reward_type", "center_crop", "env_config",
        ),
        _POLICY + "dataset": (
            "tasks", "model_type", "prompt_from_task", "skip_norm_stats", "norm_stats", "modalities",
            "model_name_or_path",
        ),
    }.items()
    for key in keys
}  # fmt: skip
"""Keys of public recipes that are read no more, or never were, to what they would have meant."""

_DEAD_TABLES = {"model", "env"}
_DEAD_IN_GRPO = {"conversation_column_name": "the column of the conversation: set prompt_column_name"}


def modern(values: Values, source: str, notices: list[str]) -> Values:
    """The same recipe in today's keys; what was changed is told in `notices`.

    Raises:
        ConfigError: an old and a new key for the same thing disagree.
    """
    values = _copy(values)
    if is_wfm(values):
        values = from_wfm(values, source, notices)
    for old, new in MOVED.items():
        found, value = _take(values, old)
        if not found:
            continue
        there = _get(values, new)
        if there is not None and there != value:
            raise ConfigError(
                f"{source}: {old} = {short(value)} is today's {new}, which says {short(there)}; keep one of them"
            )
        _put(values, new, value)
        notices.append(f"{old} is today's {new}")
    _remote_reward(values, notices)
    dead = dict(DEAD)
    if _get(values, _POLICY + "type") == "grpo":
        dead |= {_POLICY + name: meaning for name, meaning in _DEAD_IN_GRPO.items()}
    for key, meaning in dead.items():
        if key in _DEAD_TABLES and not isinstance(values.get(key), dict):
            continue
        found, value = _take(values, key)
        if found:
            notices.append(f"{key} = {short(value)} is ignored; it would have meant {meaning}")
    return values


def _remote_reward(values: Values, notices: list[str]) -> None:
    """`remote_reward.reward_fn = {name = weight}` with one `score_key`, before there were `reward_fns`."""
    table = _POLICY + "remote_reward."
    weights = _get(values, table + "reward_fn")
    if not isinstance(weights, dict):
        return  # the schema complains about anything else
    _take(values, table + "reward_fn")
    keyed, score_key = _take(values, table + "score_key")
    functions = [{"name": name, "weight": weight} for name, weight in weights.items()]
    _put(values, table + "reward_fns", [f | {"score_key": score_key} for f in functions] if keyed else functions)
    notices.append(f"{table}reward_fn is today's {table}reward_fns")


def today(key: str) -> str:
    """Today's name of a dotted key, also of one behind the name of a stage."""
    for old, new in MOVED.items():
        if key == old or key.endswith(f".{old}"):
            return key.removesuffix(old) + new
    return key


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _parent(values: Values, key: str) -> Any:
    table: Any = values
    for part in key.split(".")[:-1]:
        table = table.get(part) if isinstance(table, dict) else None
    return table


def _get(values: Values, key: str) -> Any:
    table = _parent(values, key)
    return table.get(key.rpartition(".")[2]) if isinstance(table, dict) else None


def _take(values: Values, key: str) -> tuple[bool, Any]:
    table, name = _parent(values, key), key.rpartition(".")[2]
    if not isinstance(table, dict) or name not in table:
        return False, None
    return True, table.pop(name)


def _put(values: Values, key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for part in parents:
        table = values.setdefault(part, {})
        if not isinstance(table, dict):
            return  # the schema complains about it
        values = table
    values[name] = value
