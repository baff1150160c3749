"""The deprecated `--wfm-mode` recipes of Cosmos-RL (`[model]`, `[model_parallel]`, ...) in today's keys.

They train the video models of Cosmos-Predict2.5: diffusion SFT, FlowGRPO or DDRL. What such a recipe leaves out has the
defaults of its own schema, not of ours. `wfm.toml` has every key and what becomes of it; here is what is computed from
several keys.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

from cosmos_core.config.compat.wfm_schema import DATA, FIELDS, KEYS, REASONS, TABLES, TYPED, Root
from cosmos_core.config.load import Values, merge, parse, without_none
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import all_fields
from cosmos_core.errors import ConfigError

_TODAY = frozenset({*Recipe.model_fields, "pipeline", "extends"})
_POLICY = "train.train_policy."
_DIFFUSERS = "policy.diffusers."
_VIDEOS = "dataloader_train.video_dataloader."
_REWARDS = "model.rl.reward_config."
_REMOTE = _REWARDS + "remote_reward."
_CALLBACKS = "trainer.callbacks"
_WANDB = ("wandb", "wandb_10x")
_FRAMES = 93  # a constant of that mode: 24 latent frames
_SIZES = {"480": [432, 768], "720": [720, 1280]}  # height, width
_STAND_IN = "nvidia/Cosmos-Predict2.5-2B"


def is_wfm(values: Values) -> bool:
    """Return whether a file has a table of the deprecated schema; scripts of today's have a `[model]` of their own."""
    tables = [root for root in DATA["keys"] if isinstance(values.get(root), dict)]
    if not _TODAY & set(values):
        return bool(tables)
    return "model" in tables and (len(tables) > 1 or any(f"model.{name}" in KEYS for name in values["model"]))


def from_wfm(values: Values, source: str, notices: list[str]) -> Values:
    """Return the recipe in today's keys; what was mapped and what has no counterpart is told in `notices`.

    Raises:
        ConfigError: an unknown key, a wrong value, tables of both schemas, or something that cannot be said today.
    """
    _one_schema(values, source)
    lost: list[tuple[str, str]] = []
    old: Any = parse(Root, _with_counterpart(values, "", source, lost), source=source)
    for problem in _problems(old):
        raise ConfigError(f"{source}: {problem}")
    translation = _Translation(old, source, lost)
    translation.same()
    _model(translation)
    _schedule(translation)
    _data(translation)
    _clips(translation)
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
    """The keys that have a counterpart; those without one go to `lost`, all others are refused."""
    kept: Values = {}
    for name, value in table.items():
        key = prefix + (name if name.isprintable() else repr(name))
        if key in REASONS:
            lost.append((key, REASONS[key]))
        elif key in FIELDS and not (key in TABLES and isinstance(value, dict)):
            kept[name] = value
        elif key in FIELDS:
            kept[name] = _with_counterpart(value, f"{key}.", source, lost)
        elif key in TABLES:
            _drop(value, key, source, lost)
        else:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75)
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


def _problems(old: Any) -> Iterator[str]:
    """What several keys together say that has no counterpart."""
    rl, schedule, checkpoint = old.model.rl, old.scheduler, old.checkpoint
    for name in ("aesthetic", "image_reward", "fake_reward"):
        if getattr(rl.reward_config, name).enabled:
            yield (
                f"{_REWARDS}{name}.enabled = true has no counterpart: images and videos are scored by the reward "
                f"service; leave it out and name a function of the service in remote_reward.reward_fn"
            )
    if not rl.reward_config.remote_reward.enabled:
        yield f"{_REMOTE}enabled = false leaves no reward to learn from; leave it out"
    if max(rl.train_on) >= rl.sample_steps:
        yield (
            f"model.rl.train_on = {list(rl.train_on)} must be below sample_steps = {rl.sample_steps}: steps are "
            f"counted from 0"
        )
    if rl.min_num_conditional_frames > rl.max_num_conditional_frames:
        yield (
            f"model.rl.min_num_conditional_frames = {rl.min_num_conditional_frames} must not be above "
            f"max_num_conditional_frames = {rl.max_num_conditional_frames}"
        )
    for name in ("f_start", "f_min"):
        if getattr(schedule, name)[0] > schedule.f_max[0]:
            yield f"scheduler.{name} = {list(getattr(schedule, name))} must not be above f_max = {list(schedule.f_max)}"
    if checkpoint.load_from_object_store.enabled:
        yield (
            "checkpoint.load_from_object_store.enabled = true has no counterpart: models come from a folder or the "
            "Hub; leave it out and name one in load_path"
        )
    if checkpoint.save_to_object_store.enabled and not checkpoint.save_to_object_store.bucket:
        yield "checkpoint.save_to_object_store.enabled = true needs a bucket; name it or leave it out"


class _Translation:
    """Today's values as they come about, and what is to be told about them."""

    def __init__(self, old: Any, source: str, lost: list[tuple[str, str]]) -> None:
        self.old, self.source, self.lost = old, source, lost
        self.values: Values = {}
        self._mapped: list[str] = []
        self._filled: list[str] = []

    def callback(self, name: str) -> Any:
        """Return the callback of that name; None: there is none."""
        return next((callback for callback in self.old.trainer.callbacks if callback.name == name), None)

    def said(self, key: str) -> bool:
        """Return whether the file has a key, rather than its default; callbacks are named only where they are."""
        table: Any = self.old
        if key.startswith(_CALLBACKS):
            return True
        for name in key.split("."):
            if name not in table.model_fields_set:
                return False
            table = getattr(table, name)
        return True

    def same(self) -> None:
        """Write every key whose value is that of a key of today; None and the empty string were left out."""
        is_rl = self.old.model.rl.enabled
        for old, field in TYPED.items():
            to = field.get("to", ())
            value = reduce(getattr, old.split("."), self.old)
            if value is not None and value != "" and (is_rl or not old.startswith("model.rl.")):
                for new in [to] if isinstance(to, str) else to:
                    self._write(new, value, [old] if self.said(old) else [], "")
        for new, value in {**DATA["always"], **(DATA["always_in_rl"] if is_rl else {})}.items():
            self.put(new, value)

    def put(self, new: str, value: Any, *olds: str) -> None:
        """Write what was computed from old keys; from none: what the deprecated mode always does."""
        self._write(new, value, [old for old in olds if self.said(old)], f" = {_shown(value)}")

    def lose(self, reason: str, *keys: str) -> None:
        """Say why keys of the file have no counterpart."""
        self.lost += [(key, reason) for key in keys if self.said(key)]

    def told(self) -> list[str]:
        """Return one line each: what was mapped, what was left out, what has no counterpart."""
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


def _loader(t: _Translation, split: str) -> tuple[Any, str]:
    """The loader that `type` chooses, and the prefix of its keys."""
    data = getattr(t.old, split)
    if data.type == "web":
        return data.video_dataloader.dataloader, f"{split}.video_dataloader.dataloader."
    return data.video_dataloader, f"{split}.video_dataloader."


def _data(t: _Translation) -> None:
    loader, prefix = _loader(t, "dataloader_train")
    factors = [f"{prefix}batch_size", "trainer.grad_accum_iter"]
    t.put(_POLICY + "mini_batch", loader.batch_size, factors[0])
    t.put(_POLICY + "dataloader_num_workers", loader.num_workers, f"{prefix}num_workers")
    rows = loader.batch_size * t.old.trainer.grad_accum_iter
    if t.old.model.rl.enabled:  # completions of all ranks, while SFT counts the rows of one
        rows *= t.old.model.fsdp_shard_size * t.old.model.dp_replicate_size
        factors += ["model.fsdp_shard_size", "model.dp_replicate_size"]
    t.put("train.train_batch_per_replica", rows, *factors)
    held_out, prefix = _loader(t, "dataloader_val")
    t.put("validation.batch_size", held_out.batch_size, f"{prefix}batch_size")
    t.lose("it says where the loader's keys are", "dataloader_train.type", "dataloader_val.type")


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
    checkpoint, store = t.old.checkpoint, "checkpoint.save_to_object_store."
    t.put("train.ckpt.enable_checkpoint", True, "checkpoint.save_iter")
    mode = "async" if checkpoint.dcp_async_mode_enabled else "sync"
    t.put("train.ckpt.save_mode", mode, "checkpoint.dcp_async_mode_enabled")
    if checkpoint.save_to_object_store.enabled:
        t.put("train.ckpt.upload_s3", "all", store + "enabled")
        t.put("train.ckpt.s3_bucket", checkpoint.save_to_object_store.bucket, store + "bucket")
    else:
        t.lose("it is off", store + "enabled", store + "bucket")
    t.lose("it is off", "checkpoint.load_from_object_store.enabled")
    wandb = [f"{_CALLBACKS}.{name}" for name in _WANDB if t.callback(name)]
    logger = ["console", "wandb"] if wandb and t.old.job.wandb_mode != "disabled" else ["console"]
    t.put("logging.logger", logger, *wandb, "job.wandb_mode")
    if t.old.job.wandb_mode == "offline":
        t.lose("set WANDB_MODE in the environment", "job.wandb_mode")


def _callbacks(t: _Translation) -> None:
    clip, samples = t.callback("grad_clip"), t.callback("every_n_sample_reg")
    if clip:
        t.put("train.optm_grad_norm_clip", clip.args.clip_norm, f"{_CALLBACKS}.grad_clip.clip_norm")
        t.lose("the trainer decides it", *_given(clip, "clip_norm"))
        scale = t.old.model.loss_scale
        t.lost.append((f"model.loss_scale = {scale}", f"gradients that are clipped are {scale} times as small here"))
    else:
        t.lose("Adam divides it out", "model.loss_scale")
        t.put("train.optm_grad_norm_clip", 0.0)
    if samples:
        mapped = {
            "every_n": "logging.multi_modal_log_interval",
            "num_sampling_step": f"{_DIFFUSERS}sample.eval_num_steps",
        }
        for name, new in mapped.items():
            if value := getattr(samples.args, name):
                t.put(new, value, f"{_CALLBACKS}.{samples.name}.{name}")
        t.lose("samples are drawn as in validation", *_given(samples, *mapped))
    others = [callback.name for callback in t.old.trainer.callbacks]
    used = {"grad_clip", "every_n_sample_reg", *_WANDB}
    t.lose("the trainer does or records it", *(f"{_CALLBACKS}.{name}" for name in others if name not in used))


def _given(callback: Any, *mapped: str) -> list[str]:
    """The arguments of a callback that the file has, without those that are mapped."""
    names = [name for name in type(callback.args).model_fields if name in callback.args.model_fields_set]
    return [f"{_CALLBACKS}.{callback.name}.{name}" for name in names if name not in mapped]


def _flow_rl(t: _Translation) -> None:
    rl, remote = t.old.model.rl, t.old.model.rl.reward_config.remote_reward
    t.put(_POLICY + "type", "grpo", "model.rl.enabled")
    t.put(_POLICY + "trainer_type", "ddrl" if rl.data_beta else "flow_grpo", "model.rl.data_beta")
    # x + g (x - unconditional) there, unconditional + s (x - unconditional) here
    t.put(_DIFFUSERS + "sample.guidance_scale", rl.guidance + 1, "model.rl.guidance")
    if rl.update_ref_every_iter:
        t.put(_POLICY + "reference_reset_interval", rl.update_ref_every_iter, "model.rl.update_ref_every_iter")
        t.put(_POLICY + "reset_optimizer_with_reference", False)
    else:
        t.lose("the reference is never reset", "model.rl.update_ref_every_iter")
    if not rl.on_policy:
        t.lose("rollouts are of the policy, never of the reference", "model.rl.on_policy")
    asked = {"name": remote.reward_fn, "score_key": remote.score_key,
             "clip_min": remote.reward_clip_min, "clip_max": remote.reward_clip_max}  # fmt: skip
    t.put(_POLICY + "remote_reward.reward_fns", [asked], _REMOTE + "reward_fn", _REMOTE + "score_key")
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
