"""Few different shapes, where kernels are compiled for each.

On CPU, oneDNN compiles half precision for each shape that it sees and keeps the last 1024 kernels, of about 0.7 MB
each, between the tensors of the heap. Lengths that differ from row to row are therefore rounded up there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_HALF = (torch.bfloat16, torch.float16)


def round_length(length: int) -> int:
    """Return the next multiple of 32, and above 512 of an eighth of the power of two below."""
    return length + -length % max(32, (1 << length.bit_length()) // 16)


def kernel_length(length: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the length to pad `length` to for a computation in `dtype`: `round_length` if each shape compiles a
    kernel, else `length`."""
    return round_length(length) if device.type == "cpu" and dtype in _HALF else length


def pad_to_kernel(tensor: Tensor, dim: int) -> Tensor:
    """Pad the tensor with zeros at the end of `dim` (negative) to `kernel_length` for the dtype of autocast."""
    kind, length = tensor.device.type, tensor.shape[dim]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
    missing = kernel_length(length, tensor.device, dtype) - length
    return pad(tensor, [0, 0] * (-dim - 1) + [0, missing]) if missing else tensor
