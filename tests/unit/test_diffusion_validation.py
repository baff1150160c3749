"""Validation of diffusion models: held-out prompts drawn with fixed seeds, with and without rewards, by any weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cosmos_core.models.diffusion import DiffusionModel
from cosmos_core.observe.gallery import SAMPLES_FOLDER
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import validate
from cosmos_core.train.setup import train
from tests.unit.test_diffusion_sft import Inputs

QUICK: dict[str, Any] = {
    "train.max_num_steps": 2, "validation.freq": 2, "validation.val_before_train": True,
    "policy.diffusers.sample.eval_num_steps": 3, "policy.diffusers.sample.guidance_scale": 1.0,
}  # fmt: skip
REWARD = """
def redness(to_be_evaluated, reference, *, prompt, media):
    red, green, blue = (float(value) for value in __import__("numpy").asarray(media).mean((0, 1)))
    return red / 255
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


def images(stage: Stage, step: int) -> list[np.ndarray]:
    files = sorted((stage.path / SAMPLES_FOLDER / f"step_{step}").glob("*-0.png"))
    return [np.asarray(Image.open(file)) for file in files]


def validated(stage: Stage) -> list[dict[str, Any]]:
    lines = read_metrics(stage.path / "metrics.jsonl")
    return [line for line in lines if any(key.startswith("validation/") for key in line)]


def test_sft_draws_held_out_prompts_beside_their_loss_and_loads_no_text_encoder(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = inputs.stage(tmp_path / "stage", **QUICK)
    monkeypatch.setattr(DiffusionModel, "pipeline", property(lambda self: pytest.fail("a text encoder was loaded")))
    train(stage)
    assert [line["step"] for line in validated(stage)] == [0, 2]
    assert all("validation/loss" in line and "validation/reward" not in line for line in validated(stage))
    before, after = images(stage, 0), images(stage, 2)
    assert [image.shape for image in before] == [(32, 32, 3)] * 2
    assert all((one != other).any() for one, other in zip(before, after, strict=True))
    lines = [json.loads(line) for line in (stage.path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["media"], line["reward"]) for line in lines][-1] == (
        2, ["visual_output/step_2/1-0.png"], None,
    )  # fmt: skip


def test_rewards_of_validation_score_what_was_drawn_and_the_seed_is_the_same_each_time(
    inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(REWARD)
    asked = {**QUICK, "validation.reward_function": f"{tmp_path / 'mine.py'}:redness", "train.optm_lr": 1e-12}
    stage = inputs.stage(tmp_path / "stage", **asked)
    train(stage)
    expected = float(np.mean([image[..., 0].mean() / 255 for image in images(stage, 0)]))
    first, second = validated(stage)
    assert first["validation/reward"] == pytest.approx(expected, abs=1e-6)
    assert second["validation/reward"] == pytest.approx(first["validation/reward"], abs=1e-3)
    pairs = zip(images(stage, 0), images(stage, 2), strict=True)
    assert np.mean([np.abs(a.astype(int) - b).mean() for a, b in pairs]) < 1


def test_the_average_is_drawn_with_where_there_is_one(inputs: Inputs, tmp_path: Path) -> None:
    ema = {"train.ema_enable": True, "train.ema_decay": 0.999999}
    settings = {**QUICK, "train.optm_lr": 0.02}
    raw, averaged = inputs.stage(tmp_path / "raw", **settings), inputs.stage(tmp_path / "ema", **settings, **ema)
    for stage in (raw, averaged):
        train(stage)
    assert all((a == b).all() for a, b in zip(images(raw, 0), images(averaged, 0), strict=True))
    assert all((a != b).any() for a, b in zip(images(raw, 2), images(averaged, 2), strict=True))


def test_videos_are_drawn_as_clips(inputs: Inputs, tmp_path: Path) -> None:
    settings = {**QUICK, "policy.diffusers.inference_frames": 9, "policy.diffusers.is_video": True}
    stage = inputs.stage(tmp_path / "stage", "sana_video", **settings)
    assert validate.run(stage).outputs == ("metrics.json", "samples.jsonl", SAMPLES_FOLDER)
    names = sorted(file.name for file in (stage.path / SAMPLES_FOLDER / "step_0").iterdir())
    assert names == ["0-0.mp4", "1-0.mp4", "grid.png"]
