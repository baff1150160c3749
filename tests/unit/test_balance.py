"""The load-balancing loss of experts, against that of transformers and against itself however an update is split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError
from cosmos_core.models.balance import LoadBalancingSettings, load_balancing_loss, load_balancing_settings
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from tests.unit.run_folder import load_recipe, make_inputs
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import NoView, grpo, score_in, sft

EXPERTS, CHOSEN, COEFFICIENT = 4, 2, 0.5
LENGTHS = (7, 3, 9, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        max_position_embeddings=64, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=8,
        intermediate_size=16, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("moe")
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def in_float64(folder: Path, *, recomputed: bool = False) -> Qwen3MoeForCausalLM:
    model = load_model(str(folder), dtype=torch.float64, gradient_checkpointing=recomputed)
    assert isinstance(model, Qwen3MoeForCausalLM)
    model.set_experts_implementation("eager")  # the grouped product knows no float64
    return model


def samples() -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for i, length in enumerate(LENGTHS):
        mask = np.array([0, 0] + [1] * (length - 2), dtype=np.uint8)
        found.append(Sample(random.integers(1, 31, length), mask, float(i - 1.5), float(i % 2)))
    return found


def test_of_one_sequence_it_is_that_of_transformers() -> None:
    logits = [torch.randn(12, EXPERTS, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    of_token = torch.tensor([2, 2, *[0] * 5, 2, *[1] * 4])
    ours = load_balancing_loss(LoadBalancingSettings(COEFFICIENT, EXPERTS, CHOSEN), logits, of_token, 2)
    theirs = sum(
        COEFFICIENT * count * load_balancing_loss_func(
            tuple(logits), EXPERTS, CHOSEN, attention_mask=(of_token == number).long().unsqueeze(0)
        )
        for number, count in ((0, 5), (1, 4))
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0, check_dtype=False)
    for one, other in zip(torch.autograd.grad(ours, logits), torch.autograd.grad(theirs, logits), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def gradients(
    folder: Path, algorithm: Algorithm, coefficient: float, scratch: Path, split: tuple[int, bool, bool]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    size, packed, recomputed = split
    model = in_float64(folder, recomputed=recomputed)
    policy = {"type": "sft", "mini_batch": size}
    train = Recipe.model_validate({
        "train": {"train_policy": policy, "sequence_packing": packed, "optm_grad_norm_clip": 0.0, "compile": False,
                  "param_dtype": "float32", "train_batch_per_replica": 4},
    }).train  # fmt: skip
    adapter = CausalLM(model, train, InputProcessing(0), load_balancing=load_balancing_settings(model, coefficient))
    trainer = Trainer(adapter, train, ProgressWriter(scratch / "progress.json"))
    score_in(trainer, torch.float64)
    (update,) = algorithm.updates(samples(), NoView())
    metrics = trainer.update(update)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, metrics


def of_transformers(folder: Path) -> tuple[dict[str, Tensor], float]:
    """The mean over sequences, weighted by their tokens, of transformers' own loss of each."""
    model = in_float64(folder)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples():
        found = model(input_ids=torch.tensor(sample.input_ids)[None], output_router_logits=True)
        total = total + len(sample.input_ids) * found.aux_loss.double() / sum(LENGTHS)
    (COEFFICIENT * total).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, COEFFICIENT * total.item()


ALGORITHMS: Sequence[Algorithm] = (sft(), grpo(GrpoConfig()))


@pytest.mark.parametrize(
    "algorithm", [pytest.param(ALGORITHMS[0], marks=pytest.mark.full), ALGORITHMS[1]], ids=["sft", "grpo"]
)
def test_it_is_added_to_any_update_however_that_is_split(folder: Path, tmp_path: Path, algorithm: Algorithm) -> None:
    without, metrics = gradients(folder, algorithm, 0.0, tmp_path, (4, False, False))
    assert "model_loss" not in metrics
    theirs, value = of_transformers(folder)
    assert any(gradient.abs().max() > 1e-3 for name, gradient in theirs.items() if name.endswith("gate.weight"))
    for split in ((4, False, False), (1, False, False), (2, True, False), (4, True, True)):
        ours, metrics = gradients(folder, algorithm, COEFFICIENT, tmp_path, split)
        assert metrics["model_loss"] == pytest.approx(value, rel=1e-6)
        for name, gradient in ours.items():
            expected = without[name] + theirs.get(name, 0.0)
            assert (gradient - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max().item()), name


def test_a_model_without_routers_is_refused_by_name(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path / "model")), dtype=torch.float32)
    assert load_balancing_settings(model, 0.0) is None
    with pytest.raises(ConfigError, match=r"policy.aux_loss_coeff = 0.1: .* loss for Qwen3ForCausalLM"):
        load_balancing_settings(model, 0.1)


@pytest.mark.parametrize("axis", ["tp_size", "cp_size", "pp_size"])
def test_ranks_that_see_parts_of_sequences_are_refused_by_name(tmp_path: Path, axis: str) -> None:
    make_inputs(tmp_path)
    pipeline = load_recipe(tmp_path, "policy.aux_loss_coeff=0.1", f"policy.parallelism.{axis}=2")
    with pytest.raises(ConfigError, match=f"policy.aux_loss_coeff = 0.1 excludes policy.parallelism.{axis} = 2"):
        check_capabilities(pipeline)
