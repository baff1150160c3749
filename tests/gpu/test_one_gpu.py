"""On CUDA: packed rows are separate rows, scores are those of the whole logits, and a run repeats and resumes to the
bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from cosmos_core.algorithms.sft import Sft
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.batch import collate_rows, to_device
from cosmos_core.data.sample import Sample
from cosmos_core.models import packing
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.compilation import compile_blocks
from cosmos_core.models.packing import enable_packing
from cosmos_core.models.recompute import RecomputeMode, recompute_activations
from cosmos_core.models.scorer import LogprobScorer, RequestedOutputs
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer

DEVICE = torch.device("cuda")
SIZES: dict[str, Any] = {
    "vocab_size": 3000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.1, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "full": (Qwen3ForCausalLM, Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=32)),
}
LENGTHS = (37, 5, 170, 1, 64)
BAR = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest difference of a gradient, as a share of its largest entry."""


@pytest.fixture(autouse=True)
def clean_gpu() -> Iterator[None]:
    """Leave the switches of torch as they were."""
    yield
    torch.use_deterministic_algorithms(False)
    if DEVICE.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


def make(family: str = "full") -> PreTrainedModel:
    torch.manual_seed(0)
    cls, config = FAMILIES[family]
    made: PreTrainedModel = cls._from_config(config, attn_implementation="sdpa")
    return made.to(DEVICE)


def rows() -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(SIZES["vocab_size"], size=length) for length in LENGTHS]


def scored(model: PreTrainedModel, dtype: torch.dtype, *, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all tokens, and the gradients of a sum of them."""
    batch = collate_rows(rows(), 0, is_packed=packed)
    chosen = torch.cat(
        [start + torch.arange(length - 1) for start, length in zip(batch.row_start_indices, LENGTHS, strict=True)]
    )
    model.zero_grad()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        logprobs: Tensor = LogprobScorer(model)(to_device(batch.inputs, DEVICE), chosen.to(DEVICE))["logprobs"]
    (logprobs.sin().sum() / len(logprobs)).backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_near(ours: dict[str, Tensor], theirs: dict[str, Tensor], bar: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).abs().max() <= bar * gradient.abs().max(), name


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("dtype", list(BAR))
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_packed_rows_have_the_scores_and_gradients_of_padded_ones(
    family: str, dtype: torch.dtype, is_recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    kernel = packing.varlen_attn
    monkeypatch.setattr(packing, "varlen_attn", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    model = make(family).train()
    recompute_activations(model, is_recomputed)
    padded, theirs = scored(model, dtype, packed=False)
    assert enable_packing(model, compute_dtype=dtype) == ""
    calls.clear()
    packed, ours = scored(model, dtype, packed=True)
    count = 3 * (1 + is_recomputed) if dtype == torch.bfloat16 else 0
    assert len(calls) == count, "one call of the kernel per layer and pass; float32 has none"
    torch.testing.assert_close(packed, padded, rtol=0, atol=10 * BAR[dtype])
    assert_near(ours, theirs, BAR[dtype])


@pytest.mark.parametrize("how", [False, True, "selective"])
def test_compiled_packed_blocks_have_the_gradients_of_padded_ones(how: RecomputeMode) -> None:
    model = make().train()
    _, theirs = scored(model, torch.bfloat16, packed=False)
    recompute_activations(model, how)
    assert enable_packing(model, compute_dtype=torch.bfloat16) == ""
    compile_blocks(model)
    _, ours = scored(model, torch.bfloat16, packed=True)
    assert_near(ours, theirs, BAR[torch.bfloat16])


@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_layer_waits_for_the_gpu_on_packed_rows(family: str) -> None:
    model = make(family)
    assert enable_packing(model, compute_dtype=torch.bfloat16) == ""
    inputs = to_device(collate_rows(rows(), 0, is_packed=True).inputs, DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = model.base_model(**inputs, use_cache=False).last_hidden_state
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            found = model.base_model(**inputs, use_cache=False).last_hidden_state
            found.sum().backward()
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)
    waits = [str(one.message) for one in caught if "synchronizing" in str(one.message)]
    assert len(waits) <= 1, "transformers asks once per pass whether positions restart; three layers ask nothing"


@pytest.mark.parametrize("dtype", list(BAR))
def test_chunked_scores_are_those_of_the_whole_logits(dtype: torch.dtype) -> None:
    model, wants = make(), RequestedOutputs(0.7, entropy="gradient", top_k=4)
    ids = torch.from_numpy(rows()[2])[None].to(DEVICE)
    chosen = torch.arange(3, 160, device=DEVICE)
    found: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for is_ours in (True, False):
        model.zero_grad()
        with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
            if is_ours:
                outputs = LogprobScorer(model, 4 * SIZES["vocab_size"] * 20)(
                    {"input_ids": ids}, chosen, output_request=wants
                )
            else:
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1][chosen].float()
        if not is_ours:
            logprobs = (logits / wants.temperature).log_softmax(-1)
            outputs = {
                "logprobs": logprobs.gather(-1, ids[0, 1:][chosen].unsqueeze(-1)).squeeze(-1),
                "entropy": -(logprobs.exp() * logprobs).sum(-1),
                "top_logprobs": logprobs.gather(-1, found[0][0]["top_ids"]),
            }
        sum(outputs[name].sin().mean() for name in ("logprobs", "entropy", "top_logprobs")).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        found.append((outputs, gradients))
    (ours, our_gradients), (theirs, their_gradients) = found
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=BAR[dtype], msg=name)
    assert_near(our_gradients, their_gradients, BAR[dtype])


def test_a_right_guess_of_the_derivative_costs_one_wait_and_changes_nothing() -> None:
    model = make()
    ids = torch.from_numpy(rows()[2])[None].to(DEVICE)
    chosen = torch.arange(160, device=DEVICE)
    weights = torch.linspace(-1, 2, 160, device=DEVICE)
    gradients = []
    for expected in (None, weights, weights + 1):
        model.zero_grad()
        logprobs = LogprobScorer(model)({"input_ids": ids}, chosen, loss_gradient_N=expected)["logprobs"]
        (weights * logprobs).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_near(gradients[1], gradients[0], 1e-6)
    assert_near(gradients[2], gradients[0], 1e-6)


def trained(folder: Path, *, stop: int = 6, **settings: Any) -> tuple[PreTrainedModel, list[float]]:
    """SFT from the newest checkpoint in `folder` to step `stop`, every step saved; the weights and the losses."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    folder.mkdir(exist_ok=True)
    train = TrainConfig.model_validate({
        "compile": False, "optm_lr": 1e-3, "sequence_packing": True, "deterministic": True,
        "train_policy": {"type": "sft", "mini_batch": 2}, **settings,
    })  # fmt: skip
    trainer = Trainer(CausalLM(make(), train, InputProcessing(0)), train, ProgressWriter(folder / "progress.json"))
    checkpointer = Checkpointer(folder / "checkpoints", fingerprint="f" * 64, max_keep=-1, is_async=False)
    state = TrainState(trainer.adapter.model, trainer.optimizer)
    losses = []
    for step in range(checkpointer.load_latest(state) or 0, stop):
        trainer.set_learning_rate(step, 6)
        samples = [Sample(row, np.ones(len(row), np.uint8)) for row in rows() if len(row) > 1]
        (update,) = Sft(train.train_policy).updates(samples, trainer)
        losses.append(trainer.update(update)["loss"])
        checkpointer.save(step + 1, state)
        checkpointer.wait()
    checkpointer.close()
    return trainer.adapter.model, losses


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_repeats_and_resumes_to_the_bit(tmp_path: Path, dtype: str) -> None:
    model, losses = trained(tmp_path / "one", param_dtype=dtype)
    again, same = trained(tmp_path / "two", param_dtype=dtype)
    assert losses == same and losses[-1] < losses[0]
    _, first = trained(tmp_path / "three", stop=3, param_dtype=dtype)
    resumed, second = trained(tmp_path / "three", param_dtype=dtype)
    assert first + second == losses
    for name, parameter in model.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
        assert torch.equal(dict(resumed.named_parameters())[name], parameter), name


def test_activations_in_host_memory_leave_the_bits_as_they_are(tmp_path: Path) -> None:
    model, losses = trained(tmp_path / "one", stop=2)
    moved, same = trained(tmp_path / "two", stop=2, activation_offload=True)
    assert losses == same
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), moved.parameters(), strict=True))
