"""One GPU: what Stable Diffusion 3.5 medium and SANA of 1.6 billion weights draw and learn per second at 1,024 pixels.

    python -m benchmarks.gpu_diffusion [--batch 4] [--steps 5] [--compile] [--json FILE]

Random weights of the public shapes, float32 master and bfloat16 compute, blocks recomputed, everything prepared: no
text encoder and no VAE. `images/s` of NFT counts the samples that a step learns, each at --levels noise levels, without
their drawing, which has a line of its own. `of peak` is the share of what a large bfloat16 matrix product reaches in
the same run; recomputation does not count. Neither Ray, vLLM nor Prefect is needed, and diffusers alone of what is not
needed for text.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.diffusion_shapes import SHAPES, Shape, flops_of
from benchmarks.gpu import WARM_UP, _matmul, _now
from cosmos_core.algorithms.flow_credit import FlowRollout
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.compilation import compile_blocks
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.flow import flow_schedule
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.recompute import recompute_activations
from cosmos_core.rollout.flow_path import denoise
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import DiffusionSample, FlowSampling, Prompt

DRAWING_STEPS = 10
KINDS = ("SFT, all weights", "SFT, LoRA", "NFT, LoRA", "drawing, 10 steps")


class Bench:
    """A trainer of one shape, and its inputs."""

    def __init__(self, shape: Shape, kind: str, options: argparse.Namespace, folder: Path) -> None:
        self.shape, self.kind, self.options, self.device = shape, kind, options, torch.device(options.device)
        self.recipe = Recipe.model_validate(_recipe(kind, options), context={})
        family_class = importlib.import_module(f"cosmos_core.models.{shape.family}").FAMILY
        pipeline: Any = SimpleNamespace(settings=lambda name: {}, model=shape.family)
        family = family_class(pipeline, self.recipe.policy.diffusers, self.device)
        torch.manual_seed(0)
        with self.device:
            model = shape.make(**({"layers": options.layers} if options.layers else {}))
        recompute_activations(model, True)
        mark_trained_weights(model, self.recipe.policy, family.lora_targets)
        if options.compile:
            compile_blocks(model)
        self.adapter = Denoiser(model, family, self.recipe.train)
        self.trainer = Trainer(self.adapter, self.recipe.train, ProgressWriter(folder / "progress.json"))
        for name in self.recipe.train.train_policy.auxiliary_model_names:
            self.trainer.weight_sets.add(name)
        self.passes = [0, 0]
        model.register_forward_hook(self._count)

    def run(self) -> tuple[float, float]:
        """Return seconds and floating-point operations of a step."""
        step = self._drawing() if self.kind == KINDS[-1] else self._learning()
        began = 0.0
        for n in range(WARM_UP + self.options.steps):
            if n == WARM_UP:
                began, self.passes = _now(self.device), [0, 0]
            step(n)
        seconds = (_now(self.device) - began) / self.options.steps
        backward = 3 if self.kind == KINDS[0] else 2  # what is frozen has no gradient of its own
        passes = (self.passes[0] + backward * self.passes[1]) / self.options.steps
        return seconds, passes * self.options.batch * self._flops()

    def _count(self, *_: Any) -> None:
        self.passes[torch.is_grad_enabled()] += 1

    def _flops(self) -> float:
        """Count a forward pass of one image."""
        with torch.device("meta"), torch.no_grad():
            model = self.shape.make(**({"layers": self.options.layers} if self.options.layers else {}))
            text = {name: torch.zeros(1, *shape) for name, shape in self.shape.text.items()}
            latents, sigma_B = torch.zeros(1, *self.shape.latents), torch.zeros(1)
            return flops_of(lambda: self.adapter.family.predict(model, latents, sigma_B, text))

    def _learning(self) -> Callable[[int], None]:
        is_nft = self.kind == KINDS[2]
        sampling = make_training_sampling(self.recipe) if is_nft else None
        algorithm = make_algorithm(self.recipe, sampling)

        def step(n: int) -> None:
            samples = [(self._rollout if is_nft else self._sample)(n, b) for b in range(self.options.batch)]
            for update in algorithm.updates(samples, self.trainer):
                self.trainer.update(update)

        return step

    def _drawing(self) -> Callable[[int], None]:
        texts = [self._text(b) for b in range(self.options.batch)]
        text = {name: torch.stack([each[name] for each in texts]).to(self.device) for name in self.shape.text}
        sampling, sigmas_N = FlowSampling(DRAWING_STEPS, solver="dpm2"), flow_schedule(DRAWING_STEPS, 3.0)

        def step(n: int) -> None:
            noise = torch.randn(self.options.batch, *self.shape.latents, device=self.device)
            with torch.no_grad():
                denoise(lambda x, sigma_B: self.adapter.predict(x, sigma_B, text), noise, sigmas_N, sampling)

        return step

    def _sample(self, n: int, b: int) -> FlowSample:
        generator = torch.Generator().manual_seed(1000 * n + b)
        latents, noise = (torch.randn(self.shape.latents, generator=generator) for _ in range(2))
        return FlowSample(latents, float(torch.rand((), generator=generator)), self._text(b), noise)

    def _rollout(self, n: int, b: int) -> FlowRollout:
        latents = torch.randn(self.shape.latents, generator=torch.Generator().manual_seed(1000 * n + b))
        sigmas = tuple(flow_schedule(DRAWING_STEPS, 3.0).tolist())
        prompt = Prompt(b, (), "", "", embedding=self._text(b))
        return FlowRollout(DiffusionSample(None, latents, sigmas, n), prompt, 1.0 - 2 * (b % 2), 1000 * n + b)

    def _text(self, b: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(b)
        return {
            name: torch.ones(shape) if name.endswith("mask") else torch.randn(shape, generator=generator)
            for name, shape in self.shape.text.items()
        }


def main() -> None:
    """Run all variants and print the table."""
    options = _options()
    if importlib.util.find_spec("diffusers") is None:
        sys.stderr.write("benchmarks.gpu_diffusion: left out, because this interpreter has no diffusers\n")
        return
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.gpu_diffusion: needs an NVIDIA GPU, and torch sees none; --device cpu --layers 1 tries it")
    peak = _matmul(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"{name}, torch {torch.__version__}, matrix products of {peak / 1e12:.0f} TFLOP/s, batch {options.batch}"
    table = Table("denoiser", "step", title=title)
    for column in ("images/s", "s", "of peak", "peak GiB"):
        table.add_column(column, justify="right")
    cells: list[list[str]] = []
    for model, shape in SHAPES.items():
        for kind in KINDS:
            cells.append([model, kind, *_row(shape, kind, options, peak)])
            table.add_row(*cells[-1])
            if options.json:
                options.json.parent.mkdir(parents=True, exist_ok=True)
                columns = [str(column.header) for column in table.columns]
                options.json.write_text(json.dumps({"title": title, "columns": columns, "cells": cells}, indent=2))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _row(shape: Shape, kind: str, options: argparse.Namespace, peak: float) -> list[str]:
    is_cuda = options.device.startswith("cuda")
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with tempfile.TemporaryDirectory() as folder:
            seconds, flops = Bench(shape, kind, options, Path(folder)).run()
    except torch.OutOfMemoryError:
        return ["does not fit", "", "", ""]
    memory = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
    return [f"{options.batch / seconds:.2f}", f"{seconds:.3f}", f"{flops / seconds / peak:.0%}", f"{memory:.1f}"]


def _recipe(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    policy: dict[str, Any] = {"type": "sft", "mini_batch": options.batch}
    if kind == KINDS[2]:
        policy |= {"type": "grpo", "trainer_type": "diffusion_nft", "kl_beta": 1e-4}
    sample = {"num_steps": DRAWING_STEPS, "guidance_scale": 1.0, "deterministic_sampling": True}
    diffusers = {"sample": sample, "timesteps_fraction": (options.levels + 0.5) / DRAWING_STEPS}
    lora = {} if kind == KINDS[0] else {"lora": {"r": 32, "lora_alpha": 64.0}}
    return {
        "policy": {"is_diffusers": True, "diffusers": diffusers, **lora},
        "train": {"train_policy": policy, "param_dtype": "bfloat16", "compile": False, "seed": 0, "optm_lr": 1e-4,
                  "train_batch_per_replica": options.batch, "optm_warmup_steps": 0},
        "rollout": {"n_generation": options.batch, "backend": "flow_sampler"} if kind == KINDS[2] else {},
    }  # fmt: skip


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="images of a step and of a forward pass")
    parser.add_argument("--levels", type=int, default=4, help="noise levels that NFT learns a sample at")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--layers", type=int, default=0, help="0: those of the shape")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written anew after each cell")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
