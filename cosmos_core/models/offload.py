"""Activations in host memory between the forward and the backward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

SMALLEST = 1 << 10
"""Elements; what has fewer stays: moving it costs more than it frees."""


def offloaded() -> AbstractContextManager[Any]:
    """What autograd saves inside the block goes to host memory until it is asked for; parameters stay where they are,
    because FSDP frees and gathers them itself."""
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> tuple[torch.device | None, Tensor]:
    base = tensor._base if tensor._base is not None else tensor
    if isinstance(base, nn.Parameter) or tensor.numel() < SMALLEST:
        return None, tensor
    if not tensor.is_cuda:
        return tensor.device, tensor.cpu()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, pinned.copy_(tensor, non_blocking=True)


def _unpack(packed: tuple[torch.device | None, Tensor]) -> Tensor:
    device, tensor = packed
    return tensor if device is None else tensor.to(device, non_blocking=True)
