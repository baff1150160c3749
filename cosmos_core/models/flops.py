"""Count the floating-point operations (FLOPs) of a training, and measure the peak rate of a device, for MFU."""

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

_MIN_MATRIX_SIZE, _MAX_MATRIX_SIZE = 256, {"cuda": 8192}
_MIN_MEASURED_SECONDS = 0.03
_NUM_MATMUL_MEASUREMENTS = 5


class TrainFlops:
    """Counter of the FLOPs of a forward and backward pass: per token, 6 for each element of a trained weight matrix,
    and 4 for one that is not trained, which needs no weight gradient.

    Of the experts of a layer, only those that process a token are counted. An embedding lookup costs nothing. Attention
    over the causal half of a sequence is included, recomputation is not (PaLM, arXiv 2204.02311, appendix B).
    """

    def __init__(self, model: nn.Module) -> None:
        """Count the FLOPs per token of an unsharded `model` on any device, including the meta device."""
        config: Any = getattr(model, "config", None)
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        num_experts = getattr(text_config, "num_experts", 0) or getattr(text_config, "num_local_experts", 0) or 1
        active_expert_fraction = getattr(text_config, "num_experts_per_tok", 1) / num_experts
        language_model: Any = model
        embedding = language_model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        output_head = language_model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        # An embedding that shares no weight with the output head is used only for lookups.
        self.flops_per_token = 0.0
        for parameter in model.parameters():
            is_embedding, is_output_head = (parameter is getattr(m, "weight", None) for m in (embedding, output_head))
            if parameter.ndim < 2 or (is_embedding and not is_output_head):
                continue
            active_fraction = active_expert_fraction if parameter.ndim == 3 else 1.0
            self.flops_per_token += active_fraction * parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
        num_heads = getattr(text_config, "num_attention_heads", 0)
        hidden_size = getattr(text_config, "hidden_size", 0)
        head_size = getattr(text_config, "head_dim", None) or hidden_size // max(1, num_heads)
        self._flops_per_token_pair = 6.0 * getattr(text_config, "num_hidden_layers", 0) * num_heads * head_size

    def total_flops(self, token_counts: Sequence[int]) -> float:
        """Return the FLOPs of the forward and backward pass of samples; `token_counts` are their numbers of tokens."""
        return sum(self.flops_per_token * count + self._flops_per_token_pair * count * count for count in token_counts)


@torch.no_grad()
@cache
def measure_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak rate of matrix products on `device` in FLOP/s, measured once per process. The matrices grow until
    a product takes 0.03 s; the result is the best rate over all sizes and tries."""
    matrix_size, best_flops_per_second = _MIN_MATRIX_SIZE, 0.0
    while matrix_size <= _MAX_MATRIX_SIZE.get(device.type, 1024):
        matmul_operand = torch.randn(matrix_size, matrix_size, device=device, dtype=dtype)
        shortest_seconds = float("inf")
        for _ in range(_NUM_MATMUL_MEASUREMENTS):
            start_time = _read_synchronized_time(device)
            matmul_operand @ matmul_operand
            shortest_seconds = min(shortest_seconds, _read_synchronized_time(device) - start_time)
        best_flops_per_second = max(best_flops_per_second, 2.0 * matrix_size**3 / shortest_seconds)
        if shortest_seconds > _MIN_MEASURED_SECONDS:
            break
        matrix_size *= 2
    return best_flops_per_second


def _read_synchronized_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
