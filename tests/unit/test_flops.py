"""FLOPs of a train step against PyTorch's own counter, which counts the products that really ran."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cosmos_core.models.flops import TrainFlops, measure_matmul_flops

LENGTH = 32
SIZES = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_the_weights_of_a_dense_model_cost_what_the_counter_counts(tied: bool) -> None:
    config = LlamaConfig(**SIZES, intermediate_size=48, tie_word_embeddings=tied, attn_implementation="eager")
    model = LlamaForCausalLM(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(LENGTH)[None], use_cache=False).logits.sum().backward()
    # The counter counts the whole square of attention in place of its causal half.
    square = 2 * 6.0 * LENGTH * LENGTH * SIZES["num_hidden_layers"] * SIZES["num_attention_heads"] * SIZES["head_dim"]
    flops = TrainFlops(model)
    assert flops.total_flops([LENGTH]) == flops.flops_per_token * LENGTH + square / 2
    # The first layer's input needs no gradient where embeddings are looked up, but they are trained: all is counted.
    assert counter.get_total_flops() == pytest.approx(flops.flops_per_token * LENGTH + square, rel=1e-9)


def test_frozen_weights_cost_no_gradient_of_their_own() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=48))
    all_trained = TrainFlops(model).flops_per_token
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert TrainFlops(model).flops_per_token == pytest.approx(all_trained * 4 / 6)


def test_of_experts_those_that_a_token_is_sent_to_count() -> None:
    def of_token(chosen: int) -> float:
        config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=chosen)
        return TrainFlops(Qwen3MoeForCausalLM(config)).flops_per_token

    experts = 6.0 * SIZES["num_hidden_layers"] * 3 * SIZES["hidden_size"] * 16
    assert of_token(2) - of_token(1) == pytest.approx(experts)


def test_the_rate_of_a_device_is_measured() -> None:
    assert 1e8 < measure_matmul_flops(torch.device("cpu"), torch.float32) < 1e15
