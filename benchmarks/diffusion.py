"""Diffusion training on this machine: `python -m benchmarks.diffusion [PART ...]`, all parts without a name.

    cached      a step of SFT whose rows are prepared, against the same step that reads, decodes and encodes them first
    sft, nft    a step of the stage as users run it (its loop, rollouts, rewards in their processes, logging) against a
                plain loop with diffusers and torch on the same work (tests/reference), turn by turn in one process
    operations  what a step of Stable Diffusion 3.5 medium is made of, counted, not run

`cached` takes the tiny pipeline of Stable Diffusion 3.5 of the tests (0.09 million weights), `sft` and `nft` that and
the one of the digits demo (0.6 million). Nothing is downloaded. Of peak: the share of what a large float32 matrix
product does on the machine; operations are those of the plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.diffusion_shapes import flops_of, sd35_step_flops
from configs.demo.digits import WORDS, make_pipeline
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.data.flow_sample import derive_seed
from cosmos_core.data.kinds.media import NoisyRows, make_noise_sampler
from cosmos_core.data.media_items import MediaContent
from cosmos_core.data.media_pixels import FrameSettings, decode_media
from cosmos_core.data.media_rows import MediaRow, open_media
from cosmos_core.models.flops import measure_matmul_flops
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.setup import open_trainer, train
from tests import tiny_pipelines
from tests.reference import diffusion_runs, plain_diffusion_nft, plain_diffusion_sft

PARTS = ("cached", "sft", "nft", "operations")
WARM_UP = 2
SFT = plain_diffusion_sft.Settings(
    batch=8, learning_rate=1e-4, adam_epsilon=1e-8, weight_decay=0.0, clip_norm=1.0, prompt_dropout=0.1, max_tokens=16,
    seed=1,
)  # fmt: skip
NFT = plain_diffusion_nft.Settings(
    prompts_per_step=4, completions=8, num_steps=10, num_levels=4, size=16, batch=32, per_update=32, beta=1.0,
    kl_beta=1e-4, learning_rate=1e-4, adam_epsilon=1e-8, clip_norm=1.0, max_tokens=16, seed=1,
)  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """Of each step, ours and theirs in turns."""

    ours: list[float]
    theirs: list[float]
    images: int
    flops: float = 0.0

    @property
    def ratio(self) -> float:
        """Return how many times faster ours is: the median of what each pair of neighbours says."""
        return statistics.median(b / a for a, b in zip(self.ours, self.theirs, strict=True))


def cached_against_uncached(
    folder: Path, model: Path, size: int, source: int, options: argparse.Namespace
) -> tuple[Seconds, dict[str, float]]:
    """Train the same rows from prepared files, and from text and images of `source` pixels of a side; return also the
    seconds that each part of the latter takes."""
    settings = replace(SFT, batch=options.batch, max_tokens=options.tokens)
    images = diffusion_runs.write_images(folder / "images", 2 * options.batch, source, ".jpg")
    stage, _ = diffusion_runs.sft(folder, model, images, settings, size=size, steps=1)
    trainer, algorithm = open_trainer(stage), make_algorithm(stage.recipe)
    adapter: Any = trainer.adapter
    assert stage.data is not None
    rows, family = open_media(stage.data, "train"), adapter.family
    draws = make_noise_sampler(rows, stage.recipe.policy.diffusers, adapter)
    feed = RowFeed(NoisyRows(rows, draws), stage.recipe.train, stage.recipe.policy.model_max_length, num_dp_ranks=1)
    spent: dict[str, list[float]] = {"read, decode, resize": [], "text encoders": [], "VAE": [], "train": []}

    def learn(samples: Any) -> None:
        for update in algorithm.updates(samples, trainer):
            trainer.update(update)

    def uncached(step: int) -> None:
        times = [_now()]
        [chosen] = feed.micro_batches(step).values()
        read = [decode_media(MediaContent(False, images[i][1]), FrameSettings((size, size)), 0.0) for i in chosen]
        pixels = torch.from_numpy(np.stack(read)).float() / 127.5 - 1
        times.append(_now())
        text = family.text_embedding([images[i][0] for i in chosen])
        times.append(_now())
        means, logvars = family.visual_embedding(pixels.movedim(-1, 1).contiguous())
        times.append(_now())
        rows = [MediaRow(i, "", {n: v[b] for n, v in text.items()}, means[b], logvars[b]) for b, i in enumerate(chosen)]
        learn([draws.sample(row, derive_seed(step, i)) for row, i in zip(rows, chosen, strict=True)])
        times.append(_now())
        for name, began, ended in zip(spent, times[:-1], times[1:], strict=True):
            spent[name].append(ended - began)

    found = _in_turns(lambda step: learn(feed.samples(step)[0]), uncached, options.steps)
    seconds = Seconds(*found, options.batch)
    return seconds, {name: statistics.median(values[WARM_UP:]) for name, values in spent.items()}


def against_plain_loop(stage: Any, plain: Any, steps: int, images: int) -> Seconds:
    """Run a stage to its end, with a step of the plain loop after each of its own."""
    ours: list[float] = []
    theirs: list[float] = []
    began = [_now()]

    def follow(line: dict[str, Any]) -> None:
        ended = _now()
        ours.append(ended - began[0])
        plain.step(len(theirs))
        began[0] = _now()
        theirs.append(began[0] - ended)

    stage.metrics.line_callbacks.append(follow)
    train(stage)
    assert len(ours) == WARM_UP + steps, "other lines than those of steps"
    return Seconds(ours[WARM_UP:], theirs[WARM_UP:], images, flops_of(lambda: plain.step(steps)))


def _sft(folder: Path, model: Path, size: int, options: argparse.Namespace) -> Seconds:
    batch = 4 * options.batch
    settings = replace(SFT, batch=batch, max_tokens=options.tokens)
    images = diffusion_runs.write_images(folder / "images", 2 * batch, size)
    stage, plain = diffusion_runs.sft(folder, model, images, settings, size=size, steps=WARM_UP + options.steps)
    plain.prepare()
    return against_plain_loop(stage, plain, options.steps, batch)


def _nft(folder: Path, model: Path, size: int, options: argparse.Namespace) -> Seconds:
    settings = replace(NFT, completions=options.batch, size=size, max_tokens=options.tokens, batch=4 * options.batch)
    stage, plain = diffusion_runs.nft(folder, model, list(WORDS), settings, steps=WARM_UP + options.steps)
    return against_plain_loop(stage, plain, options.steps, settings.prompts_per_step * settings.completions)


def _in_turns(one: Callable[[int], None], other: Callable[[int], None], steps: int) -> tuple[list[float], list[float]]:
    found: tuple[list[float], list[float]] = ([], [])
    for step in range(WARM_UP + steps):
        for run, seconds in zip((one, other), found, strict=True):
            began = _now()
            run(step)
            seconds.append(_now() - began)
    return found[0][WARM_UP:], found[1][WARM_UP:]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _cached_table(folder: Path, model: Path, options: argparse.Namespace) -> Table:
    table = Table("pixels", "of the file", "prepared", "not", "ratio", title="SFT step, ms; the median of each")
    for size, source in ((16, 16), (16, 512), (32, 32), (32, 1024)):
        found, spent = cached_against_uncached(folder / f"cached-{size}-{source}", model, size, source, options)
        if not table.rows:
            for name in spent:
                table.add_column(name)
        table.add_row(
            str(size), str(source), *(f"{1000 * statistics.median(s):.1f}" for s in (found.ours, found.theirs)),
            f"{found.ratio:.2f}", *(f"{1000 * value:.1f}" for value in spent.values()),
        )  # fmt: skip
    return table


def _plain_table(folder: Path, tiny: Path, parts: list[str], options: argparse.Namespace) -> Table:
    digits = folder / "digits"
    make_pipeline(64, 4, 10, 0)[0].save_pretrained(digits)
    rate = measure_matmul_flops(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    table = Table("", "pipeline", title=f"against a plain loop; matrix products of {rate / 1e9:.0f} GFLOP/s")
    for column in ("step, ms", "plain, ms", "ratio", "images/s", "of peak", "plain, of peak"):
        table.add_column(column, justify="right")
    for part in parts:
        for name, model, size in (("tiny", tiny, 16), ("digits", digits, 8)):
            found = (_sft if part == "sft" else _nft)(folder / f"{part}-{name}", model, size, options)
            ours, theirs = statistics.median(found.ours), statistics.median(found.theirs)
            table.add_row(
                part, name, f"{1000 * ours:.0f}", f"{1000 * theirs:.0f}", f"{found.ratio:.2f}",
                f"{found.images / ours:.1f}", *(f"{found.flops / seconds / rate:.0%}" for seconds in (ours, theirs)),
            )  # fmt: skip
    return table


def _operations_table() -> Table:
    table = Table("pixels", title="Stable Diffusion 3.5 medium, one image, TFLOP")
    for size in (256, 512, 1024):
        found = sd35_step_flops(size)
        if not table.rows:
            for name in (*found, "all of denoiser"):
                table.add_column(name, justify="right")
        share = sum(found.values()) / next(iter(found.values()))
        table.add_row(str(size), *(f"{value / 1e12:.2f}" for value in found.values()), f"{share:.2f}")
    return table


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"any of: {', '.join(PARTS)}; none: all")
    parser.add_argument("--batch", type=int, default=8, help="images of a step of `cached`, a quarter of the others'")
    parser.add_argument("--steps", type=int, default=10, help="measured")
    parser.add_argument("--tokens", type=int, default=16, help="of the T5, beside those of the CLIPs")
    options = parser.parse_args()
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    parts = options.parts or list(PARTS)
    console = Console(highlight=False, width=140)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tiny = tiny_pipelines.save("sd3", folder / "tiny")
        if "cached" in parts:
            console.print(_cached_table(folder, tiny, options))
        if plain := [part for part in parts if part in ("sft", "nft")]:
            console.print(_plain_table(folder, tiny, plain, options))
        if "operations" in parts:
            console.print(_operations_table())


if __name__ == "__main__":
    main()
