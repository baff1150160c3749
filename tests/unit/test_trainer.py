"""Optimizer steps of a trainer beside the algorithms that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cosmos_core.algorithms.base import Loss, Update
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.models.base import MicroBatch
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from tests.unit.test_data_term import rows
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import score_in, trainer_of


@pytest.mark.parametrize("is_moved", [False, True])
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
