"""What the trainer offers to algorithms that none of ours uses yet: a data term, and another model to ask."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.base import Loss
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import Progress
from cosmos_core.train.trainer import Trainer, _quantiles
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import NoView, logprobs, score_in, sft, trainer_of

TRAIN = TrainConfig.model_validate(
    {"param_dtype": "float32", "optm_grad_norm_clip": 0.0, "optm_lr": 1e-9, "train_policy": {"type": "sft"}}
)


def samples(seed: int, count: int) -> list[Sample]:
    random = np.random.default_rng(seed)
    mask = np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8)
    return [Sample(random.integers(0, 64, 6), mask) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def make(folder: Path, tmp_path: Path) -> Trainer:
    trainer = trainer_of(load_model(str(folder), dtype=torch.float64), TRAIN, 0, Progress(tmp_path / "p.json"))
    score_in(trainer, torch.float64)
    return trainer


def test_a_data_term_adds_its_loss_and_its_gradient_to_the_same_step(folder: Path, tmp_path: Path) -> None:
    def gradients(*groups: list[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
        trainer = make(folder, tmp_path)
        update, *others = [next(sft().updates(group, NoView())) for group in groups]
        loss = trainer.update(replace(update, data=others[0] if others else None))["loss"]
        parameters = trainer.adapter.model.named_parameters()
        return loss, {name: parameter.grad.clone() for name, parameter in parameters}

    one, other = samples(0, 3), samples(1, 5)
    (loss_one, of_one), (loss_other, of_other), (loss, of_both) = (
        gradients(one),
        gradients(other),
        gradients(one, other),
    )
    assert loss == pytest.approx(loss_one + loss_other, rel=1e-12)
    for name, gradient in of_both.items():
        torch.testing.assert_close(gradient, of_one[name] + of_other[name], rtol=1e-9, atol=1e-12)


def test_another_model_is_asked_by_its_name_and_not_trained(folder: Path, tmp_path: Path) -> None:
    trainer = make(folder, tmp_path)
    teacher = load_model(str(folder), dtype=torch.float64)
    with torch.no_grad():
        teacher.lm_head.weight.mul_(1.5)
    expected = logprobs(make(folder, tmp_path), samples(0, 2))
    adapter = CausalLM(teacher, TRAIN, InputProcessing(0))
    adapter._dtype = torch.float64
    trainer.add_model("teacher", adapter)
    rows = trainer.evaluate(samples(0, 2), weights="teacher")
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(torch.equal(row, own) for row, own in zip(logprobs(trainer, samples(0, 2)), expected, strict=True))
    assert all((row["logprobs"] - own).abs().max() > 1e-3 for row, own in zip(rows, expected, strict=True))


def test_quantiles_are_those_of_all_micro_batches_together(folder: Path, tmp_path: Path) -> None:
    order = torch.randperm(100, generator=torch.Generator().manual_seed(0)) + 1.0
    losses = [Loss(torch.tensor(0.0), {}, {"difference": rows}) for rows in (order[:7], order[7:90], order[90:])]
    _, _, values = make(folder, tmp_path)._reduce_losses(losses)
    assert _quantiles(values) == {"difference_p50": 51.0, "difference_p95": 96.0, "difference_max": 100.0}
    assert _quantiles({"difference": [torch.zeros(0)]}) == {}
