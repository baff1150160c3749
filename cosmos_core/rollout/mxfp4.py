"""Quantization of experts to MXFP4, the format of gpt-oss checkpoints, for engines that hold experts in this format.

Blocks of 32 values of 4 bits (E2M1) share a scale, a power of two (OCP Microscaling Formats 1.0). vLLM computes in
MXFP4 if the checkpoint has this format, so the trainer's weights are rounded to MXFP4.

Shape legend: E experts, I inputs, O outputs, N blocks of a row.
"""

import torch
from torch import Tensor

from cosmos_core.rollout.base import Bucket

QUANTIZATION_FORMAT = "mxfp4"
_BLOCK_SIZE = 32
_EXPERT_WEIGHT_SUFFIXES = ("experts.gate_up_proj", "experts.down_proj")
_LARGEST_FP4_EXPONENT = 2
"""Exponent of the largest 4-bit (E2M1) values, 4 and 6."""
_EXPONENT_BIAS = 127
_ROUNDING_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Midpoints between the 4-bit values 0, 0.5, 1, 1.5, 2, 3, 4 and 6; a midpoint is rounded to the even neighbour."""


def quantize_bucket(bucket: Bucket) -> Bucket:
    """Return a bucket of weights with its experts as in an MXFP4 checkpoint: `NAME_blocks` and `NAME_scales` replace
    the tensor `NAME`. Other tensors are unchanged."""
    quantized_bucket: Bucket = []
    for name, tensor in bucket:
        if name.endswith(_EXPERT_WEIGHT_SUFFIXES):
            blocks, scales = quantize_experts(tensor.transpose(-1, -2))
            quantized_bucket += [(f"{name}_blocks", blocks), (f"{name}_scales", scales)]
        else:
            quantized_bucket.append((name, tensor))
    return quantized_bucket


def quantize_experts(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the MXFP4 weight that is nearest to the experts' weight: blocks, uint8 (E, O, N, 16) with two values in
    each byte, the first in the lower 4 bits; and scales, uint8 (E, O, N), which are exponents plus 127."""
    # Experts are quantized one at a time, because intermediate values need as much memory as the float weights.
    blocks, scales = zip(*map(_quantize_expert, weight_EOI), strict=True)
    return torch.stack(blocks), torch.stack(scales)


def _quantize_expert(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    weight_blocks = weight_OI.float().unflatten(-1, (-1, _BLOCK_SIZE))
    max_abs_ON = weight_blocks.abs().amax(-1)
    exponents_ON = torch.frexp(max_abs_ON).exponent - 1 - _LARGEST_FP4_EXPONENT
    exponents_ON = torch.where(max_abs_ON > 0, exponents_ON, -_EXPONENT_BIAS).clamp(-_EXPONENT_BIAS, _EXPONENT_BIAS)
    scaled_weights = torch.ldexp(weight_blocks, -exponents_ON.unsqueeze(-1))
    rounding_midpoints = torch.tensor(_ROUNDING_MIDPOINTS, device=scaled_weights.device)
    # Round midpoints to the neighbour with the even code, which is the upper neighbour of every second midpoint.
    rounding_midpoints[1::2] = torch.nextafter(rounding_midpoints[1::2], torch.zeros_like(rounding_midpoints[1::2]))
    magnitude_codes = torch.bucketize(scaled_weights.abs().contiguous(), rounding_midpoints, out_int32=True)
    fp4_codes = (magnitude_codes + 8 * torch.signbit(scaled_weights)).to(torch.uint8)
    return fp4_codes[..., 0::2] | (fp4_codes[..., 1::2] << 4), (exponents_ON + _EXPONENT_BIAS).to(torch.uint8)
