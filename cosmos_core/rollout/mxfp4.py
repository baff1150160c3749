"""Experts in MXFP4, the format of gpt-oss checkpoints, which vLLM computes with where a checkpoint has it: blocks of 32
values of 4 bits (E2M1) that share a scale, a power of two (OCP Microscaling Formats 1.0). Engines that hold it get
weights of the trainer rounded to it.

Shape legend: E experts, I inputs, O outputs, N blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig

from cosmos_core.rollout.base import Bucket

FORMAT = "mxfp4"
_BLOCK = 32
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
_LARGEST_EXPONENT = 2
"""Of a value: the largest are 4 and 6."""
_BIAS = 127
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6; one that lies there is rounded to the even of the two."""


def has_mxfp4(config: PretrainedConfig) -> bool:
    """Return whether a checkpoint with this config.json holds its experts in MXFP4."""
    quantization = getattr(config, "quantization_config", None) or {}
    found = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    return str(getattr(found, "value", found)) == FORMAT


def with_mxfp4(bucket: Bucket) -> Bucket:
    """Return a bucket in which experts are as in such a checkpoint: `NAME_blocks`, `NAME_scales`."""
    found: Bucket = []
    for name, tensor in bucket:
        if name.endswith(_EXPERTS):
            blocks, scales = quantized(tensor.transpose(-1, -2))
            found += [(f"{name}_blocks", blocks), (f"{name}_scales", scales)]
        else:
            found.append((name, tensor))
    return found


def quantized(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest MXFP4 weight: uint8 E x O x N x 16, two values in each byte, the first in its lower half, and
    uint8 E x O x N, exponents of the scales plus 127."""
    experts = [_quantized(weight_OI) for weight_OI in weight_EOI]  # one at a time, since codes are as large as floats
    return torch.stack([blocks for blocks, _ in experts]), torch.stack([scales for _, scales in experts])


def _quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    values = weight_OI.float().unflatten(-1, (-1, _BLOCK))
    largest_ON = values.abs().amax(-1)
    exponents_ON = torch.frexp(largest_ON).exponent - 1 - _LARGEST_EXPONENT
    exponents_ON = torch.where(largest_ON > 0, exponents_ON, -_BIAS).clamp(-_BIAS, _BIAS)
    scaled = torch.ldexp(values, -exponents_ON.unsqueeze(-1))
    middles = torch.tensor(_MIDDLES, device=scaled.device)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))  # up, to the even one above
    codes = torch.bucketize(scaled.abs().contiguous(), middles, out_int32=True) + 8 * torch.signbit(scaled)
    codes = codes.to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents_ON + _BIAS).to(torch.uint8)
