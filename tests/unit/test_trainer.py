"""Optimizer steps of a trainer beside the algorithms that are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from tests.unit.test_data_term import rows
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import score_in, trainer_of


@pytest.mark.parametrize("is_moved", [pytest.param(False, marks=pytest.mark.full), True])
def test_outputs_under_further_weights_are_those_of_each_sample_whatever_its_length(
    tmp_path: Path, is_moved: bool
) -> None:
    def loss(micro_batch: MicroBatch) -> Loss:
        outputs, mask_BS = micro_batch.outputs, micro_batch.mask_BS
        value = (outputs["logprobs"] * outputs["reference/logprobs"] * mask_BS).sum()
        return Loss(value, {"mean": torch.stack([value.detach(), mask_BS.sum()]).double()})

    folder, found = save_tiny_model(tmp_path / "model"), []
    for size in (1, 4):
        policy = {"type": "grpo", "mini_batch": size}
        train = TrainConfig.model_validate({"param_dtype": "float32", "optm_lr": 1e-9, "train_policy": policy})
        trainer = trainer_of(
            load_model(str(folder), dtype=torch.float64), train, 0, ProgressWriter(tmp_path / "p.json")
        )
        score_in(trainer, torch.float64)
        trainer.weight_sets.add("reference")
        for tensor in trainer.weight_sets.tensors["reference"].values():
            tensor += 0.01 * is_moved
        metrics = trainer.update(Update(rows(), loss, extra_weights=("reference",)))
        found.append((metrics["mean"], {n: p.grad.clone() for n, p in trainer.adapter.model.named_parameters()}))
    (alone, gradients), (together, others) = found
    assert together == pytest.approx(alone, rel=1e-9)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("is_constant", [False, True])
def test_a_loss_without_metrics_is_refused_where_it_is_written(tmp_path: Path, is_constant: bool) -> None:
    def bare(micro_batch: MicroBatch) -> Any:
        return -micro_batch.logprobs_BS.sum()

    train = TrainConfig.model_validate({"param_dtype": "float32", "train_policy": {"type": "grpo"}})
    model = load_model(str(save_tiny_model(tmp_path / "model")), dtype=torch.float32)
    trainer = trainer_of(model, train, 0, ProgressWriter(tmp_path / "p.json"))
    with pytest.raises(ConfigError, match=r"trainer_type = 'grpo': bare: it returned a Tensor, .*test_trainer\.py:\d+"):
        trainer.update(Update(rows(), bare, has_constant_gradient=is_constant))


def test_a_plain_number_is_averaged_over_micro_batches(tmp_path: Path) -> None:
    def loss(micro_batch: MicroBatch) -> Loss:
        numbers: Any = {"rows": len(micro_batch.samples), "mean": float(micro_batch.logprobs_BS.mean())}
        return Loss(-micro_batch.logprobs_BS.sum() / 100, numbers)

    train = TrainConfig.model_validate({"param_dtype": "float32", "train_policy": {"type": "grpo", "mini_batch": 2}})
    model = load_model(str(save_tiny_model(tmp_path / "model")), dtype=torch.float32)
    trainer = trainer_of(model, train, 0, ProgressWriter(tmp_path / "p.json"))
    metrics = trainer.update(Update(rows(), loss, metrics={"given": np.float32(0.5)}))
    assert metrics["rows"] == 2.0 and metrics["mean"] < 0 and type(metrics["given"]) is float
