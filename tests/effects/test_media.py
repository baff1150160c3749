"""Keys of the data of diffusion models: what a `prepare` stage encodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.media_rows import open_media, open_media_prompts
from cosmos_core.data.prepare_media import Encoders, prepare
from tests.effects.change import SFT, Change, changes, stage_of
from tests.unit.media_stage import FakeEncoders, with_rows
from tests.unit.test_media_source import png, write_clip, write_pairs

TRAIN, HELD_OUT = "train.train_policy.dataset", "validation.dataset"
SIZE = {"policy.is_diffusers": True, "policy.diffusers.inference_size": [16, 16]}
IMAGES = {**SFT, **SIZE, f"{TRAIN}.name": "images", f"{HELD_OUT}.name": "images"}
CLIPS = {**SFT, **SIZE, "policy.diffusers.train_frames": 5, f"{TRAIN}.name": "clips", f"{HELD_OUT}.name": "clips"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two folders of images, of which one is not square, and one of clips."""
    monkeypatch.chdir(tmp_path)
    for name in ("images", "others"):
        write_pairs(tmp_path / name)
        (tmp_path / name / "0001.png").write_bytes(png((0, 9 * len(name), ord(name[0])), (40, 20)))
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "1.json").write_text(json.dumps({"prompt": "brighter"}))
    write_clip(tmp_path / "clips" / "1.mp4", 24)
    return tmp_path


def prepared(recipe: Recipe, folder: Path, *, is_video: bool = False) -> dict[str, list[tuple[object, ...]]]:
    """Shape and values of each latent of each split."""
    stage = stage_of(folder / "run" / "stages" / "stage", with_rows(recipe, "media"), kind="prepare")
    prepare(stage, Encoders(FakeEncoders(is_video=is_video), "encoders"))
    splits = {split: open_media(stage.path / "data", split) for split in ("train", "validation")}
    assert len(open_media_prompts(stage.path / "data", "train")) == len(splits["train"])
    return {split: [(row.mean.shape, row.mean.sum().item()) for row in rows] for split, rows in splits.items()}


@changes(
    Change(f"{TRAIN}.local_dir", "others", IMAGES),
    Change(f"{TRAIN}.aspect_ratio_buckets", True, IMAGES),
    Change("policy.diffusers.inference_size", [8, 8], IMAGES),
)
def test_it_changes_the_images_that_are_learned(change: Change, folder: Path) -> None:
    before, after = (prepared(recipe, folder)["train"] for recipe in (change.before, change.after))
    assert before[1] != after[1]


@changes(Change(f"{HELD_OUT}.local_dir", "others", IMAGES), Change(f"{HELD_OUT}.aspect_ratio_buckets", True, IMAGES))
def test_it_changes_the_images_that_are_held_out(change: Change, folder: Path) -> None:
    before, after = (prepared(recipe, folder) for recipe in (change.before, change.after))
    assert before["train"] == after["train"]
    assert before["validation"][1] != after["validation"][1]


@changes(
    (Change(f"{TRAIN}.frame_sampling", "uniform", CLIPS), "train"),
    (Change(f"{HELD_OUT}.frame_sampling", "uniform", CLIPS), "validation"),
    (Change("policy.diffusers.train_frames", 9, CLIPS), "train"),
)
def test_it_changes_the_frames_that_are_learned(change: Change, expected: str, folder: Path) -> None:
    before, after = (prepared(recipe, folder, is_video=True) for recipe in (change.before, change.after))
    assert before[expected] != after[expected]
