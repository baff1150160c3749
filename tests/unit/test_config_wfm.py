"""Deprecated `--wfm-mode` recipes in today's keys: every mapped key, what is told, what is refused."""

from __future__ import annotations

import math
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.compat.translate import with_current_keys
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.load import TomlTable, merge_tables, parse_table
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from tasks.kinds import all_kinds
from tools import convert_wfm
from tools.convert_wfm import from_wfm

VIDEOS = "dataloader_train.video_dataloader."
HELD_OUT = "dataloader_val.video_dataloader."
REWARD = "model.rl.reward_config."
FLOW = "policy.diffusers.flow_rl."
POLICY = "train.train_policy."

# Old key, its value, today's key, its value. No value is a default of either schema.
EVERY = [
    ("model.fsdp_shard_size", 4, "policy.parallelism.dp_shard_size", 4),
    ("model.dp_replicate_size", 2, "policy.parallelism.dp_replicate_size", 2),
    ("model_parallel.tensor_model_parallel_size", 2, "policy.parallelism.tp_size", 2),
    ("model_parallel.context_parallel_size", 3, "policy.parallelism.cp_size", 3),
    ("model_parallel.expert_model_parallel_size", 5, "policy.parallelism.ep_size", 5),
    ("model_parallel.pipeline_model_parallel_size", 6, "policy.parallelism.pp_size", 6),
    ("model.precision", "float16", "train.param_dtype", "float16"),
    ("model.use_torch_compile", True, "train.compile", True),
    ("model.ema.enabled", False, "train.ema_enable", False),
    ("model.sde.p_mean", 0.5, "policy.diffusers.logit_mean", 0.5),
    ("model.sde.p_std", 0.7, "policy.diffusers.logit_std", 0.7),
    ("model.tokenizer.chunk_duration", 40, "policy.diffusers.tokenizer.chunk_duration", 40),
    ("model.tokenizer.load_mean_std", True, "policy.diffusers.tokenizer.load_mean_std", True),
    ("model.tokenizer.compile_encode", True, "policy.diffusers.tokenizer.compile_encode", True),
    ("model.tokenizer.temporal_window", 4, "policy.diffusers.tokenizer.temporal_window", 4),
    ("optimizer.optim_type", "adamw", "train.optm_name", "AdamW"),
    ("optimizer.lr", 2e-5, "train.optm_lr", 4e-5),
    ("optimizer.weight_decay", 0.3, "train.optm_weight_decay", 0.3),
    ("optimizer.betas", [0.8, 0.95], "train.optm_betas", (0.8, 0.95)),
    ("optimizer.eps", 1e-7, "train.epsilon", 1e-7),
    ("scheduler.scheduler_type", "lambda_linear", "train.optm_decay_type", "linear"),
    ("scheduler.warm_up_steps", [30], "train.optm_warmup_steps", 30),
    ("scheduler.f_start", [0.5], "train.optm_warmup_start_factor", 0.25),
    ("scheduler.f_max", [2.0], "train.optm_lr", 4e-5),
    ("scheduler.f_min", [0.2], "train.optm_min_lr_factor", 0.1),
    ("scheduler.cycle_lengths", [600], "train.optm_min_lr_factor", 0.1),
    ("trainer.max_iter", 600, "train.max_num_steps", 600),
    ("trainer.max_iter", 600, "train.epoch", 600),
    ("trainer.grad_accum_iter", 3, "train.train_batch_per_replica", 48),
    ("trainer.seed", 7, "train.seed", 7),
    ("trainer.cudnn.deterministic", True, "train.deterministic", True),
    ("trainer.logging_iter", 5, "logging.log_interval", 5),
    ("trainer.run_validation", True, "validation.enable", True),
    ("trainer.run_validation", True, "validation.val_before_train", True),
    ("trainer.validation_iter", 33, "validation.freq", 33),
    ("dataloader_train.type", "local", "", None),
    (VIDEOS + "dataset_dir", "clips", POLICY + "dataset.local_dir", "clips"),
    (VIDEOS + "batch_size", 2, POLICY + "mini_batch", 2),
    (VIDEOS + "batch_size", 2, "train.train_batch_per_replica", 48),
    (VIDEOS + "num_workers", 9, POLICY + "dataloader_num_workers", 9),
    (VIDEOS + "num_frames", 61, "policy.diffusers.train_frames", 61),
    (VIDEOS + "num_frames", 61, "policy.diffusers.inference_frames", 61),
    (VIDEOS + "video_size", [320, 192], "policy.diffusers.inference_size", (192, 320)),
    ("dataloader_val.type", "local", "", None),
    (HELD_OUT + "dataset_dir", "held-out", "validation.dataset.local_dir", "held-out"),
    (HELD_OUT + "batch_size", 3, "validation.batch_size", 3),
    ("checkpoint.load_path", "org/videos", "policy.model_name_or_path", "org/videos"),
    ("checkpoint.model_id", "base/post-trained/w.pt", "policy.model_revision", "diffusers/base/post-trained"),
    ("checkpoint.save_iter", 32, "train.ckpt.save_freq", 32),
    ("checkpoint.save_iter", 32, "train.ckpt.enable_checkpoint", True),
    ("checkpoint.dcp_async_mode_enabled", True, "train.ckpt.save_mode", "async"),
    ("checkpoint.save_to_object_store.enabled", True, "train.ckpt.upload_s3", "all"),
    ("checkpoint.save_to_object_store.bucket", "b", "train.ckpt.s3_bucket", "b"),
    ("job.project", "p", "logging.project_name", "p"),
    ("job.group", "g", "logging.group_name", "g"),
    ("job.name", "n", "logging.experiment_name", "n"),
    ("job.timestamp", "20260101", "train.timestamp", "20260101"),
    ("job.wandb_mode", "online", "logging.logger", ("console", "wandb")),
]

CALLBACKS = [
    {"name": "grad_clip", "args": {"clip_norm": 0.4, "force_finite": True}},
    {"name": "wandb"},
    {"name": "every_n_sample_reg", "args": {"every_n": 12, "num_sampling_step": 35, "fps": 16}},
    {"name": "heart_beat", "step_size": 1, "args": {"every_n": 10}},
]

EVERY_IN_RL = [
    ("model.rl.enabled", True, POLICY + "type", "grpo"),
    ("model.rl.num_rollout", 6, "rollout.n_generation", 6),
    ("model.rl.sample_steps", 20, "policy.diffusers.sample.num_steps", 20),
    ("model.rl.train_on", [0, 3, 19], FLOW + "train_on", (0, 3, 19)),
    ("model.rl.update_ref_every_iter", 5, POLICY + "reference_reset_interval", 5),
    ("model.rl.on_policy", True, POLICY + "on_policy", True),
    ("model.rl.solver_option", "1euler", FLOW + "solver_option", "1euler"),
    ("model.rl.s_churn", 0.5, FLOW + "s_churn", 0.5),
    ("model.rl.guidance", 6.0, "policy.diffusers.sample.guidance_scale", 7.0),
    ("model.rl.min_num_conditional_frames", 2, FLOW + "min_conditional_frames", 2),
    ("model.rl.max_num_conditional_frames", 3, FLOW + "max_conditional_frames", 3),
    ("model.rl.clip_ratio", 2e-4, POLICY + "epsilon_low", 2e-4),
    ("model.rl.clip_ratio", 2e-4, POLICY + "epsilon_high", 2e-4),
    ("model.rl.kl_beta", 0.02, POLICY + "kl_beta", 0.02),
    ("model.rl.data_beta", 0.03, FLOW + "data_beta", 0.03),
    ("model.rl.data_beta", 0.03, POLICY + "trainer_type", "ddrl"),
    ("model.rl.data_on_first_only", True, FLOW + "data_on_first_only", True),
    ("model.rl.use_rl_sigma_and_noise", False, FLOW + "use_rl_sigma_and_noise", False),
    ("model.rl.use_same_seed", False, FLOW + "use_same_seed", False),
    ("model.rl.exp_reward", True, FLOW + "exp_reward", True),
    (REWARD + "adv_clip_min", -3.0, POLICY + "advantage_low", -3.0),
    (REWARD + "adv_clip_max", 4.0, POLICY + "advantage_high", 4.0),
    (REWARD + "remote_reward.enabled", True, POLICY + "use_remote_reward", True),
    (REWARD + "remote_reward.scale", 2.0, POLICY + "remote_reward.scale", 2.0),
    (REWARD + "remote_reward.reward_clip_min", -2.0, POLICY + "remote_reward.reward_clip_min", -2.0),
    (REWARD + "remote_reward.reward_clip_max", 3.0, POLICY + "remote_reward.reward_clip_max", 3.0),
]


def wfm(*keys: tuple[str, Any]) -> TomlTable:
    values: TomlTable = {"model": {}}
    for key, value in keys:
        table = value
        for name in reversed(key.split(".")):
            table = {name: table}
        values = merge_tables(values, table)
    return values


def every(*rows: tuple[str, Any, str, Any]) -> TomlTable:
    values = wfm(*((old, value) for old, value, _, _ in rows), ("trainer.callbacks", CALLBACKS))
    return merge_tables(
        values, wfm((REWARD + "remote_reward.reward_fn", "hps"), (REWARD + "remote_reward.score_key", "s"))
    )


def translated(values: TomlTable) -> tuple[Recipe, list[str]]:
    notices: list[str] = []
    return parse_table(Recipe, from_wfm(values, "old.toml", notices), error_prefix="old.toml"), notices


@cache
def translated_whole() -> tuple[Recipe, list[str]]:
    """What becomes of all keys together."""
    return translated(every(*EVERY, *EVERY_IN_RL))


def recipe_of(*keys: tuple[str, Any]) -> Recipe:
    return translated(wfm(*keys))[0]


def at(recipe: Recipe, key: str) -> Any:
    return reduce(getattr, key.split("."), recipe)


def refused(*keys: tuple[str, Any], **tables: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        translated(wfm(*keys) | tables)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_each_key_has_its_meaning_under_its_name_of_today_and_that_is_told() -> None:
    recipe, (mapped, _, without, *_) = translated_whole()
    told = [pair.split(" -> ") for pair in mapped.partition(": ")[2].split(", ") if " -> " in pair]
    for old, _, new, expected in EVERY + EVERY_IN_RL:
        if not new:
            assert old in without
            continue
        assert at(recipe, new) == (pytest.approx(expected) if isinstance(expected, float) else expected), old
        assert any(old in left.split(" + ") and right.split(" = ")[0] == new for left, right in told), old


def test_callbacks_and_the_reward_become_settings() -> None:
    recipe, (mapped, _, without, *_) = translated_whole()
    assert recipe.train.optm_grad_norm_clip == 0.4
    assert recipe.logging.multi_modal_log_interval == 12
    assert recipe.policy.diffusers.sample.eval_num_steps == 35
    policy = recipe.train.train_policy.model_dump()
    assert policy["reset_optimizer_with_reference"] is False
    assert policy["remote_reward"]["reward_fns"] == (
        {"name": "hps", "weight": 1.0, "score_key": "s", "clip_min": -2.0, "clip_max": 3.0},
    )
    assert "trainer.callbacks.grad_clip.clip_norm -> train.optm_grad_norm_clip = 0.4" in mapped
    assert "trainer.callbacks.every_n_sample_reg.fps (samples are drawn as in validation)" in without
    assert "trainer.callbacks.heart_beat (the trainer does or records it)" in without
    assert "model.loss_scale = 10.0 (gradients that are clipped are 10.0 times as small here)" in without


def test_what_is_left_out_has_the_defaults_of_the_deprecated_schema_and_that_is_told() -> None:
    recipe, (left_out, without) = translated({"model": {}})
    train, policy, diffusers = recipe.train, recipe.train.train_policy.model_dump(), recipe.policy.diffusers
    assert (train.optm_lr, train.optm_weight_decay, train.optm_betas, train.epsilon) == (1e-5, 1e-4, (0.9, 0.99), 1e-8)
    assert (train.max_num_steps, train.optm_warmup_steps, train.seed, train.compile) == (25, 1000, 0, False)
    assert (train.optm_grad_norm_clip, train.ema_enable, train.ckpt.save_freq) == (0.0, True, 1000)
    assert (diffusers.logit_mean, diffusers.logit_std) == (math.log(4), 1.2)
    assert (diffusers.max_prompt_length, diffusers.train_frames, diffusers.inference_size) == (512, 93, (432, 768))
    assert (policy["trainer_type"], policy["kl_beta"], policy["epsilon_low"]) == ("flow_grpo", 0.01, 1e-4)
    assert (recipe.rollout.n_generation, diffusers.sample.num_steps, diffusers.sample.guidance_scale) == (8, 10, 1.0)
    assert (policy["reference_reset_interval"], diffusers.flow_rl.train_on) == (16, tuple(range(8)))
    assert (recipe.policy.parallelism.dp_shard_size, train.train_batch_per_replica) == (8, 8)
    assert (recipe.mode, recipe.rollout.backend) == ("colocated", "flow_sampler")
    assert left_out.startswith("left out, so as in the deprecated schema: policy.parallelism.dp_shard_size = 8, ")
    assert "train.optm_betas = [0.9, 0.99]" in left_out
    assert "train.optm_decay_type" not in left_out
    assert without == ("without counterpart: checkpoint.load_path (left out, which meant random weights: name a model)")
    assert recipe.policy.model_name_or_path == "nvidia/Cosmos-Predict2.5-2B"


def test_without_reinforcement_learning_it_is_sft() -> None:
    keys = (("model.rl.enabled", False), ("model.rl.kl_beta", 0.5), (VIDEOS + "drop_last", False))
    recipe, (_, _, without, *_) = translated(every(*EVERY) | wfm(*keys, *((o, v) for o, v, _, _ in EVERY)))
    policy = recipe.train.train_policy
    assert (policy.type, policy.trainer_type, policy.mini_batch) == ("sft", "diffusion_sft", 2)
    assert recipe.train.train_batch_per_replica == 6  # of one rank, where RL counts all of them
    assert policy.model_dump()["dataloader_drop_last"] is False
    assert recipe.policy.diffusers.flow_rl.data_beta == 0.0
    assert "model.rl.kl_beta (reinforcement learning is off)" in without


def test_data_without_a_folder_has_its_keys_one_table_deeper() -> None:
    web = "dataloader.batch_size", "dataloader.num_workers", "dataloader.dataset.num_video_frames"
    keys = [(VIDEOS + name, value) for name, value in zip(web, (3, 4, 57), strict=True)]
    recipe = recipe_of(*keys, (HELD_OUT + "dataloader.batch_size", 2), ("model.resolution", "720"))
    policy = recipe.train.train_policy
    assert (policy.mini_batch, policy.dataloader_num_workers, recipe.train.train_batch_per_replica) == (3, 4, 24)
    assert (recipe.policy.diffusers.train_frames, recipe.validation.batch_size) == (57, 2)
    assert recipe.policy.diffusers.inference_size == (720, 1280)


def test_a_rate_that_does_not_fall_is_constant_and_a_longer_cycle_is_left_half_way() -> None:
    constant, (*_, without) = translated(wfm(("scheduler.f_min", [1.0]), ("scheduler.cycle_lengths", [9])))
    assert constant.train.optm_decay_type is None
    assert "scheduler.{f_min, cycle_lengths} (the rate stays at its peak)" in without
    half = recipe_of(("trainer.max_iter", 50), ("scheduler.f_min", [0.2]), ("scheduler.cycle_lengths", [100]))
    assert half.train.optm_min_lr_factor == pytest.approx(0.6)


def test_a_reference_that_is_never_reset_and_a_switched_off_sink() -> None:
    keys = (("model.rl.update_ref_every_iter", 0), ("model.rl.on_policy", False), ("job.wandb_mode", "disabled"))
    values = wfm(*keys, ("trainer.callbacks", [{"name": "wandb"}]), ("checkpoint.model_id", "own.pt"))
    recipe, (_, _, without) = translated(values)
    assert recipe.train.train_policy.model_dump()["reference_reset_interval"] is None
    assert recipe.logging.logger == ("console",)
    assert recipe.policy.model_revision is None
    assert "model.rl.update_ref_every_iter (the reference is never reset)" in without
    assert "model.rl.on_policy (rollouts are of the policy, never of the reference)" in without
    assert "checkpoint.model_id (name the revision with files of diffusers in policy.model_revision)" in without


def test_keys_without_counterpart_are_told_in_one_line_by_reason_and_secrets_never() -> None:
    values = wfm(
        ("model.net.num_blocks", 36),
        ("model.net.sac_config", {"mode": "none"}),
        ("model.conditioner", [{"name": "fps", "type": "remap_key"}, {"name": "text", "dropout_rate": 0.2}]),
        ("model.state_t", 24),
        ("trainer.straggler_detection.enabled", True),
        ("trainer.memory_format", "channels_last"),
        (REWARD + "remote_reward.token", "s3cret"),
    )
    _, notices = translated(values)
    assert notices[-1] == (
        "without counterpart: model.{net, conditioner, state_t} (the model's own files say it); "
        "model.rl.reward_config.remote_reward.token (set REMOTE_REWARD_TOKEN, REMOTE_REWARD_ENQUEUE_URL and "
        "REMOTE_REWARD_FETCH_URL in the environment); "
        "trainer.{straggler_detection, memory_format} (the trainer decides it); "
        "checkpoint.load_path (left out, which meant random weights: name a model)"
    )
    assert "s3cret" not in "".join(notices)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lrr", 1e-5, "optimizer.lrr: unknown key; did you mean optimizer.lr?"),
        ("model.sigma_dat", 1.0, "model.sigma_dat: unknown key; did you mean model.sigma_data?"),
        ("model.conditioner", [{"nam": 1}], "model.conditioner.nam: unknown key; did you mean model.conditioner.name?"),
        ("zzz\n", 1, r"'zzz\n': unknown key"),
        ("optimizer.lr", "x", "optimizer.lr = 'x': must be a number"),
        ("optimizer.lr", -1.0, "optimizer.lr = -1.0: input should be greater than 0"),
        ("optimizer", 5, "optimizer = 5: must be a table"),
        ("scheduler.warm_up_steps", 5, "scheduler.warm_up_steps = 5: must be an array"),
        ("model.net", 5, "model.net: must be a table"),
        ("model.rl.train_on", [], "model.rl.train_on = []: tuple should have at least 1 item"),
        ("model.rl.train_on", [10], "model.rl.train_on = [10] must be below sample_steps = 10: steps are counted from"),
        ("model.rl.min_num_conditional_frames", 2, "model.rl.min_num_conditional_frames = 2 must not be above"),
        ("model.rl.solver_option", "3ab", "model.rl.solver_option = '3ab': input should be '2ab', '2mid' or '1euler'"),
        (REWARD + "image_reward.enabled", True, "reward_config.image_reward.enabled = true has no counterpart"),
        (REWARD + "remote_reward.enabled", False, "reward_config.remote_reward.enabled = false leaves no reward"),
        ("model.resolution", "512", "model.resolution = '512': must be '480' or '720', or give dataloader_train"),
        ("scheduler.f_max", [1.0, 0.5], "scheduler.f_max = [1.0, 0.5]: tuple should have at most 1 item"),
        ("scheduler.f_min", [2.0], "scheduler.f_min = [2.0] must not be above f_max = [1.0]"),
        ("checkpoint.load_from_object_store.enabled", True, "load_from_object_store.enabled = true has no counterpart"),
        ("checkpoint.save_to_object_store.enabled", True, "save_to_object_store.enabled = true needs a bucket"),
        ("trainer.callbacks", [{"name": "every_n_sample_reg", "args": {"evry_n": 2}}],
         "every_n_sample_reg.evry_n: unknown key; did you mean trainer.callbacks.every_n_sample_reg.every_n"),
        ("trainer.callbacks", [{"name": "grad_clp"}], "trainer.callbacks.grad_clp: unknown key"),
        ("trainer.callbacks", [{"name": "grad_clip", "args": {"clip_norm": "x"}}],
         "trainer.callbacks.grad_clip.clip_norm = 'x': must be a number"),
    ],
)  # fmt: skip
def test_a_mistake_names_the_deprecated_key(key: str, value: Any, message: str) -> None:
    told = refused((key, value))
    assert told.startswith("old.toml: ")
    assert message in told


def test_a_cycle_that_ends_before_the_training_is_refused() -> None:
    assert "scheduler.cycle_lengths = [10] ends before trainer.max_iter = 25" in refused(
        ("scheduler.f_min", [0.1]), ("scheduler.cycle_lengths", [10])
    )


@pytest.mark.parametrize("today", ["train", "pipeline", "extends", "policy"])
def test_tables_of_both_schemas_are_refused(today: str) -> None:
    told = refused(("optimizer.lr", 1e-5), **{today: {}})
    assert f"[model] is of the deprecated --wfm-mode schema and {today} of today's" in told


def test_a_deprecated_file_is_refused_with_the_command_that_converts_it() -> None:
    for tables in ({"optimizer": {"lr": 1e-5}}, {"model": {}}, {"model": {}, "job": {}, "train": {}}):
        with pytest.raises(ConfigError, match=r"deprecated --wfm-mode schema; `python tools/convert_wfm.py old.toml`"):
            with_current_keys(tables, "old.toml", [])
    with pytest.raises(ConfigError, match=r"\[optimizer\] is of the deprecated --wfm-mode schema, whose recipes have"):
        from_wfm({"optimizer": {"lr": 1e-5}}, "old.toml", [])


def test_a_script_may_have_a_model_table_of_its_own() -> None:
    for tables in ({"model": {"obs_dim": 4}, "train": {}}, {"trainer": {}, "policy": {}}):
        with_current_keys(tables, "new.toml", [])


def test_a_converted_file_loads_and_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.toml", tmp_path / "new.toml"
    values = merge_tables(every(*EVERY, *EVERY_IN_RL), wfm(("model.precision", "bfloat16"), ("model_parallel", {})))
    del values["model_parallel"]
    old.write_text(tomli_w.dumps(values))
    monkeypatch.setattr("sys.argv", ["convert_wfm.py", str(old)])
    convert_wfm.main()
    printed = capsys.readouterr()
    new.write_text(printed.out)
    assert printed.err.count("convert_wfm: note: ") == 3
    pipeline = load_pipeline(new, [], all_kinds())
    assert [stage.kind for stage in pipeline.stages] == ["prepare", "rl", "validate", "export", "upload"]
    check_capabilities(pipeline)
