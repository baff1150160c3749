"""Every rule between the values of a recipe, row by row as Cosmos-RL's schema has them: one case is accepted or stays
as it was written, another is refused or changed."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.errors import ConfigError
from tests.unit.test_config_load import GRPO, SFT, load, refused


@dataclass(frozen=True)
class Case:
    """One recipe, and what becomes of it."""

    outcome: Literal["kept", "changed", "refused", "cannot"]
    settings: tuple[str, ...]
    """On top of the recipe."""
    key: str = ""
    value: object = None
    """Of the key, once loaded."""
    said: str = ""
    """The refusal, or the only notice."""
    recipe: str = SFT


def kept(key: str, value: object, *settings: str) -> Case:
    """The value stays as it was written; its own setting may be left out."""
    return Case("kept", settings or (f"{key}={json.dumps(value)}",), key, value)


def changed(key: str, value: object, *settings: str, said: str = "") -> Case:
    """The rule writes another value."""
    return Case("changed", settings, key, value, said)


def no(said: str, *settings: str) -> Case:
    """The schema refuses it."""
    return Case("refused", settings, said=said)


def cannot(said: str, *settings: str) -> Case:
    """The schema accepts it, the capability check refuses it: this version is smaller than the rule."""
    return Case("cannot", settings, said=said)


def on(recipe: str, *cases: Case) -> list[Case]:
    """The cases with another recipe below their settings."""
    return [replace(case, recipe=recipe) for case in cases]


P = "train.train_policy"
MESH = "policy.parallelism"
AHEAD = f"{P}.dataloader_prefetch_factor"
BALANCED = (f"{P}.enable_dp_load_balancing=true", "train.max_num_steps=5")
REWARD = f"{P}.reward_function"
REMOTE = f"{P}.remote_reward.reward_fns"
TURNS = "rollout.multi_turn_config"
BOTH_FLAGS = (f"{TURNS}.enable_tools=true", f"{TURNS}.continue_final_message=true")
OUTDATED = f"{P}.allowed_outdated_steps"
ADAPTED = ("policy.lora.r=4", "train.compile=false")
ONE_RANK = "not in this version; set it to 1"

RULES: dict[tuple[str, str], list[Case]] = {
    ("dataset", "a split that is a string is a list of one"): [
        kept(f"{P}.dataset.split", ("a", "b"), f"{P}.dataset.split=['a', 'b']"),
        changed(f"{P}.dataset.split", ("a",), f"{P}.dataset.split='a'"),
    ],
    ("dataset", "text models have no folder of media, but a class of the user may read it"): [
        kept(f"{P}.dataset.local_dir", "a", f"{P}.dataset.name='mine.py:Rows'", f"{P}.dataset.local_dir=a"),
        cannot(f"{P}.dataset.local_dir = 'a': only diffusion models read it; name the rows in {P}.dataset.name",
               f"{P}.dataset.local_dir=a"),
    ],
    ("SFT", "without workers there is no prefetch"): [
        kept(AHEAD, 4, f"{P}.dataloader_num_workers=2", f"{AHEAD}=4"),
        changed(AHEAD, None, f"{AHEAD}=4"),
        changed(f"{P}.dataloader_num_workers", 0, f"{P}.dataloader_num_workers=-3"),
    ],
    ("SFT", "balanced batches have a strategy and a length"): [
        kept(f"{P}.load_balanced_batching_strategy", "prefer_first",
             *BALANCED, f"{P}.load_balanced_batching_strategy='prefer_first'"),
        kept(f"{P}.load_balanced_batching_strategy", "prefer_closest",
             *BALANCED, f"{P}.load_balanced_batching_strategy='prefer_closest'"),
        kept(f"{P}.load_balanced_batching_strategy", "largest"),
        kept(f"{P}.load_balanced_batches_per_optimizer_step", 2,
             *BALANCED, f"{P}.load_balanced_batches_per_optimizer_step=2"),
        no(f"{P}: load_balanced_batching_strategy = 'largest' must be 'prefer_first' or 'prefer_closest'",
           *BALANCED, f"{P}.load_balanced_batching_strategy='largest'"),
        no(f"{P}: load_balanced_batches_per_optimizer_step = 0 must be at least 1",
           *BALANCED, f"{P}.load_balanced_batches_per_optimizer_step=0"),
    ],
    ("ckpt", "an upload to S3 says what and whereto"): [
        kept("train.ckpt.upload_s3", "final", "train.ckpt.upload_s3='final'", "train.ckpt.s3_bucket='b'"),
        kept("train.ckpt.upload_s3", "all", "train.ckpt.upload_s3='all'", "train.ckpt.s3_bucket='b'"),
        kept("train.ckpt.upload_s3", False, "train.ckpt.upload_s3=false"),
        changed("train.ckpt.upload_s3", False, "train.ckpt.upload_s3=''"),
        no("train.ckpt.upload_s3 = True must be false, 'final' or 'all'", "train.ckpt.upload_s3=true"),
        no("train.ckpt.upload_s3 = 'last' must be false, 'final' or 'all'", "train.ckpt.upload_s3='last'"),
        no("train.ckpt: upload_s3 = 'final' needs s3_bucket; name the bucket or set upload_s3 = false",
           "train.ckpt.upload_s3='final'"),
    ],
    ("ckpt", "save_mode is async or sync"): [
        kept("train.ckpt.save_mode", "async"),
        kept("train.ckpt.save_mode", "sync"),
        no("train.ckpt.save_mode = 'later': input should be 'sync' or 'async'", "train.ckpt.save_mode='later'"),
    ],
    ("ckpt", "it saves every so many steps or epochs"): [
        kept("train.ckpt.save_freq", 3),
        kept("train.ckpt.save_freq", 0, "train.ckpt.save_freq=0", "train.ckpt.save_freq_in_epoch=1"),
        no("train.ckpt: save_freq = 0 must be at least 1 unless save_freq_in_epoch (= -1) is",
           "train.ckpt.save_freq=0", "train.ckpt.save_freq_in_epoch=-1"),
    ],
    ("reward fn (remote)", "a score without a key is under the function's name"): on(GRPO,
        kept(f"{REMOTE}.0.score_key", "a+b", f"{REMOTE}=[{{name='taste', score_key='a+b'}}]"),
        changed(f"{REMOTE}.0.score_key", "taste", f"{REMOTE}=[{{name='taste'}}]"),
    ),
    ("GRPO", "the variants"): on(GRPO,
        kept(f"{P}.variant", "grpo"),
        kept(f"{P}.variant", "dapo"),
        kept(f"{P}.variant", "gspo", f"{P}.variant='gspo'", f"{P}.loss_type='token-mean'"),
        changed(f"{P}.loss_type", "seq-mean-token-mean", f"{P}.variant='gspo'",
                said=f"{P}.loss_type: seq-mean-token-mean, as in the paper of variant = 'gspo'; "
                "set it to have another"),
        no(f"{P}.variant = 'ppo': input should be 'grpo', 'dapo', 'gspo', 'cispo', 'sapo', 'dppo_tv' "
           "or 'dppo_kl'", f"{P}.variant='ppo'"),
    ),
    ("GRPO", "one use of the rollouts' log-probabilities, and a reference to reset"): on(GRPO,
        kept(f"{P}.rollout_correction", "truncate"),
        no(f"{P}: rollout_correction excludes use_decoupled_loss and use_rollout_logprobs_for_loss: each says what the "
           "log-probabilities of the rollouts are for; set one of them",
           f"{P}.rollout_correction='mask'", f"{P}.use_decoupled_loss=true"),
        no(f"{P}: reference_reset_interval needs a reference: set kl_beta above 0, or leave it out",
           f"{P}.reference_reset_interval=10"),
        changed(f"{P}.use_decoupled_loss", False, f"{P}.use_decoupled_loss=true", f"{P}.aipo_rho=2.0",
                said=f"{P}.use_decoupled_loss: false, because aipo_rho weights tokens by policy / rollout policy "
                "already"),
        no(f"{P}: rollout_correction = 'truncate' would weight tokens a second time: aipo_rho weights them by policy / "
           "rollout policy; set one of them, or aipo_form = 'clamped'",
           f"{P}.rollout_correction='truncate'", f"{P}.aipo_rho=2.0"),
        kept(f"{P}.rollout_correction", "none", f"{P}.rollout_correction='none'", f"{P}.use_decoupled_loss=true"),
        no(f"{P}: rollout_correction_low = 3 is above rollout_correction_high = 1: no weight is between; swap them",
           f"{P}.rollout_correction='mask'", f"{P}.rollout_correction_low=3.0", f"{P}.rollout_correction_high=1.0"),
        no(f"{P}: geometric_mask compares the old policy with the rollouts, and use_rollout_logprobs_for_loss = true "
           "takes the one for the other; set one of them",
           f"{P}.rollout_correction=''", f"{P}.geometric_mask=0.01", f"{P}.use_rollout_logprobs_for_loss=true"),
        kept(f"{P}.algo", "rloo", f"{P}.algo='rloo'", f"{P}.unbiased_advantage=true"),
        no(f"{P}: unbiased_advantage = true leaves out the division that algo = 'batch-std' is; set one of them",
           f"{P}.algo='batch-std'", f"{P}.unbiased_advantage=true"),
        no(f"{P}: unbiased_kl_estimate is for kl_estimator = 'k3': the gradient of 'k2' is that of the reverse KL "
           "already, and times the ratio it is that of nothing; leave one of them out",
           f"{P}.unbiased_kl_estimate=true", f"{P}.kl_estimator='k2'"),
        no(f"{P}: kl_in_reward = true makes returns of tokens, which algo = 'rloo' does not know; set algo to "
           "'reinforce++'",
           f"{P}.algo='rloo'", f"{P}.kl_beta=0.1", f"{P}.kl_in_reward=true"),
        no(f"{P}: kl_in_reward = true leaves no KL in the loss for kl_estimator and unbiased_kl_estimate; leave them "
           "out",
           f"{P}.algo='reinforce++'", f"{P}.kl_beta=0.1", f"{P}.kl_in_reward=true", f"{P}.kl_estimator='k2'"),
    ),
    ("GRPO", "rewards have weights, and there is one"): on(GRPO,
        kept(REWARD, {"a": 0.5, "b": 2.0}, f"{REWARD}={{a=0.5, b=2.0}}"),
        changed(REWARD, {"a": 1.0}, f"{REWARD}='a'"),
        changed(REWARD, {"a": 1.0, "b": 1.0}, f"{REWARD}=['a', 'b']"),
        no(f"{P}: reward_function is empty; name at least one reward", f"{REWARD}=[]"),
        kept(f"{P}.filter_reward_metric", ("a", "b"), f"{P}.filter_reward_metric=['a', 'b']"),
        changed(f"{P}.filter_reward_metric", ("a",), f"{P}.filter_reward_metric='a'"),
    ),
    ("GRPO", "a loader's batch of 0 or less is all; workers and prefetch as in SFT"): on(GRPO,
        kept(f"{P}.dataloader_batch_size", 4),
        changed(f"{P}.dataloader_batch_size", 0, f"{P}.dataloader_batch_size=-1"),
        kept(AHEAD, 4, f"{P}.dataloader_num_workers=2", f"{AHEAD}=4"),
        changed(AHEAD, None, f"{AHEAD}=4"),
        changed(f"{P}.dataloader_num_workers", 0, f"{P}.dataloader_num_workers=-3"),
    ),
    ("GRPO", "losses that need the rollouts' log-probabilities collect them; one such loss"): on(GRPO,
        kept(f"{P}.collect_rollout_logprobs", False),
        kept(f"{P}.rollout_as_token_ids", False, f"{P}.use_rollout_logprobs_for_loss=true"),
        changed(f"{P}.collect_rollout_logprobs", True, f"{P}.use_decoupled_loss=true"),
        changed(f"{P}.rollout_as_token_ids", True, f"{P}.use_decoupled_loss=true"),
        changed(f"{P}.collect_rollout_logprobs", True, f"{P}.use_rollout_logprobs_for_loss=true"),
        no(f"{P}: use_decoupled_loss and use_rollout_logprobs_for_loss exclude each other: one recomputes the old "
           "log-probabilities, the other takes those of the rollouts; set one of them to false",
           f"{P}.use_decoupled_loss=true", f"{P}.use_rollout_logprobs_for_loss=true"),
    ),
    ("GRPO", "DAPO goes on fetching prompts"): on(GRPO,
        kept(f"{P}.outdated_rollout_fetch_batch_size", 0),
        kept(f"{P}.outdated_rollout_fetch_batch_size", 3,
             f"{P}.variant='dapo'", f"{P}.outdated_rollout_fetch_batch_size=3"),
        changed(f"{P}.outdated_rollout_fetch_batch_size", 128, f"{P}.variant='dapo'"),
    ),
    ("GRPO", "steps in flight are at least those that may be outdated and one"): on(GRPO,
        kept(f"{P}.max_inflight_steps", 5),
        kept(f"{P}.max_inflight_steps", None, f"{OUTDATED}=4"),
        changed(f"{P}.max_inflight_steps", 5, f"{P}.max_inflight_steps=2",
                said=f"{P}.max_inflight_steps = 2: 5, which is allowed_outdated_steps + 1"),
    ),
    ("GRPO", "uncentralised training is of the variant grpo"): on(GRPO,
        kept(f"{P}.uncentralized_training", True, f"{P}.uncentralized_training=true"),
        no(f"{P}: uncentralized_training needs variant = 'grpo', not 'gspo'",
           f"{P}.uncentralized_training=true", f"{P}.variant='gspo'"),
    ),
    ("train", "asynchronous tensor parallelism is compiled"): [
        kept("train.async_tp_enabled", True, "train.async_tp_enabled=true", "train.compile=true"),
        no("train: async_tp_enabled = true needs compile = true; set compile = true or leave it out",
           "train.async_tp_enabled=true", "train.compile=false"),
    ],
    ("train", "a bound of steps is positive, and balanced batches have one"): [
        kept("train.max_num_steps", 1),
        kept("train.max_num_steps", 5, *BALANCED),
        no("train.max_num_steps = 0: input should be greater than 0", "train.max_num_steps=0"),
        no("train: train_policy.enable_dp_load_balancing = true needs max_num_steps: batches differ in rows, so the "
           "length of an epoch is unknown; set train.max_num_steps", BALANCED[0]),
    ],
    ("train", "on policy, weights go over each step and none is outdated"): on(GRPO,
        kept(OUTDATED, 4),
        changed(OUTDATED, 0, f"{P}.on_policy=true"),
        changed(OUTDATED, 0, f"{P}.on_policy=true", f"{OUTDATED}=3",
                said=f"{OUTDATED} = 3: 0, because on_policy is set"),
        no("train: train_policy.on_policy = true needs sync_weight_interval = 1, not 2: rollouts of older weights are "
           "off-policy", f"{P}.on_policy=true", "train.sync_weight_interval=2"),
    ),
    ("train", "transfers are joined only where rollouts may be outdated"): on(GRPO,
        kept("train.coalesce_weight_sync", True, "train.coalesce_weight_sync=true"),
        *(changed("train.coalesce_weight_sync", False, "train.coalesce_weight_sync=true", setting,
                  said="train.coalesce_weight_sync: false, because rollouts may not be outdated")
          for setting in (f"{P}.on_policy=true", f"{OUTDATED}=0")),
    ),
    ("train", "the seed is 42 unless it is given and not negative"): [
        kept("train.seed", 0),
        kept("train.seed", 7, "train.seed=7", "train.deterministic=true"),
        changed("train.seed", 42, "train.deterministic=true"),
        changed("train.seed", 42, "train.seed=-1"),
    ],
    ("train", "rates by module have one for the rest"): [
        kept("train.optm_lr", {"global": 1e-6, "visual": 1e-5}, "train.optm_lr={global=1e-6, visual=1e-5}"),
        no("train.optm_lr = {'visual': 1e-05} must have the key 'global', the rate of all modules not named",
           "train.optm_lr={visual=1e-5}"),
        changed("train.optm_lr", 1e-5, "train.optm_lr=[1e-5]"),
        kept("train.optm_lr", (1e-5, 1e-6), "train.optm_lr=[1e-5, 1e-6]"),
        changed("train.optm_impl", "foreach", "train.optm_impl=['foreach']"),
    ],
    ("train", "weights travel in the master's dtype"): [
        kept("train.transfer_dtype", "float16", "train.transfer_dtype='float16'", "train.master_dtype='bfloat16'"),
        changed("train.transfer_dtype", "bfloat16", "train.master_dtype='bfloat16'"),
    ],
    ("LoRA", "one string means all linear layers, or is a regular expression of whole names"): [
        kept("policy.lora.target_modules", "all-linear"),
        kept("policy.lora.target_modules", ".*language_model.*q_proj"),
        kept("policy.lora.target_modules", ("q_proj",), "policy.lora.target_modules=['q_proj']"),
        no("policy.lora.target_modules: '(q' is not a regular expression: missing ), unterminated subpattern at "
           "position 0", "policy.lora.target_modules='(q'"),
    ],
    ("policy", "there is a model, its mesh has sizes, and one pattern selects weights"): [
        kept("policy.model_name_or_path", "org/model"),
        no("policy.model_name_or_path is empty; give a folder or a Hub id", "policy.model_name_or_path=''"),
        *(kept(f"{MESH}.{name}_size", 2) for name in ("tp", "ep", "cp", "pp", "dp_shard")),
        *(no(f"{MESH}.{name}_size = {size}: input should be greater than 0", f"{MESH}.{name}_size={size}")
          for name in ("tp", "ep", "cp", "pp") for size in (0, -1)),
        kept(f"{MESH}.dp_shard_size", -1),
        *(no(f"{MESH}.dp_shard_size = {size} must be -1 (the rest of the world) or at least 1",
             f"{MESH}.dp_shard_size={size}") for size in (0, -2)),
        kept("policy.freeze_pattern", ("^visual",), "policy.freeze_pattern=['^visual']"),
        kept("policy.trainable_pattern", ("^visual",), "policy.trainable_pattern=['^visual']"),
        no("policy: freeze_pattern and trainable_pattern exclude each other; keep one of them",
           "policy.freeze_pattern=['a']", "policy.trainable_pattern=['b']"),
    ],
    ("multi-turn", "with tools and a generation prompt no message is continued"): on(GRPO,
        kept(f"{TURNS}.continue_final_message", True, *BOTH_FLAGS, f"{TURNS}.add_generation_prompt=false"),
        kept(f"{TURNS}.continue_final_message", True, BOTH_FLAGS[1]),
        changed(f"{TURNS}.continue_final_message", False, *BOTH_FLAGS,
                said=f"{TURNS}.continue_final_message: false, because enable_tools and add_generation_prompt are set"),
        cannot(f"{TURNS}.continue_final_message excludes add_generation_prompt; set that to false",
               f"{TURNS}.enable=true", f"{TURNS}.continue_final_message=true"),
    ),
    ("validation", "rewards as in training; the service is asked in both or in none"): on(GRPO,
        kept("validation.reward_function", {"a": 0.5}, "validation.reward_function={a=0.5}"),
        changed("validation.reward_function", {"a": 1.0}, "validation.reward_function='a'"),
        kept("validation.use_remote_reward", True, f"{P}.use_remote_reward=true", "validation.use_remote_reward=true"),
        changed("validation.use_remote_reward", True, f"{P}.use_remote_reward=true"),
        changed("validation.use_remote_reward", False),
        *(no(f"validation.use_remote_reward = {asked} must equal {P}.use_remote_reward = {trained}; leave it out to "
             "inherit", f"{P}.use_remote_reward={trained}", f"validation.use_remote_reward={asked}")
          for asked, trained in (("true", "false"), ("false", "true"))),
        kept("validation.remote_reward.scale", 3.0, f"{P}.remote_reward.scale=2", "validation.remote_reward.scale=3"),
        changed("validation.remote_reward.scale", 2.0, f"{P}.remote_reward.scale=2"),
    ),
    ("rollout", "engines of text have no other mesh than replicas, tp, pp and dp_shard"): on(GRPO,
        *(kept(f"rollout.parallelism.{name}", 2, f"rollout.parallelism.{name}=2", f"rollout.backend='{backend}'")
          for name, backend in (("n_init_replicas", "vllm"), ("tp_size", "vllm"), ("pp_size", "vllm"),
                                ("dp_shard_size", "vllm"))),
        *(changed("rollout.backend", "vllm", f"rollout.backend='{backend}'",
                  said=f"rollout.backend = {backend!r}: 'vllm', which generates instead")
          for backend in ("trtllm", "vllm_async")),
        kept("rollout.parallelism.cp_size", 2, "rollout.parallelism.cp_size=2", "rollout.backend='hf'"),
        *(no(f"rollout: parallelism.{name} = {value!r}: backend 'vllm' takes only dp_shard_size, n_init_replicas, "
             "pp_size, tp_size; leave it out", f"rollout.parallelism.{name}={value!r}", f"rollout.backend={backend!r}")
          for name, value, backend in (("cp_size", 2, "vllm"), ("ep_size", 2, "vllm_async"),
                                       ("dp_replicate_size", 2, "trtllm"), ("pp_schedule", "1F1B", "vllm"))),
    ),
    ("logging", "names of loggers are in lower case"): [
        kept("logging.logger", ("wandb",), "logging.logger=['wandb']"),
        changed("logging.logger", ("console", "wandb"), "logging.logger=['Console', 'WANDB']"),
    ],
    ("distillation", "a teacher forces token ids and no rewards; the top k are the teacher's where there are some"):
    on(GRPO,
        kept("distillation.top_k", 4, "distillation.enable=true", "distillation.top_k=4"),
        kept("distillation.trainer_token_ids_from_teacher", True, "distillation.enable=true", "distillation.top_k=4"),
        kept(f"{P}.bypass_reward", False, "distillation.enable=false"),
        changed("distillation.trainer_token_ids_from_teacher", False, "distillation.enable=true"),
        changed("distillation.top_k", 0, "distillation.top_k=4"),
        changed(f"{P}.rollout_as_token_ids", True, "distillation.enable=true"),
        changed(f"{P}.bypass_reward", True, "distillation.enable=true"),
    ),
    ("cross: PP", "pipeline stages divide the batch and exclude offload"): [
        kept(f"{MESH}.pp_micro_batch_size", 4, f"{MESH}.pp_size=2", f"{MESH}.pp_micro_batch_size=4"),
        kept(f"{MESH}.pp_micro_batch_size", 3),
        kept("train.fsdp_offload", True, "train.fsdp_offload=true"),
        no(f"{MESH}.pp_size = 2: train.train_batch_per_replica = 8 must be a multiple of pp_micro_batch_size = 3",
           f"{MESH}.pp_size=2", f"{MESH}.pp_micro_batch_size=3"),
        no(f"{MESH}.pp_size = 2 excludes train.fsdp_offload; set train.fsdp_offload = false",
           f"{MESH}.pp_size=2", "train.fsdp_offload=true"),
        no("train: train_batch_per_replica = 8 must be a multiple of train_policy.mini_batch = 3",
           f"{MESH}.pp_size=2", f"{P}.mini_batch=3"),
    ],
    ("cross: GRPO + LoRA", "neither compile nor tensor parallelism"): on(GRPO,
        kept("policy.lora.r", 4, *ADAPTED),
        no("policy.lora with GRPO excludes train.compile; set train.compile = false", "policy.lora.r=4",
           "train.compile=true"),
        no("policy.lora with GRPO excludes policy.parallelism.tp_size = 2; set it to 1 and raise dp_shard_size",
           *ADAPTED, f"{MESH}.tp_size=2"),
    ),
    ("cross: staleness", "rollouts may be as old as the steps between transfers"): on(GRPO,
        kept(OUTDATED, 1, f"{OUTDATED}=1", "train.sync_weight_interval=2"),
        changed(OUTDATED, 7, f"{OUTDATED}=1", "train.sync_weight_interval=8",
                said=f"{OUTDATED} = 1: 7, which is sync_weight_interval - 1"),
    ),
    ("worker check", "SFT: micro-batches divide the batch"): [
        kept(f"{P}.mini_batch", 8),
        no("train: train_batch_per_replica = 8 must be a multiple of train_policy.mini_batch = 3", f"{P}.mini_batch=3"),
    ],
    ("worker check", "GRPO: ranks and micro-batches divide the batch"): on(GRPO,
        kept(f"{P}.mini_batch", 4),
        no("train: train_batch_per_replica = 16 must be a multiple of train_policy.mini_batch = 3",
           f"{P}.mini_batch=3"),
    ),
    ("colocated check", "as many replicas generate as train, and train whole groups"): on(GRPO,
        kept("mode", "colocated"),
        kept("train.train_batch_per_replica", 24, "mode='colocated'", "train.train_batch_per_replica=24"),
        changed(f"{MESH}.dp_replicate_size", 2, "mode='colocated'", f"{MESH}.n_init_replicas=2",
                said=f"{MESH}.n_init_replicas = 2: dp_replicate_size = 2, and a train step has 32 rows"),
        kept("rollout.parallelism.n_init_replicas", 2, "rollout.parallelism.n_init_replicas=2"),
        cannot("rollout.parallelism.tp_size = 2: engines share the ranks of policy.parallelism, which are 1; take a "
               "divisor of that", "rollout.parallelism.tp_size=2"),
        cannot("rollout.parallelism.tp_size = 2: backend 'hf' has the whole model on each rank; set it to 1",
               "rollout.parallelism.tp_size=2", "rollout.backend='hf'", f"{MESH}.dp_shard_size=2"),
        kept("rollout.n_generation", 3, "rollout.n_generation=3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("further", [False, pytest.param(True, marks=pytest.mark.full)])  # what is kept besides
@pytest.mark.parametrize("rule", RULES, ids=": ".join)
def test_a_rule_accepts_what_it_allows_and_refuses_or_changes_the_rest(
    tmp_path: Path, rule: tuple[str, str], further: bool
) -> None:
    others = [case for case in RULES[rule] if case.outcome == "kept"][1:]
    for case in (each for each in RULES[rule] if (each in others) is further):
        if case.outcome == "refused":
            assert refused(tmp_path, case.recipe, *case.settings) == f"recipe.toml: {case.said}"
            continue
        pipeline = load(tmp_path, case.recipe, *case.settings)
        if case.outcome == "cannot":
            with pytest.raises(ConfigError) as caught:
                check_capabilities(pipeline)
            assert re.sub(r".*/recipe.toml: stage '\w+': ", "", str(caught.value)) == case.said
            continue
        found: Any = next(iter(pipeline.recipes.values()))
        for part in case.key.split("."):
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        assert (found, type(found)) == (case.value, type(case.value)), case
        assert pipeline.notices == ((case.said,) if case.said else ()), case


def test_every_rule_has_a_case_on_either_side() -> None:
    for rule, cases in RULES.items():
        outcomes = {case.outcome for case in cases}
        assert "kept" in outcomes and len(outcomes) > 1, rule
    assert Counter(section for section, _ in RULES) == {
        "dataset": 2, "SFT": 2, "ckpt": 3, "reward fn (remote)": 1, "GRPO": 8, "train": 7, "LoRA": 1, "policy": 1,
        "multi-turn": 1, "validation": 1, "rollout": 1, "logging": 1, "distillation": 1, "cross: PP": 1,
        "cross: GRPO + LoRA": 1, "cross: staleness": 1, "worker check": 2, "colocated check": 1,
    }  # fmt: skip
