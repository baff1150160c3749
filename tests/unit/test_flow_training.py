"""Trainings on rollouts of diffusion models as stages: prompts in, a better reward and an export out; resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.algorithms import flow_rl
from cosmos_core.data import prepare
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import tuning
from cosmos_core.train.setup import run, train
from tests import tiny_pipelines
from tests.effects.change import recipe, stage_of
from tests.unit.test_flow_rl import Run
from tests.unit.test_media_source import png
from tests.unit.trainers import assert_same_weights, curve, train_until

REWARD = """
def red(to_be_evaluated, reference, prompt, media, metadata):
    assert media.size == (32, 32) and metadata["wants"] == reference == prompt.split()[0], (media, metadata, prompt)
    pixels = list(media.getdata())
    return sum(pixel[0] for pixel in pixels) / len(pixels) / 255


def bright(to_be_evaluated, reference, media):
    if hasattr(media, "getdata"):
        return sum(sum(pixel) for pixel in media.getdata()) / 1e5
    assert media.shape == (5, 32, 32, 3) and media.dtype == "uint8", media.shape
    return float(media.mean())
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
SMALL = {"train.train_batch_per_replica": 4, "train.train_policy.mini_batch": 2, "rollout.n_generation": 2}


class Inputs:
    """Of each family a pipeline and prepared prompts, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "reward.py").write_text(REWARD)
        (folder / "prompts").mkdir()
        lines = [json.dumps({"prompt": prompt, "wants": prompt.split()[0]}) + "\n" for prompt in PROMPTS]
        (folder / "prompts" / "train.jsonl").write_text("".join(lines))

    def model(self, family: str) -> Path:
        path = self.folder / family
        return path if path.exists() else tiny_pipelines.save(family, path)

    def stage(self, path: Path, family: str = "sd3", **settings: Any) -> Stage:
        model, data = self.model(family), self.folder / f"{family}-data"
        reward = {"train.train_policy.reward_function": f"{self.folder / 'reward.py'}:red"}
        dataset = {"train.train_policy.dataset.name": str(self.folder / "prompts")}
        config = recipe({**BASE, **reward, **dataset, **settings})
        if not data.exists():
            prepare.run(stage_of(data, config, kind="prepare", model=model))
        return stage_of(path, config, kind="rl", model=model, data=data / "data")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def metrics_of(stage: Stage) -> list[dict[str, Any]]:
    return [line for line in read_metrics(stage.path / "metrics.jsonl") if "loss" in line]


@pytest.mark.full
@pytest.mark.parametrize("weights", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["flow_grpo", "nft"])
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


@pytest.mark.parametrize(
    ("name", "weights"),
    [("nft", {}), *(pytest.param(name, LORA, marks=pytest.mark.full) for name in TRAININGS)],
    ids=str,
)
def test_a_training_that_stopped_ends_with_the_same_bits(
    inputs: Inputs, name: str, weights: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**TRAININGS[name], **weights, **SMALL, "train.max_num_steps": 3}
    whole, stopped = (inputs.stage(tmp_path / each, **settings) for each in ("whole", "stopped"))
    through = train(whole)
    train_until(stopped, 1)
    assert_same_weights(train(stopped).adapter.model, through.adapter.model)
    assert curve(stopped) == curve(whole)
    kept, other = (tensors_of(stage, 2) for stage in (whole, stopped))
    copies = {"old", "reference"} if name == "nft" else {"reference"}
    assert {name.partition(".")[0] for name in kept} >= {"model", "optimizer", "ema"} | copies
    assert kept.keys() == other.keys() and all(torch.equal(kept[n], other[n]) for n in kept)


@pytest.mark.parametrize("name", ["nft", pytest.param("flow_grpo", marks=pytest.mark.full)])
def test_a_training_with_a_measured_micro_batch_is_the_one_that_names_it(
    inputs: Inputs, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "MAX_TUNING_SECONDS", 0.05)  # what is chosen does not matter here
    settings = {**TRAININGS[name], **SMALL, "train.max_num_steps": 1}
    measured = inputs.stage(tmp_path / "auto", **{**settings, "train.train_policy.mini_batch": "auto"})
    found = train(measured)
    size = int(metrics_of(measured)[0]["tuning/rows_per_pass"])
    named = inputs.stage(tmp_path / "named", **{**settings, "train.train_policy.mini_batch": size})
    assert_same_weights(found.adapter.model, train(named).adapter.model)


def tensors_of(stage: Stage, step: int) -> dict[str, torch.Tensor]:
    parts = (stage.path / f"checkpoints/step_{step}/policy").rglob("*.safetensors")
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.full] * (name != of_family))
        for family, of_family in (("sana", ""), ("sana_video", ""), ("cosmos_predict", "flow_grpo"))
        for name in TRAININGS
    ],
)
def test_every_family_is_trained(inputs: Inputs, family: str, name: str, tmp_path: Path) -> None:
    reward = {"train.train_policy.reward_function": f"{inputs.folder / 'reward.py'}:bright"}
    stage = inputs.stage(
        tmp_path / "rl", family, **TRAININGS[name], **LORA, **reward,
        **{"train.max_num_steps": 1, "policy.diffusers.inference_frames": 5},
    )  # fmt: skip
    train(stage)
    assert [line["reward/invalid"] for line in metrics_of(stage)] == [0]


@pytest.mark.parametrize("name", [pytest.param("nft", marks=pytest.mark.full), "ddrl"])
def test_real_images_are_learned_beside_rollouts(inputs: Inputs, name: str, tmp_path: Path) -> None:
    (tmp_path / "media").mkdir()
    for i in range(4):
        (tmp_path / f"media/{i:04}.json").write_text(json.dumps({"prompt": f"{i} red", "wants": str(i)}))
        (tmp_path / f"media/{i:04}.png").write_bytes(png((40 * i, 100, 128), (32, 32)))
    algorithm = {
        "nft": {**TRAININGS["nft"], "train.train_policy.learns_data": True},
        "ddrl": {**TRAININGS["flow_grpo"], "train.train_policy.trainer_type": "ddrl"},
    }[name]
    config = recipe({
        **BASE, **algorithm, "train.train_policy.reward_function": f"{inputs.folder / 'reward.py'}:red",
        "policy.diffusers.flow_rl.data_beta": 0.5, "train.train_policy.dataset.local_dir": str(tmp_path / "media"),
        "train.max_num_steps": 1,
    })  # fmt: skip
    model = inputs.model("sd3")
    prepare.run(stage_of(tmp_path / "data", config, kind="prepare", model=model))
    stage = stage_of(tmp_path / "rl", config, kind="rl", model=model, data=tmp_path / "data/data")
    train(stage)
    assert all(0 < line["data/flow_error"] < 10 for line in metrics_of(stage))


def test_noise_is_made_for_the_samples_of_a_micro_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(flow_rl, "make_noise", lambda shape, seed: made.append(seed) or torch.zeros(*shape))
    training = Run("sd3", tmp_path, "diffusion_nft")
    [update] = training.updates()
    samples: list[Any] = [*update.samples]
    assert len({training.adapter.batching_key(sample) for sample in samples}) == 1 and not made
    training.adapter.collate(samples[:2], [0, 1], samples[0])
    assert made == [sample.seed for sample in samples[:2]]
