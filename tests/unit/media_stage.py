"""Stages that prepare media with encoders that count their work."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.prepare_media import Encoders, prepare
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds


class FakeEncoders:
    """The text's length and first letter as an embedding, the mean colour of pixels as a latent; counts its work."""

    component_offload = SimpleNamespace(keep_on_device=nullcontext)
    prompt_tokenizer = ("words", 2)
    folder = SimpleNamespace(components=("words",), load=lambda name: SimpleNamespace(encode=str.split))

    size_multiple = 4

    def __init__(self, die_at: int = 0, *, is_video: bool = False, frame_multiple: int = 1) -> None:
        self.is_video, self.pixels_per_latent = is_video, (frame_multiple, 4)
        self.texts: list[str] = []
        self.media = 0
        self.die_at = die_at

    def text_embedding(self, prompts):
        self.texts += prompts
        ids = torch.tensor([[len(prompt), ord(prompt[:1] or " ")] for prompt in prompts])
        return {"embeds": ids.float()[:, None], "mask": ids[:, :1] > 0}

    def visual_embedding(self, pixels):
        self.media += len(pixels)
        if self.die_at and self.media >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        mean = torch.nn.functional.avg_pool2d(pixels.flatten(1, -3), 4) if pixels.ndim == 4 else pixels
        return mean, torch.zeros_like(mean)


def with_rows(recipe: Recipe, rows: str) -> Recipe:
    """The recipe with an algorithm that learns from other rows."""
    policy = recipe.train.train_policy
    table = type("Policy", (type(policy),), {"rows": rows, "__module__": __name__})
    return recipe.copy_with(train=recipe.train.copy_with(train_policy=table.model_construct(**dict(policy))))


def make_stage(path: Path, source: Path, rows: str = "media", **recipe) -> Stage:
    path.mkdir(parents=True, exist_ok=True)
    dataset = recipe.pop("dataset", {})
    diffusers = {"inference_size": [8, 8], **recipe.pop("diffusers", {})}
    values = {
        "train": {"train_policy": {"type": "sft", "dataset": {"local_dir": str(source), **dataset}}},
        "policy": {"is_diffusers": True, "diffusers": diffusers},
        **recipe,
    }
    made = with_rows(Recipe.model_validate(values), rows)
    config = StageConfig(name=path.name, kind="prepare")
    return Stage(path, config, made, "model", None, {}, "f", all_kinds()["prepare"])


def prepared(path: Path, source: Path, encoders=None, **recipe):
    """Return the outcome, and the encoders."""
    encoders = encoders or FakeEncoders()
    stage = make_stage(path, source, **recipe)
    encoders.is_video = recipe.get("diffusers", {}).get("is_video", False)
    return prepare(stage, Encoders(encoders, "encoders")), encoders


def stage_path(runs: Path, run_id: int = 1) -> Path:
    return runs / str(run_id) / "stages" / "prepare"
