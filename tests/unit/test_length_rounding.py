"""Lengths that are rounded up for the sake of kernels: few of them, and the same results."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import collate_rows
from cosmos_core.data.sample import Sample
from cosmos_core.models import length_rounding
from cosmos_core.models.length_rounding import kernel_padded_length
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.scorer import LogprobScorer, RequestedOutputs
from cosmos_core.run.progress import ProgressWriter
from tests.unit.trainers import NoView, sft, trainer_of

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WINDOWS = {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
FAMILIES = {
    "sdpa": (Qwen3ForCausalLM, Qwen3Config(**SIZES)),
    "eager with sinks and windows": (GptOssForCausalLM, GptOssConfig(**SIZES, **WINDOWS)),
}
LENGTHS = (37, 5, 70)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    cls, config = FAMILIES[getattr(request, "param", "sdpa")]
    made: PreTrainedModel = cls._from_config(deepcopy(config))
    return made


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the dtypes of these tests as in half precision."""
    monkeypatch.setattr(length_rounding, "_HALF_PRECISION_DTYPES", (torch.float32, torch.float64))


def rows() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(500, size=length) for length in LENGTHS]


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 32), (32, 32), (33, 64), (512, 512), (1000, 1024), (1025, 1152), (16_000, 16_384)]
)
def test_lengths_of_half_precision_on_cpu_are_rounded_up(length: int, expected: int) -> None:
    assert kernel_padded_length(length, CPU, torch.bfloat16) == expected


def test_few_lengths_are_left_and_little_is_added() -> None:
    found = [kernel_padded_length(length, CPU, torch.float16) for length in range(1, 100_000)]
    assert len(set(found)) <= 8 * 16
    assert all(length <= new < max(length + 32, 1.125 * length) for length, new in enumerate(found, 1))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_lengths_stay_where_shapes_cost_nothing(device: str, dtype: torch.dtype) -> None:
    assert kernel_padded_length(33, torch.device(device), dtype) == 33


def test_autocast_decides_where_there_is_one() -> None:
    tensor = torch.ones(2, 33, 4)
    assert length_rounding.pad_for_kernel(tensor, -2) is tensor
    with torch.autocast("cpu", torch.bfloat16):
        longer = length_rounding.pad_for_kernel(tensor, -2)
    assert longer.shape == (2, 64, 4)
    assert longer[:, 33:].eq(0).all()


def test_rows_are_filled_up_by_padding_or_by_a_sequence_more() -> None:
    short = [np.array([5, 6, 7]), np.array([8])]
    padded, starts = collate_rows(short, 9, is_packed=False, padded_length_fn=lambda _: 5)
    assert padded["input_ids"].tolist() == [[5, 6, 7, 9, 9], [8, 9, 9, 9, 9]]
    assert padded["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
    assert starts == [0, 4]
    packed, starts = collate_rows(short, 9, is_packed=True, padded_length_fn=lambda _: 6)
    assert packed["input_ids"].tolist() == [[5, 6, 7, 8, 9, 9]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert packed["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert starts == [0, 3]


@pytest.mark.parametrize("model", list(FAMILIES), indirect=True)
def test_attention_over_longer_sequences_is_the_same(model: PreTrainedModel, rounded: None) -> None:
    separate = torch.cat([model(input_ids=torch.from_numpy(row)[None]).logits[0] for row in rows()])
    separate.sin().sum().backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert enable_packing(model) == ""
    model.zero_grad()
    inputs = collate_rows(rows(), 0, is_packed=True, padded_length_fn=lambda length: length + 3).inputs
    packed = model(**inputs, use_cache=False).logits[0, : sum(LENGTHS)]
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-6)
    packed.sin().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = theirs[name].abs().max()
            assert (parameter.grad - theirs[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("expected", [None, -0.25], ids=["unknown", "guessed"])
def test_scores_over_longer_chunks_are_the_same(
    model: PreTrainedModel, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.double()
    ids, chosen = torch.from_numpy(rows()[2])[None], torch.arange(3, 60)
    expected_N = None if expected is None else torch.full((57,), expected, dtype=torch.float64)

    def found() -> tuple[Tensor, Tensor, list[Tensor]]:
        settings = {
            "output_request": RequestedOutputs(entropy="value"),
            "dtype": torch.float64,
            "loss_gradient_N": expected_N,
        }
        outputs = LogprobScorer(model)({"input_ids": ids}, chosen, **settings)
        gradients = torch.autograd.grad(-0.25 * outputs["logprobs"].sum(), list(model.parameters()))
        return outputs["logprobs"], outputs["entropy"], list(gradients)

    theirs = found()
    monkeypatch.setattr(length_rounding, "_HALF_PRECISION_DTYPES", (torch.float64,))
    torch.testing.assert_close(found(), theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
def test_an_update_over_longer_rows_is_the_same(
    model: PreTrainedModel, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainConfig.model_validate(
        {"param_dtype": "float32", "sequence_packing": packed, "train_policy": {"type": "sft", "mini_batch": 2}}
    )
    widths: list[int] = []

    def found() -> dict[str, float]:
        own = deepcopy(model)
        own.get_input_embeddings().register_forward_pre_hook(lambda _, ids: widths.append(ids[0].shape[1]))
        rank = trainer_of(own, train, 0, ProgressWriter(tmp_path / "progress.json"))
        (update,) = sft().updates([Sample(row, np.ones(len(row), np.uint8)) for row in rows()], NoView())
        widths.clear()
        return rank.update(update)

    theirs = found()
    assert widths[-2:] == ([107, 5] if packed else [70, 5])
    monkeypatch.setattr(length_rounding, "_HALF_PRECISION_DTYPES", (torch.float32,))
    assert found() == pytest.approx(theirs, rel=1e-5)
    assert widths[-2:] == ([128, 32] if packed else [96, 32])
