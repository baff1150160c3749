"""The world of the digits demo: its data set, its pipeline, and two classifiers that share no digit; and the pipeline
of the demo with images of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import numpy as np
import pytest
from PIL import Image

from configs.demo import digits, images
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.errors import DataError
from cosmos_core.run.files import sha256
from cosmos_core.run.stage import Stage
from tests.effects.change import recipe, stage_of


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    made = stage_of(tmp_path_factory.mktemp("run") / "stages" / "task", recipe({"train.train_policy.type": "sft"}))
    outcome = digits.make(made, train_images=80, vae_steps=4)
    assert outcome.info == {"model": "model", "data": "data"}
    return made


def shown(folder: Path) -> list[tuple[str, Image.Image]]:
    return [
        (json.loads(file.read_text())["prompt"], Image.open(file.with_suffix(".png")))
        for file in sorted(folder.glob("*.json"))
    ]


def test_images_show_the_digit_that_their_prompt_names_to_both_classifiers(stage: Stage) -> None:
    images = shown(stage.path / "data" / "train")
    assert len(images) == 80
    judged = [digits.judge("", "", prompt=prompt, media=image) for prompt, image in images]
    liked = [digits.likeness("", "", prompt=prompt, media=image) for prompt, image in images]
    assert np.mean(judged) > 0.97
    assert np.mean(liked) > 0.8
    others = [digits.judge("", "", prompt=digits.WORDS[(digits.WORDS.index(p) + 1) % 10], media=i) for p, i in images]
    assert np.mean(others) < 0.03


def test_held_out_are_the_ten_prompts(stage: Stage) -> None:
    files = sorted((stage.path / "data" / "validation").iterdir())
    assert [json.loads(file.read_text())["prompt"] for file in files] == list(digits.WORDS)


def test_the_pipeline_loads_draws_and_is_the_same_each_time(stage: Stage, tmp_path: Path) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(stage.path / "model")
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline("seven", num_inference_steps=2, guidance_scale=1.0, height=8, width=8, max_sequence_length=8)
    assert image.images[0].size == (8, 8)
    again = stage_of(tmp_path / "stages" / "task", stage.recipe)
    digits.make(again, train_images=80, vae_steps=4)
    for name in ("vae", "transformer"):
        file = f"model/{name}/diffusion_pytorch_model.safetensors"
        assert sha256(stage.path / file) == sha256(again.path / file)


def test_a_pipeline_for_images_of_ones_own_is_made_without_those_that_are_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(3):
        Image.new("RGB", (64, 64), (80 * i, 0, 0)).save(folder / f"{i}.png")
        (folder / f"{i}.txt").write_text(f"number {i}")
    (folder / "1.png").write_bytes((folder / "1.png").read_bytes()[:60])
    dataset = DatasetConfig(local_dir=str(folder))
    images.write_pipeline(dataset, tmp_path / "model", width=32, layers=1, vae_steps=1)
    assert (tmp_path / "model/model_index.json").is_file()
    for i in (0, 2):
        (folder / f"{i}.png").unlink()
    with pytest.raises(DataError, match="no image with a caption"):
        images.write_pipeline(dataset, tmp_path / "other", vae_steps=1)
