"""Activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

SMALLEST = 1 << 10
"""Elements; what has fewer stays: moving it costs more than it frees."""


def activations_on_cpu() -> saved_tensors_hooks:
    """Return torch's `save_on_cpu`, which leaves parameters where they are: FSDP frees and gathers them itself."""
    moves = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        return tensor if isinstance(base, nn.Parameter) or tensor.numel() < SMALLEST else moves.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else moves.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)
