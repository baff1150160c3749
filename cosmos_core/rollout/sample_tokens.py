"""Sampling of tokens on CPU, the same in every engine: one uniform number per token, from a generator per completion.

Shapes: B rows, V vocabulary.
"""

import torch
from torch import Tensor

from cosmos_core.errors import ModelError


def sample_tokens(logprobs_BV: Tensor, uniforms_B: Tensor | None, is_active_B: Tensor | None = None) -> Tensor:
    """Return one token id per row (shape B): inverse transform sampling with the row's uniform number, or the most
    probable token if `uniforms_B` is None. Raise ModelError if an active row has NaN log-probabilities; by default, all
    rows are active."""
    if uniforms_B is None:
        max_logprobs_B, token_ids_B = logprobs_BV.max(-1)
        is_nan_B = max_logprobs_B.isnan()
    else:
        cumulative_probs_BV = logprobs_BV.double().exp().cumsum(-1)
        thresholds_B1 = uniforms_B.unsqueeze(-1) * cumulative_probs_BV[:, -1:]
        token_ids_B = torch.searchsorted(cumulative_probs_BV, thresholds_B1, right=True).squeeze(-1)
        # For a threshold of NaN, which NaN log-probabilities cause, `searchsorted` returns the row's length.
        is_nan_B = token_ids_B == logprobs_BV.shape[-1]
        token_ids_B = token_ids_B.masked_fill(is_nan_B, 0)
    if (is_nan_B if is_active_B is None else is_nan_B & is_active_B).any():
        raise ModelError(
            "the model's logits are not finite (NaN), so that no token can be sampled; set train.param_dtype = "
            "'float32', or take another model"
        )
    return token_ids_B


def use_uniform_sampling(vllm_worker: object) -> None:
    """Make a vLLM worker sample with `sample_tokens`; vLLM's own sampling takes a fifth of a decoding step on CPU."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward(
        logits_BV: Tensor, generators: dict[int, torch.Generator], top_k_B: Tensor | None, top_p_B: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs_BV = apply_top_k_top_p(logits_BV, top_k_B, top_p_B).log_softmax(-1, dtype=torch.float32)
        uniforms_B = torch.zeros(len(logits_BV), dtype=torch.float64)
        for row, generator in generators.items():  # rows that decode greedily have no generator
            uniforms_B[row] = torch.rand((), generator=generator, dtype=torch.float64)
        return sample_tokens(logprobs_BV, uniforms_B), logprobs_BV

    vllm_worker.model_runner.sampler.topk_topp_sampler.forward = forward  # type: ignore[attr-defined] # vLLM sets it so too
