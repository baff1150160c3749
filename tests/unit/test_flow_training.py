"""Trainings on rollouts of diffusion models as stages: prompts in, a better reward and an export out, and resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.data import prepare
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import run
from tests import tiny_pipelines
from tests.effects.change import recipe, stage_of

REWARD = """
def red(to_be_evaluated, reference, prompt, media, metadata):
    assert media.size == (32, 32) and metadata["wants"] == reference == prompt.split()[0], (media, metadata, prompt)
    pixels = list(media.getdata())
    return sum(pixel[0] for pixel in pixels) / len(pixels) / 255
"""
PROMPTS = ["7 red", "blue cat", "a dog", "x y", "1 tree", "q house"]
BASE: dict[str, Any] = {
    "train.compile": False, "train.param_dtype": "float32", "train.train_batch_per_replica": 8, "train.optm_lr": 2e-3,
    "train.optm_warmup_steps": 0, "train.epoch": 4, "train.ckpt.enable_checkpoint": True, "train.ckpt.save_freq": 2,
    "train.train_policy.type": "grpo", "train.train_policy.mini_batch": 4, "train.ema_enable": True,
    "train.ema_decay": 0.9, "train.ema_update_step_interval": 1, "train.train_policy.response_column_name": "wants",
    "policy.is_diffusers": True, "policy.diffusers.max_prompt_length": 16, "policy.diffusers.inference_size": [32, 32],
    "policy.diffusers.sample.num_steps": 4, "policy.diffusers.sample.eval_num_steps": 4,
    "policy.diffusers.sample.guidance_scale": 1.0, "rollout.backend": "flow_sampler", "rollout.n_generation": 4,
    "rollout.batch_size": 2,
}  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "nft": {
        "train.train_policy.trainer_type": "diffusion_nft", "train.train_policy.kl_beta": 1e-4,
        "policy.diffusers.weight_copy_decay_type": 1, "policy.diffusers.sample.deterministic_sampling": True,
        "policy.diffusers.timesteps_fraction": 0.99,
    },
    "flow_grpo": {
        "train.train_policy.trainer_type": "flow_grpo", "policy.diffusers.sample.solver": "flow",
        "policy.diffusers.flow_rl.train_on": [0, 1, 2], "train.train_policy.kl_beta": 0.01,
    },
}  # fmt: skip
LORA = {"policy.lora.r": 4, "policy.lora.lora_alpha": 8.0}


class Inputs:
    """Of each family a pipeline and prepared prompts, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "reward.py").write_text(REWARD)
        (folder / "prompts").mkdir()
        lines = [json.dumps({"prompt": prompt, "wants": prompt.split()[0]}) + "\n" for prompt in PROMPTS]
        (folder / "prompts" / "train.jsonl").write_text("".join(lines))

    def stage(self, path: Path, family: str = "sd3", **settings: Any) -> Stage:
        model, data = self.folder / family, self.folder / f"{family}-data"
        reward = {"train.train_policy.reward_function": f"{self.folder / 'reward.py'}:red"}
        dataset = {"train.train_policy.dataset.name": str(self.folder / "prompts")}
        config = recipe({**BASE, **reward, **dataset, **settings})
        if not model.exists():
            tiny_pipelines.save(family, model)
        if not data.exists():
            prepare.run(stage_of(data, config, kind="prepare", model=model))
        return stage_of(path, config, kind="rl", model=model, data=data / "data")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def metrics_of(stage: Stage) -> list[dict[str, Any]]:
    return [line for line in read_metrics(stage.path / "metrics.jsonl") if "loss" in line]


def checkpoint(stage: Stage, step: int) -> dict[str, torch.Tensor]:
    return read_tensors(stage.path / "checkpoints" / f"step_{step}" / "policy")


@pytest.mark.parametrize("weights", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", list(TRAININGS))
def test_a_training_raises_its_reward_and_is_exported(
    inputs: Inputs, name: str, weights: dict[str, Any], tmp_path: Path
) -> None:
    rate = {"train.optm_lr": 2e-2} if weights else {}
    stage = inputs.stage(tmp_path / "rl", **TRAININGS[name], **weights, **rate)
    outcome = run(stage)
    found = metrics_of(stage)
    assert len(found) == 12
    assert all(line["reward/invalid"] == 0 and line["watch/alarm"] == 0 for line in found)
    assert outcome.info["checks"]
    rewards = [line["reward/mean"] for line in found]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
