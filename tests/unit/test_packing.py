"""Rows end to end: the logits of separate rows, beyond sliding windows too, and families for which it cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cosmos_core.data.batch import rows_of
from cosmos_core.models.packing import NAME, enable_packing

SIZES: dict[str, Any] = {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {
    "full": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=8)),
    "sliding": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=4)),
    "both": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    ),
}


def make(cls: Any, config: Any, attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = cls._from_config(config, attn_implementation=attention).double().eval()
    return made


def rows() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(500, (length,), generator=generator) for length in (7, 12, 1, 3)]


def packed_logits(model: PreTrainedModel, sequences: list[Tensor]) -> Tensor:
    found: Tensor = model(**rows_of([s.numpy() for s in sequences], 0, packed=True).inputs, use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("recompute", [False, True])
def test_packed_rows_have_the_logits_and_gradients_of_separate_ones(family: str, recompute: bool) -> None:
    model = make(*FAMILIES[family])
    separate = torch.cat([model(input_ids=row[None], use_cache=False).logits[0] for row in rows()])
    separate.sin().sum().backward()
    theirs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    assert enable_packing(model) == ""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    model.zero_grad()
    packed = packed_logits(model, rows())
    torch.testing.assert_close(packed, separate, rtol=0, atol=1e-12)
    packed.sin().sum().backward()
    tolerance = 1e-5 if family == "both" else 1e-11  # Gemma's norms are computed in float32
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_padded_rows_and_generation_stay_what_they_were(family: str) -> None:
    model, plain = make(*FAMILIES[family]), make(*FAMILIES[family])
    assert enable_packing(model) == ""
    inputs = rows_of([row.numpy() for row in rows()], 0, packed=False).inputs
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        model(**inputs, use_cache=False).logits[real], plain(**inputs, use_cache=False).logits[real], rtol=0, atol=1e-12
    )
    left, mask = torch.tensor([[0, 0, 5, 6, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1], [1] * 5])
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours = model.generate(left, attention_mask=mask, **settings)
    assert torch.equal(ours, plain.generate(left, attention_mask=mask, **settings))


def test_a_row_sees_nothing_of_its_neighbours() -> None:
    model = make(*FAMILIES["full"])
    enable_packing(model)
    first, second, *_ = rows()
    other = second.clone()
    other[:] = 499
    before, after = packed_logits(model, [first, second, first]), packed_logits(model, [first, other, first])
    assert torch.equal(before[: len(first)], after[: len(first)])
    assert torch.equal(before[-len(first) :], after[-len(first) :])
    assert not torch.equal(before, after)


def test_families_that_mix_what_is_packed_keep_the_padding() -> None:
    linear = Qwen3NextConfig(
        **SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    model = make(Qwen3NextForCausalLM, linear)
    assert enable_packing(model) == "layers of kind linear_attention mix what is packed"
    flex = make(*FAMILIES["full"], attention="flex_attention")
    assert enable_packing(flex) == "attention is computed by 'flex_attention'"
    assert NAME not in {model.config._attn_implementation, flex.config._attn_implementation}


def test_a_family_whose_attention_is_not_told_its_window_keeps_the_padding() -> None:
    config = PhimoeConfig(**SIZES, sliding_window=4000, num_local_experts=2)  # no row of the probe is that long
    model = make(PhimoeForCausalLM, config).float()  # experts know no float64
    assert enable_packing(model) == "packed sequences have other logits than separate ones"
    assert model.config.sliding_window == 4000


def test_a_probe_that_differs_gives_the_old_attention_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(*FAMILIES["full"])
    plain = Qwen3ForCausalLM.forward
    monkeypatch.setattr(  # a family that ignores the bounds between rows
        Qwen3ForCausalLM, "forward",
        lambda self, *a, cu_seq_lens_q=None, cu_seq_lens_k=None, **k: plain(self, *a, **k),
    )  # fmt: skip
    assert enable_packing(model) == "packed sequences have other logits than separate ones"
    assert model.config._attn_implementation == "sdpa"
