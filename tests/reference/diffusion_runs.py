"""The same training by a stage of the system and by a plain loop, for the test that compares their weights and for the
benchmark that compares their time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from cosmos_core.data import prepare
from cosmos_core.run.stage import Stage
from tests.effects.change import recipe, stage_of
from tests.reference import plain_diffusion_nft, plain_diffusion_sft
from tests.reference.redness import redness

WORDS = ("red", "green", "blue", "yellow", "black", "white")
_COMMON: dict[str, Any] = {
    "train.compile": False, "train.param_dtype": "float32", "train.optm_warmup_steps": 0, "train.epoch": 10_000,
    "train.ckpt.enable_checkpoint": False, "train.train_policy.dataloader_shuffle": False,
    "policy.is_diffusers": True, "policy.model_gradient_checkpointing": False, "policy.diffusers.offload": False,
}  # fmt: skip


def write_images(folder: Path, count: int, size: int, suffix: str = ".png") -> list[tuple[str, Path]]:
    """Write images of smooth noise, each with its prompt, and return both."""
    folder.mkdir(parents=True)
    rows = []
    for i in range(count):
        prompt, path = f"{i} {WORDS[i % len(WORDS)]}", folder / f"{i:04}{suffix}"
        path.with_suffix(".json").write_text(json.dumps({"prompt": prompt}))
        noise = np.random.default_rng(i).integers(0, 256, (max(8, size // 8), max(8, size // 8), 3), dtype=np.uint8)
        Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC).save(path)
        rows.append((prompt, path))
    return rows


def sft(
    folder: Path,
    model: Path,
    rows: Sequence[tuple[str, Path]],
    settings: plain_diffusion_sft.Settings,
    *,
    size: int,
    steps: int,
) -> tuple[Stage, plain_diffusion_sft.Training]:
    """Return a stage that is ready to train on images of a folder, and the plain loop of the same work."""
    whole = recipe({
        **_COMMON, "train.train_policy.type": "sft", "train.train_policy.mini_batch": settings.batch,
        "train.train_policy.dataset.local_dir": str(rows[0][1].parent), "train.seed": settings.seed,
        "train.train_policy.dataloader_seed": settings.seed, "train.max_num_steps": steps,
        "train.train_batch_per_replica": settings.batch, "train.optm_lr": settings.learning_rate,
        "train.epsilon": settings.adam_epsilon, "train.optm_weight_decay": settings.weight_decay,
        "train.optm_grad_norm_clip": settings.clip_norm, "policy.diffusers.prompt_dropout": settings.prompt_dropout,
        "policy.diffusers.max_prompt_length": settings.max_tokens, "policy.diffusers.inference_size": [size, size],
    })  # fmt: skip
    prepare.run(stage_of(folder / "prepare", whole, kind="prepare", model=model))
    stage = stage_of(folder / "sft", whole, kind="sft", model=model, data=folder / "prepare" / "data")
    return stage, plain_diffusion_sft.Training(model, rows, settings)


def nft(
    folder: Path,
    model: Path,
    prompts: Sequence[str],
    settings: plain_diffusion_nft.Settings,
    *,
    steps: int,
) -> tuple[Stage, plain_diffusion_nft.Training]:
    """Return a stage that is ready to train, and the plain loop of the same work."""
    (folder / "prompts").mkdir(parents=True)
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "prompts" / "train.jsonl").write_text("".join(lines))
    size = settings.size
    whole = recipe({
        **_COMMON, "train.train_policy.type": "grpo", "train.train_policy.trainer_type": "diffusion_nft",
        "train.train_policy.dataset.name": str(folder / "prompts"), "train.train_policy.mini_batch": settings.batch,
        "train.train_policy.reward_function": "tests.reference.redness:redness",
        "train.train_policy.batch_size_per_optimize": settings.per_update,
        "train.train_policy.kl_beta": settings.kl_beta, "train.seed": settings.seed, "train.max_num_steps": steps,
        "train.train_policy.dataloader_seed": settings.seed,
        "train.train_batch_per_replica": settings.prompts_per_step * settings.completions,
        "train.optm_lr": settings.learning_rate, "train.epsilon": settings.adam_epsilon,
        "train.optm_weight_decay": 0.0, "train.optm_grad_norm_clip": settings.clip_norm,
        "policy.diffusers.max_prompt_length": settings.max_tokens, "policy.diffusers.inference_size": [size, size],
        "policy.diffusers.timesteps_fraction": (settings.num_levels + 0.5) / settings.num_steps,
        "policy.diffusers.nft_beta": settings.beta,
        "policy.diffusers.sample": {"num_steps": settings.num_steps, "guidance_scale": 1.0, "solver": "dpm2",
                                    "deterministic_sampling": True},
        "rollout.backend": "flow_sampler", "rollout.n_generation": settings.completions,
        "rollout.batch_size": settings.prompts_per_step,
    })  # fmt: skip
    prepare.run(stage_of(folder / "prepare", whole, kind="prepare", model=model))
    stage = stage_of(folder / "nft", whole, kind="rl", model=model, data=folder / "prepare" / "data")
    plain = plain_diffusion_nft.Training(model, prompts, lambda _, image: redness("", "", media=image), settings)
    return stage, plain
