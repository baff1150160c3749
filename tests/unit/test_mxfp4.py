"""MXFP4 against transformers' way back: rounding, exactness on what such a checkpoint holds, loading one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from cosmos_core.models.hf import load_config, load_model
from cosmos_core.models.quantized_base import quantization_method
from cosmos_core.rollout.mxfp4 import QUANTIZATION_FORMAT, quantize_bucket, quantize_experts
from tests.unit.test_quantized_base import save_mxfp4
from tests.unit.tiny_model import save_tiny_model

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def back(weight_EOI: torch.Tensor) -> torch.Tensor:
    """What transformers reads of our blocks."""
    return convert_moe_packed_tensors(*quantize_experts(weight_EOI), dtype=torch.float32).transpose(1, 2)


def test_values_are_rounded_to_the_nearest_and_those_of_the_format_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 5, 96, generator=generator) * torch.logspace(-6, 4, 15).view(3, 5, 1)
    weight[0, 0] = 0
    found = back(weight)
    blocks, scale = weight.unflatten(-1, (-1, 32)), None
    scale = 2.0 ** (blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30).log2().floor() - 2)
    table = torch.cat([-VALUES, VALUES]) * scale.unsqueeze(-1)
    nearest = (blocks.unsqueeze(-1) - table).abs().amin(-1)  # above the largest value it is the largest
    torch.testing.assert_close((found.unflatten(-1, (-1, 32)) - blocks).abs(), nearest, rtol=1e-6, atol=0)
    assert torch.equal(back(found), found)


@pytest.mark.parametrize(("between", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_what_lies_between_two_values_goes_to_the_even_one(between: float, even: float) -> None:
    row = torch.zeros(1, 1, 32)
    row[..., 0], row[..., 1], row[..., 2] = 4.0, between, -between
    assert back(row)[0, 0, :3].tolist() == [4.0, even, -even]


def test_a_checkpoint_of_such_experts_is_loaded_as_numbers_that_are_sent_as_they_were(tmp_path: Path) -> None:
    assert quantization_method(load_config(str(save_tiny_model(tmp_path / "plain")))) != QUANTIZATION_FORMAT
    packed = load_file(save_mxfp4(tmp_path) / "model.safetensors")
    assert quantization_method(load_config(str(tmp_path))) == QUANTIZATION_FORMAT
    model = load_model(str(tmp_path), dtype=torch.bfloat16)
    again = dict(quantize_bucket([(name, tensor.detach()) for name, tensor in model.state_dict().items()]))
    assert again.keys() == packed.keys() and len(packed) == len(model.state_dict()) + 2
    for name, tensor in packed.items():  # another scale may stand for the same values
        assert name.endswith(("_blocks", "_scales")) or torch.equal(again[name], tensor), name
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        stored = ((each[f"{key}_blocks"], each[f"{key}_scales"]) for each in (packed, again))
        assert torch.equal(*(convert_moe_packed_tensors(*tensors) for tensors in stored))
