"""Rounding of lengths, so that few different shapes occur on devices that compile kernels for each shape.

In half precision on the CPU, oneDNN compiles a kernel for each shape, and keeps the last 1024 kernels in memory, of
about 0.7 MB each. Lengths of rows are therefore rounded up on the CPU.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_HALF_PRECISION_DTYPES = (torch.bfloat16, torch.float16)


def round_up_length(length: int) -> int:
    """Return `length` rounded up to a multiple of 32 or, above 512, of an eighth of the next lower power of two."""
    return length + -length % max(32, (1 << length.bit_length()) // 16)


def kernel_padded_length(length: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the length to which rows of `length` tokens are padded for a computation in `dtype` on `device`: rounded
    up if each shape needs a kernel of its own (half precision on a CPU), otherwise unchanged."""
    return round_up_length(length) if device.type == "cpu" and dtype in _HALF_PRECISION_DTYPES else length


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None: autocast is disabled."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def pad_for_kernel(tensor: Tensor, dim: int) -> Tensor:
    """Pad a tensor with zeros at the end of dimension `dim`, a negative index, up to its `kernel_padded_length` for a
    computation in the dtype of autocast or, if autocast is disabled, of the tensor."""
    length, dtype = tensor.shape[dim], autocast_dtype(tensor.device) or tensor.dtype
    padding_length = kernel_padded_length(length, tensor.device, dtype) - length
    return pad(tensor, [0, 0] * (-dim - 1) + [0, padding_length]) if padding_length else tensor
