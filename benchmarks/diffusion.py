"""A step of diffusion SFT with everything prepared against one that encodes its rows first:
`python -m benchmarks.diffusion [--model FOLDER] [--batch N] [--steps N] [--size PIXELS]
[--tokens N]`.

Without `--model` it is a pipeline of Stable Diffusion 3.5 with 0.1 million parameters, which needs no download.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.media_rows import open_media
from cosmos_core.run.stage import Stage
from cosmos_core.train.feeds import MediaFeed
from cosmos_core.train.setup import open_trainer
from tasks.kinds import all_kinds

_WORDS = ("red", "green", "blue", "yellow", "black", "white")
_WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """Seconds of a step, the median of all."""

    cached: float
    uncached: float
    batch: int

    @property
    def ratio(self) -> float:
        """Return how many times faster a step is with everything prepared."""
        return self.uncached / self.cached


def cached_against_uncached(
    folder: Path, model: Path, *, size: int = 32, batch: int = 8, steps: int = 10, tokens: int = 16
) -> Measured:
    """Train the same rows from the prepared files, and from their text and pixels."""
    recipe = _recipe(write_images(folder / "images", 2 * batch, size), size, batch, tokens)
    prepare.run(_stage(folder / "prepare", "prepare", recipe, model))
    stage = replace(_stage(folder / "sft", "sft", recipe, model), data=folder / "prepare" / "data")
    trainer, algorithm = open_trainer(stage), make_algorithm(recipe)
    rows = open_media(folder / "prepare" / "data", "train")
    feed, family = MediaFeed(rows, recipe, trainer.adapter), trainer.adapter.family  # type: ignore[attr-defined]
    files = {json.loads(file.read_text())["prompt"]: file.with_suffix(".png") for file in _described(folder)}

    def learn(step: int, *, encodes: bool) -> None:
        samples = feed.samples(step)[0]
        if encodes:
            chosen = [rows[i].prompt for i in feed.positions(step).tolist()]
            text = family.text_embedding(chosen)
            latents, _ = family.visual_embedding(torch.stack([_pixels(files[prompt]) for prompt in chosen]))
            assert latents.shape[1:] == samples[0].latents.shape
            samples = [replace(s, text={n: v[i] for n, v in text.items()}) for i, s in enumerate(samples)]
        for update in algorithm.updates(samples, trainer):
            trainer.update(update)

    times = {encodes: _median(lambda step, e=encodes: learn(step, encodes=e), steps) for encodes in (False, True)}
    return Measured(times[False], times[True], batch)


def write_images(folder: Path, count: int, size: int) -> Path:
    """Write images of one colour each, with their prompts."""
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:04}.json").write_text(json.dumps({"prompt": f"{i} {_WORDS[i % len(_WORDS)]}"}))
        noise = np.random.default_rng(i).integers(0, 256, (size, size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{i:04}.png")
    return folder


def _median(run: Callable[[int], None], steps: int) -> float:
    seconds = []
    for step in range(_WARM_UP + steps):
        began = time.perf_counter()
        run(step)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[_WARM_UP:])


def _described(folder: Path) -> list[Path]:
    return sorted((folder / "images").glob("*.json"))


def _pixels(file: Path) -> torch.Tensor:
    return torch.from_numpy(np.asarray(Image.open(file)).copy()).movedim(-1, 0) / 127.5 - 1


def _recipe(images: Path, size: int, batch: int, tokens: int) -> Recipe:
    values: dict[str, Any] = {
        "train": {
            "compile": False, "param_dtype": "bfloat16" if torch.cuda.is_available() else "float32", "epoch": 10_000,
            "train_batch_per_replica": batch,
            "train_policy": {"type": "sft", "mini_batch": batch, "dataset": {"local_dir": str(images)}},
        },
        "policy": {
            "is_diffusers": True, "model_gradient_checkpointing": False,
            "diffusers": {"inference_size": [size, size], "offload": False, "max_prompt_length": tokens},
        },
    }  # fmt: skip
    return Recipe.model_validate(values)


def _stage(path: Path, kind: str, recipe: Recipe, model: Path) -> Stage:
    path.mkdir(parents=True)
    return Stage(path, StageConfig(name=kind, kind=kind), recipe, str(model), None, {}, "f", all_kinds()[kind])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16, help="longest prompt")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = options.model
        if model is None:
            from tests import tiny_pipelines

            model = tiny_pipelines.save("sd3", folder / "model")
        found = cached_against_uncached(
            folder, model, size=options.size, batch=options.batch, steps=options.steps, tokens=options.tokens
        )
    console = Console(highlight=False)
    for name, seconds in (("prepared", found.cached), ("encoded in the step", found.uncached)):
        console.print(f"SFT, {name}: {1000 * seconds:.1f} ms per step, {found.batch / seconds:.1f} images/s")
    console.print(f"ratio {found.ratio:.2f}")


if __name__ == "__main__":
    main()
