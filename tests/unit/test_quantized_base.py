"""A base model whose files are quantized is trained as numbers, and its export has the numbers that were trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from cosmos_core.models.export import export_model
from cosmos_core.models.hf import load_config, load_model, load_tokenizer
from cosmos_core.models.quantized_base import make_dequantize_options
from cosmos_core.rollout.mxfp4 import quantize_bucket
from tests.unit.tiny_model import save_tiny_model

_BLOCK = 32


def declare(folder: Path, **quantization: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def save_fp8(folder: Path) -> Path:
    """A model as DeepSeek publishes its own: blocks of 8-bit weights with a scale each."""
    save_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        blocks = tensors[name].unflatten(0, (-1, _BLOCK)).unflatten(2, (-1, _BLOCK)).transpose(1, 2)
        scales = blocks.abs().amax((2, 3)) / 448
        values = (blocks / scales[..., None, None]).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        tensors[name] = values.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return declare(folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[_BLOCK, _BLOCK])


def save_mxfp4(folder: Path) -> Path:
    """A model as gpt-oss is published."""
    save_tiny_model(folder)
    (folder / "generation_config.json").unlink()
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, num_local_experts=2, num_experts_per_tok=1, vocab_size=260, layer_types=["full_attention"],
        eos_token_id=258, pad_token_id=256,
    )  # fmt: skip
    torch.manual_seed(0)
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    file = folder / "model.safetensors"
    packed = dict(quantize_bucket(list(load_file(file).items())))
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, file, {"format": "pt"})
    return declare(folder, quant_method="mxfp4", modules_to_not_convert=["lm_head"])


@pytest.mark.parametrize("save", [save_fp8, save_mxfp4])
def test_the_export_of_a_quantized_base_has_the_numbers_that_were_trained(
    tmp_path: Path, save: Callable[[Path], Path]
) -> None:
    folder = save(tmp_path / "base")
    assert make_dequantize_options(load_config(str(folder)))["quantization_config"].dequantize, "on a GPU too"
    model = load_model(str(folder), dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    export_model(model, load_tokenizer(str(folder)), tmp_path / "export", dtype=None)
    again = load_model(str(tmp_path / "export"), dtype=torch.bfloat16)
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
