"""On CUDA: the gradient of a diffusion step is the CPU's, and trainings repeat to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="needs diffusers, which this interpreter has not")

from cosmos_core.algorithms.diffusion_sft import DiffusionSft
from cosmos_core.algorithms.flow_credit import FlowRollout
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.flow_sample import FlowSample
from cosmos_core.models.denoiser import Denoiser
from cosmos_core.models.families import open_pipeline
from cosmos_core.models.flow import flow_schedule
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import DiffusionSample, Prompt
from tests import tiny_pipelines

DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    """Leave the switches of torch as they were."""
    yield
    torch.use_deterministic_algorithms(False)


def drawn(count: int) -> list[FlowSample]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"prompt_embeds": (85, 32), "pooled_prompt_embeds": (32,)}
    return [
        FlowSample(
            torch.randn(4, 8, 8, generator=generator), float(torch.rand((), generator=generator)),
            {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
            torch.randn(4, 8, 8, generator=generator),
        )
        for _ in range(count)
    ]  # fmt: skip


def recipe(policy: dict[str, Any]) -> Recipe:
    said: dict[str, Any] = {
        "policy": {"is_diffusers": True, "diffusers": {"inference_size": [16, 16], "sample": {"num_steps": 4}}},
        "train": {"train_policy": {"mini_batch": 4, **policy}, "param_dtype": "float32", "seed": 0, "optm_lr": 1e-3,
                  "train_batch_per_replica": 8, "optm_warmup_steps": 0},
    }  # fmt: skip
    return Recipe.model_validate(said, context={})


def open_trainer(model: Path, chosen: Recipe, device: torch.device, folder: Path) -> Trainer:
    family = open_pipeline(str(model), chosen.policy, device)
    denoiser = family.load_denoiser(torch.float32).to(device)
    trainer = Trainer(Denoiser(denoiser, family, chosen.train), chosen.train, ProgressWriter(folder / "progress.json"))
    for name in chosen.train.train_policy.auxiliary_model_names:
        trainer.weight_sets.add(name)
    return trainer


def test_the_gradient_of_sft_is_that_of_the_cpu(tmp_path: Path) -> None:
    model, chosen = tiny_pipelines.save("sd3", tmp_path / "model"), recipe({"type": "sft"})
    found: list[dict[str, Tensor]] = []
    for device in (torch.device("cpu"), DEVICE):
        trainer = open_trainer(model, chosen, device, tmp_path)
        [update] = DiffusionSft(chosen.train.train_policy).updates(drawn(8), trainer)
        trainer.update(update)
        found.append({name: p.grad.cpu() for name, p in trainer.adapter.model.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-7, name


def test_nft_repeats_to_the_bit(tmp_path: Path) -> None:
    model = tiny_pipelines.save("sd3", tmp_path / "model")
    chosen = recipe({"type": "grpo", "trainer_type": "diffusion_nft", "kl_beta": 0.01})
    torch.use_deterministic_algorithms(True)
    found: list[list[Tensor]] = []
    for _ in range(2):
        trainer = open_trainer(model, chosen, DEVICE, tmp_path)
        algorithm = make_algorithm(chosen, make_training_sampling(chosen))
        for step in range(3):
            rollouts = [
                FlowRollout(
                    DiffusionSample(None, sample.latents, tuple(flow_schedule(4, 3.0).tolist()), step),
                    Prompt(i, (), "", "", embedding=dict(sample.text)), 1.0 - i % 2 * 2, 10 * step + i,
                )
                for i, sample in enumerate(drawn(8))
            ]  # fmt: skip
            for update in algorithm.updates(rollouts, trainer):
                trainer.update(update)
            algorithm.after_train_step(step + 1, trainer)
        found.append([tensor.detach().cpu() for tensor in trainer.adapter.model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
