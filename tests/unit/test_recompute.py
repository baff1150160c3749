"""Compiled blocks on packed rows, recomputed in each way: the gradient stays what it is without both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from cosmos_core.data.batch import collate_rows
from cosmos_core.models import packing
from cosmos_core.models.packing import PACKED_ATTENTION
from cosmos_core.models.recompute import RecomputeMode, recompute_activations

CONFIG = Qwen3Config(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=4, head_dim=8, attn_implementation="sdpa",
)  # fmt: skip


@torch.library.custom_op("cosmos_tests::attention", mutates_args={})
def attention(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    """Stand for the packed kernel, which no CPU has: an operator that torch.compile does not look into."""
    return query + key.roll(1, 0) * value


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor) -> Tensor:
    return torch.empty_like(query)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    key, value = context.saved_tensors
    return gradient, (gradient * value).roll(-1, 0), gradient * key.roll(1, 0), None


attention.register_autograd(
    _backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1], inputs[2])
)


def gradients(how: RecomputeMode, *, backend: str = "") -> list[Tensor]:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(CONFIG).train()
    packing._set_attention_function(model, PACKED_ATTENTION)
    recompute_activations(model, how)
    for block in model.model.layers if backend else ():
        block.compile(dynamic=True, backend=backend)
    for lengths in ((7, 13), (5, 17, 3)):
        inputs = collate_rows([np.arange(length) for length in lengths], 0, is_packed=True).inputs
        model.model(**inputs, use_cache=False).last_hidden_state.sin().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("selective", "eager"),
        *(pytest.param(how, "aot_eager", marks=pytest.mark.full) for how in ("selective", True, False)),
    ],
)
def test_compiled_packed_blocks_have_the_gradient_of_plain_ones(
    how: RecomputeMode, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_VARLEN_DEVICE_TYPE", "cpu")
    monkeypatch.setattr(packing, "_VARLEN_DTYPES", {torch.float32})
    monkeypatch.setattr(packing, "varlen_attn", lambda q, k, v, bounds, *_, **__: attention(q, k, v, bounds))
    for ours, plain in zip(gradients(how, backend=backend), gradients(False), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
