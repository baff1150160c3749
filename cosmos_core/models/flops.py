"""FLOPs of training and the device's peak rate, for the model FLOPs utilization (MFU)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

_SMALLEST, _LARGEST = 256, {"cuda": 8192}
_LONG_SECONDS = 0.03
_TRIES = 5


class TrainFlops:
    """FLOPs of a train step: forward and backward, with a multiplication and an addition per weight of a matrix.

    Frozen weights need no weight gradient, only the experts that a token is routed to count, and an embedding lookup
    costs nothing. Attention over the causal half of a sequence is included; recomputation is not (PaLM, arXiv
    2204.02311, appendix B).
    """

    def __init__(self, model: nn.Module) -> None:
        """`model`: unsharded model with weights on any device, also the meta device."""
        config: Any = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        chosen = getattr(text, "num_experts_per_tok", 1) / (
            getattr(text, "num_experts", 0) or getattr(text, "num_local_experts", 0) or 1
        )
        lookup = _lookup(model)
        self.flops_per_token = 0.0
        for parameter in model.parameters():
            if parameter.ndim < 2 or parameter is lookup:
                continue
            fraction = chosen if parameter.ndim == 3 else 1.0
            self.flops_per_token += fraction * parameter.numel() * (6.0 if parameter.requires_grad else 4.0)
        heads = getattr(text, "num_attention_heads", 0)
        width = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads)
        self._flops_per_pair = 6.0 * getattr(text, "num_hidden_layers", 0) * heads * width

    def total(self, costs: Sequence[int]) -> float:
        """Return the FLOPs of samples with these numbers of tokens."""
        return sum(self.flops_per_token * cost + self._flops_per_pair * cost * cost for cost in costs)


def _lookup(model: nn.Module) -> nn.Parameter | None:
    """Return the embedding weight if it is used only for lookups; None if it is tied to the head or missing."""
    language: Any = model
    if not hasattr(model, "get_input_embeddings"):
        return None
    weight: nn.Parameter | None = getattr(language.get_input_embeddings(), "weight", None)
    head = language.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return None if head is not None and getattr(head, "weight", None) is weight else weight


@torch.no_grad()
@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a matrix product on this rank's device, measured once per process: the best of several
    tries,
    with sizes that grow until a product takes 0.03 s."""
    size, best = _SMALLEST, 0.0
    while size <= _LARGEST.get(device.type, 1024):
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        shortest = float("inf")
        for _ in range(_TRIES):
            began = _now(device)
            matrix @ matrix
            shortest = min(shortest, _now(device) - began)
        best = max(best, 2.0 * size**3 / shortest)
        if shortest > _LONG_SECONDS:
            break
        size *= 2
    return best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
