"""The deprecated `--wfm-mode` recipes of Cosmos-RL (`[model]`, `[model_parallel]`, ...) in today's keys.

They train the video models of Cosmos-Predict2.5: diffusion SFT, FlowGRPO or DDRL. What such a recipe leaves out has the
defaults of its own schema, not of ours.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import reduce
from typing import Any

from cosmos_core.config.load import Values, merge, parse, without_none
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import all_fields
from cosmos_core.config.schema.wfm import WITHOUT_COUNTERPART, WfmConfig
from cosmos_core.errors import ConfigError

_POLICY = "train.train_policy."
_DIFFUSERS = "policy.diffusers."
_MESH = "policy.parallelism."
_VIDEOS = "dataloader_train.video_dataloader."
_HELD_OUT = "dataloader_val.video_dataloader."
_REWARD = "model.rl.reward_config.remote_reward."

_RENAMED = {
    "model.fsdp_shard_size": _MESH + "dp_shard_size",
    "model.dp_replicate_size": _MESH + "dp_replicate_size",
    "model_parallel.tensor_model_parallel_size": _MESH + "tp_size",
    "model_parallel.context_parallel_size": _MESH + "cp_size",
    "model_parallel.expert_model_parallel_size": _MESH + "ep_size",
    "model_parallel.pipeline_model_parallel_size": _MESH + "pp_size",
    "model.precision": "train.param_dtype",
    "model.use_torch_compile": "train.compile",
    "model.ema.enabled": "train.ema_enable",
    "model.sde.p_mean": _DIFFUSERS + "logit_mean",
    "model.sde.p_std": _DIFFUSERS + "logit_std",
    **{f"model.tokenizer.{name}": f"{_DIFFUSERS}tokenizer.{name}" for name in (
        "chunk_duration", "load_mean_std", "compile_encode", "temporal_window")},
    "optimizer.weight_decay": "train.optm_weight_decay",
    "optimizer.betas": "train.optm_betas",
    "optimizer.eps": "train.epsilon",
    "trainer.max_iter": "train.max_num_steps",
    "trainer.seed": "train.seed",
    "trainer.cudnn.deterministic": "train.deterministic",
    "trainer.logging_iter": "logging.log_interval",
    "trainer.run_validation": "validation.enable",
    "trainer.validation_iter": "validation.freq",
    "checkpoint.save_iter": "train.ckpt.save_freq",
    _VIDEOS + "dataset_dir": _POLICY + "dataset.local_dir",
    _HELD_OUT + "dataset_dir": "validation.dataset.local_dir",
    "job.project": "logging.project_name",
    "job.group": "logging.group_name",
    "job.name": "logging.experiment_name",
    "job.timestamp": "train.timestamp",
}  # fmt: skip

_RENAMED_IN_RL = {
    "model.rl.num_rollout": "rollout.n_generation",
    "model.rl.sample_steps": _DIFFUSERS + "sample.num_steps",
    "model.rl.on_policy": _POLICY + "on_policy",
    "model.rl.kl_beta": _POLICY + "kl_beta",
    "model.rl.min_num_conditional_frames": _DIFFUSERS + "flow_rl.min_conditional_frames",
    "model.rl.max_num_conditional_frames": _DIFFUSERS + "flow_rl.max_conditional_frames",
    **{f"model.rl.{name}": f"{_DIFFUSERS}flow_rl.{name}" for name in (
        "train_on", "solver_option", "s_churn", "use_same_seed", "exp_reward", "data_beta", "data_on_first_only",
        "use_rl_sigma_and_noise")},
    "model.rl.reward_config.adv_clip_min": _POLICY + "advantage_low",
    "model.rl.reward_config.adv_clip_max": _POLICY + "advantage_high",
    _REWARD + "scale": _POLICY + "remote_reward.scale",
    _REWARD + "reward_clip_min": _POLICY + "remote_reward.reward_clip_min",
    _REWARD + "reward_clip_max": _POLICY + "remote_reward.reward_clip_max",
}  # fmt: skip

_ROOTS = frozenset(WfmConfig.model_fields)
_TODAY = frozenset({*Recipe.model_fields, "pipeline", "extends"})
_TYPED = {key for key, _, _ in all_fields(WfmConfig)}
_REASONS = {
    f"{table}.{name}".lstrip("."): reason
    for reason, tables in WITHOUT_COUNTERPART.items()
    for table, names in tables.items()
    for name in names.split()
}
_KEYS = _TYPED | set(_REASONS)
_TABLES = {key[: dot.start()] for key in _KEYS for dot in re.finditer(r"\.", key)}
_CALLBACKS = "trainer.callbacks"
_WANDB = ("wandb", "wandb_10x")
_PROMPT_TOKENS, _FRAMES = 512, 93  # constants of that mode: the padded prompt, 24 latent frames
_SIZES = {"480": [432, 768], "720": [720, 1280]}  # height, width
_STAND_IN = "nvidia/Cosmos-Predict2.5-2B"


def is_wfm(values: Values) -> bool:
    """Whether a file has a table of the deprecated schema; scripts of today's have a `[model]` of their own."""
    tables = [root for root in _ROOTS if isinstance(values.get(root), dict)]
    if not _TODAY & set(values):
        return bool(tables)
    return "model" in tables and (len(tables) > 1 or any(f"model.{name}" in _KEYS for name in values["model"]))


def from_wfm(values: Values, source: str, notices: list[str]) -> Values:
    """The recipe in today's keys; what was mapped and what has no counterpart is told in `notices`.

    Raises:
        ConfigError: an unknown key, a wrong value, tables of both schemas, or something that cannot be said today.
    """
    _one_schema(values, source)
    lost: list[tuple[str, str]] = []
    old = parse(WfmConfig, _with_counterpart(values, "", source, lost), source=source)
    translation = _Translation(old, source, lost)
    translation.rename(_RENAMED)
    _model(translation)
    _schedule(translation)
    _data(translation)
    _output(translation)
    _callbacks(translation)
    if old.model.rl.enabled:
        _flow_rl(translation)
    else:
        _sft(translation)
    notices += translation.told()
    return translation.values


def _one_schema(values: Values, source: str) -> None:
    today = [root for root in values if root in _TODAY]
    if today:
        raise ConfigError(
            f"{source}: [model] is of the deprecated --wfm-mode schema and {today[0]} of today's: a file has one of "
            f"them; print the deprecated tables in today's keys with `cosmos config convert`"
        )
    if "model" not in values:
        raise ConfigError(
            f"{source}: [{next(iter(values))}] is of the deprecated --wfm-mode schema, whose recipes have [model]; "
            f"write today's keys"
        )


def _with_counterpart(table: Values, prefix: str, source: str, lost: list[tuple[str, str]]) -> Values:
    """The keys that `WfmConfig` has; those without a counterpart go to `lost`, all others are refused."""
    kept: Values = {}
    for name, value in table.items():
        key = prefix + (name if name.isprintable() else repr(name))
        if key in _REASONS:
            lost.append((key, _REASONS[key]))
        elif key in _TYPED and not (key in _TABLES and isinstance(value, dict)):
            kept[name] = value
        elif key in _TYPED:
            kept[name] = _with_counterpart(value, f"{key}.", source, lost)
        elif key in _TABLES:
            _drop(value, key, source, lost)
        else:
            near = difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.75)
            raise ConfigError(f"{source}: {key}: unknown key{f'; did you mean {near[0]}?' if near else ''}")
    return kept


def _drop(value: Any, key: str, source: str, lost: list[tuple[str, str]]) -> None:
    """A table, or a list of them, none of whose keys has a counterpart: told as one, once its keys are known."""
    tables = value if isinstance(value, list) else [value]
    if not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: {key}: must be a table")
    inner: list[tuple[str, str]] = []
    for table in tables:
        _with_counterpart(table, f"{key}.", source, inner)
    lost += [(key, reason) for _, reason in inner[:1]]


class _Translation:
    """Today's values as they come about, and what is to be told about them."""

    def __init__(self, old: WfmConfig, source: str, lost: list[tuple[str, str]]) -> None:
        self.old, self.source, self.lost = old, source, lost
        self.values: Values = {}
        self._mapped: list[str] = []
        self._filled: list[str] = []

    def said(self, key: str) -> bool:
        """Whether the file has a key, rather than its default; callbacks are named only where they are."""
        table: Any = self.old
        if key.startswith(_CALLBACKS):
            return True
        for name in key.split("."):
            if name not in table.model_fields_set:
                return False
            table = getattr(table, name)
        return True

    def put(self, new: str, value: Any, *olds: str) -> None:
        """Write what was computed from old keys; from none: what the deprecated mode always does."""
        self._write(new, value, [old for old in olds if self.said(old)], f" = {_shown(value)}")

    def rename(self, names: dict[str, str]) -> None:
        """Write old keys under today's names; None and the empty string are keys that were left out."""
        for old, new in names.items():
            value = reduce(getattr, old.split("."), self.old)
            if value is not None and value != "":
                self._write(new, value, [old] if self.said(old) else [], "")

    def lose(self, reason: str, *keys: str) -> None:
        """Say why keys of the file have no counterpart."""
        self.lost += [(key, reason) for key in keys if self.said(key)]

    def told(self) -> list[str]:
        """One line each: what was mapped, what was left out, what has no counterpart."""
        lines = [f"the deprecated --wfm-mode schema in today's keys: {', '.join(self._mapped)}"] if self._mapped else []
        lines.append(f"left out, so as in the deprecated schema: {', '.join(self._filled)}")
        reasons: dict[str, list[str]] = {}
        for key, reason in self.lost:
            reasons.setdefault(reason, []).append(key)
        without = [f"{', '.join(_gathered(keys))} ({reason})" for reason, keys in reasons.items()]
        return [*lines, f"without counterpart: {'; '.join(without)}"] if without else lines

    def _write(self, new: str, value: Any, said: list[str], shown: str) -> None:
        if said:
            self._mapped.append(f"{' + '.join(said)} -> {new}{shown}")
        elif value != _default(new):
            self._filled.append(f"{new} = {_shown(value)}")
        table = without_none(value)
        for name in reversed(new.split(".")):
            table = {name: table}
        self.values = merge(self.values, table)


def _model(t: _Translation) -> None:
    t.put("policy.is_diffusers", True)
    t.put(_DIFFUSERS + "is_video", True)
    t.put(_DIFFUSERS + "max_prompt_length", _PROMPT_TOKENS)
    checkpoint = t.old.checkpoint
    t.put("policy.model_name_or_path", checkpoint.load_path or _STAND_IN, "checkpoint.load_path")
    if not checkpoint.load_path:
        t.lost.append(("checkpoint.load_path", "left out, which meant random weights: name a model"))
    variant = re.fullmatch(r"(base/(?:pre|post)-trained)/[^/]+\.pt", checkpoint.model_id or "")
    if variant:  # the same weights in the format of diffusers are a branch of the same repository
        t.put("policy.model_revision", f"diffusers/{variant[1]}", "checkpoint.model_id")
    else:
        t.lose("name the revision with files of diffusers in policy.model_revision", "checkpoint.model_id")


def _schedule(t: _Translation) -> None:
    schedule, max_iter = t.old.scheduler, t.old.trainer.max_iter
    start, peak, end = schedule.f_start[0], schedule.f_max[0], schedule.f_min[0]
    t.put("train.epoch", max_iter, "trainer.max_iter")  # the data is gone through as often as it takes
    t.put("train.optm_name", "AdamW", "optimizer.optim_type")
    t.put("train.optm_lr", t.old.optimizer.lr * peak, "optimizer.lr", "scheduler.f_max")
    t.put("train.optm_warmup_steps", schedule.warm_up_steps[0], "scheduler.warm_up_steps")
    t.put("train.optm_warmup_start_factor", start / peak, "scheduler.f_start")
    if end == peak:
        t.lose("the rate stays at its peak", "scheduler.f_min", "scheduler.cycle_lengths", "scheduler.scheduler_type")
        return
    cycle = schedule.cycle_lengths[0]
    if cycle < max_iter:
        raise ConfigError(
            f"{t.source}: scheduler.cycle_lengths = [{cycle}] ends before trainer.max_iter = {max_iter}, and there is "
            f"no rate behind it; make it at least {max_iter}"
        )
    done = max_iter / cycle  # a longer cycle is left half-way
    t.put("train.optm_decay_type", "linear", "scheduler.scheduler_type")
    t.put("train.optm_min_lr_factor", end / peak * done + (1 - done), "scheduler.f_min", "scheduler.cycle_lengths")


def _data(t: _Translation) -> None:
    train, held_out = t.old.dataloader_train, t.old.dataloader_val
    loader, prefix = train.chosen()
    batch_size, factors = loader.batch_size, [f"dataloader_train.{prefix}batch_size"]
    t.put(_POLICY + "mini_batch", batch_size, *factors)
    t.put(_POLICY + "dataloader_num_workers", loader.num_workers, f"dataloader_train.{prefix}num_workers")
    rows = batch_size * t.old.trainer.grad_accum_iter
    factors.append("trainer.grad_accum_iter")
    if t.old.model.rl.enabled:  # completions of all ranks, while SFT counts the rows of one
        rows *= t.old.model.fsdp_shard_size * t.old.model.dp_replicate_size
        factors += ["model.fsdp_shard_size", "model.dp_replicate_size"]
    t.put("train.train_batch_per_replica", rows, *factors)
    measured, measured_prefix = held_out.chosen()
    t.put("validation.batch_size", measured.batch_size, f"dataloader_val.{measured_prefix}batch_size")
    t.lose("it says where the loader's keys are", "dataloader_train.type", "dataloader_val.type")
    _clips(t)


def _clips(t: _Translation) -> None:
    """Frames and size, which rollouts share with the data."""
    videos = t.old.dataloader_train.video_dataloader
    frames = videos.num_frames or videos.dataloader.dataset.num_video_frames or _FRAMES
    for new in ("train_frames", "inference_frames"):
        t.put(_DIFFUSERS + new, frames, _VIDEOS + "num_frames", _VIDEOS + "dataloader.dataset.num_video_frames")
    if videos.video_size:
        t.put(_DIFFUSERS + "inference_size", list(reversed(videos.video_size)), _VIDEOS + "video_size")
        t.lose("video_size says it", "model.resolution")
    elif t.old.model.resolution in _SIZES:
        t.put(_DIFFUSERS + "inference_size", _SIZES[t.old.model.resolution], "model.resolution")
    else:
        raise ConfigError(
            f"{t.source}: model.resolution = {t.old.model.resolution!r}: must be {' or '.join(map(repr, _SIZES))}, or "
            f"give {_VIDEOS}video_size = [WIDTH, HEIGHT]"
        )


def _output(t: _Translation) -> None:
    trainer, checkpoint = t.old.trainer, t.old.checkpoint
    t.put("validation.val_before_train", trainer.run_validation, "trainer.run_validation")
    t.put("train.ckpt.enable_checkpoint", True, "checkpoint.save_iter")
    mode = "async" if checkpoint.dcp_async_mode_enabled else "sync"
    t.put("train.ckpt.save_mode", mode, "checkpoint.dcp_async_mode_enabled")
    store = "checkpoint.save_to_object_store."
    if checkpoint.save_to_object_store.enabled:
        t.put("train.ckpt.upload_s3", "all", store + "enabled")
        t.put("train.ckpt.s3_bucket", checkpoint.save_to_object_store.bucket, store + "bucket")
    else:
        t.lose("it is off", store + "enabled", store + "bucket")
    t.lose("it is off", "checkpoint.load_from_object_store.enabled")
    wandb = [f"{_CALLBACKS}.{name}" for name in _WANDB if trainer.callback(name)]
    logger = ["console", "wandb"] if wandb and t.old.job.wandb_mode != "disabled" else ["console"]
    t.put("logging.logger", logger, *wandb, "job.wandb_mode")
    if t.old.job.wandb_mode == "offline":
        t.lose("set WANDB_MODE in the environment", "job.wandb_mode")


def _callbacks(t: _Translation) -> None:
    clip, samples = t.old.trainer.callback("grad_clip"), t.old.trainer.callback("every_n_sample_reg")
    if clip:
        t.put("train.optm_grad_norm_clip", clip.args.clip_norm, f"{_CALLBACKS}.grad_clip.clip_norm")
        t.lose("the trainer decides it", *_arguments("grad_clip", clip.args.model_fields_set - {"clip_norm"}))
        scale = t.old.model.loss_scale
        t.lost.append((f"model.loss_scale = {scale}", f"gradients that are clipped are {scale} times as small here"))
    else:
        t.lose("Adam divides it out", "model.loss_scale")
        t.put("train.optm_grad_norm_clip", 0.0)
    if samples:
        every_n, steps = _arguments("every_n_sample_reg", type(samples.args).model_fields)
        if samples.args.every_n:
            t.put("logging.multi_modal_log_interval", samples.args.every_n, every_n)
        if samples.args.num_sampling_step:
            t.put(_DIFFUSERS + "sample.eval_num_steps", samples.args.num_sampling_step, steps)
        t.lose("samples are drawn as in validation", *_arguments("every_n_sample_reg", samples.args.model_extra))
    others = [callback.name for callback in t.old.trainer.callbacks]
    mapped = {"grad_clip", "every_n_sample_reg", *_WANDB}
    t.lose("the trainer does or records it", *(f"{_CALLBACKS}.{name}" for name in others if name not in mapped))


def _arguments(callback: str, names: Iterable[str]) -> list[str]:
    return [f"{_CALLBACKS}.{callback}.{name}" for name in names]


def _flow_rl(t: _Translation) -> None:
    rl, remote = t.old.model.rl, t.old.model.rl.reward_config.remote_reward
    t.put("mode", "colocated")
    t.put("rollout.backend", "flow_sampler")
    t.put(_POLICY + "type", "grpo", "model.rl.enabled")
    t.put(_POLICY + "trainer_type", "ddrl" if rl.data_beta else "flow_grpo", "model.rl.data_beta")
    t.rename(_RENAMED_IN_RL)
    t.put(_POLICY + "epsilon_low", rl.clip_ratio, "model.rl.clip_ratio")
    t.put(_POLICY + "epsilon_high", rl.clip_ratio, "model.rl.clip_ratio")
    # x + g (x - unconditional) there, unconditional + s (x - unconditional) here
    t.put(_DIFFUSERS + "sample.guidance_scale", rl.guidance + 1, "model.rl.guidance")
    if rl.update_ref_every_iter:
        t.put(_POLICY + "reference_reset_interval", rl.update_ref_every_iter, "model.rl.update_ref_every_iter")
        t.put(_POLICY + "reset_optimizer_with_reference", False)
    else:
        t.lose("the reference is never reset", "model.rl.update_ref_every_iter")
    if not rl.on_policy:
        t.lose("rollouts are of the policy, never of the reference", "model.rl.on_policy")
    t.put(_POLICY + "use_remote_reward", True, _REWARD + "enabled")
    asked = {"name": remote.reward_fn, "score_key": remote.score_key,
             "clip_min": remote.reward_clip_min, "clip_max": remote.reward_clip_max}  # fmt: skip
    t.put(_POLICY + "remote_reward.reward_fns", [asked], _REWARD + "reward_fn", _REWARD + "score_key")
    t.lose("groups are always complete", _VIDEOS + "drop_last")


def _sft(t: _Translation) -> None:
    t.put(_POLICY + "type", "sft", "model.rl.enabled")
    t.put(_POLICY + "dataloader_drop_last", t.old.dataloader_train.video_dataloader.drop_last, _VIDEOS + "drop_last")
    names = type(t.old.model.rl).model_fields.keys() - {"enabled"}
    t.lose("reinforcement learning is off", *(f"model.rl.{name}" for name in sorted(names)))


def _default(key: str) -> Any:
    found = [field for name, _, field in all_fields(Recipe) if name == key]
    return found[-1].get_default(call_default_factory=True) if found else None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(without_none(value))


def _gathered(keys: Iterable[str]) -> list[str]:
    """Keys of one table in one word: `table.{key, key}`."""
    tables: dict[str, list[str]] = {}
    for key in keys:
        table, dot, name = key.rpartition(".")
        tables.setdefault(table + dot, []).append(name)
    return [table + (names[0] if len(names) == 1 else f"{{{', '.join(names)}}}") for table, names in tables.items()]
