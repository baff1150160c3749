"""A model that is read later, in parts, is the model that is loaded whole: every family, every tensor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from cosmos_core.models.hf import load_model, named_weights
from cosmos_core.models.sharded_load import init_on_meta, load_sharded
from tests.unit.tiny_families import FAMILIES, save_family
from tests.unit.tiny_model import save_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_family_is_the_one_that_is_loaded_whole(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path / family)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(folder)
    whole, later = load_model(str(folder), dtype=dtype), init_on_meta(str(folder), dtype=dtype, device=CPU)
    assert all(parameter.is_meta for parameter in later.parameters())
    load_sharded(later)
    assert [name for name, _ in later.named_parameters()] == [name for name, _ in whole.named_parameters()]  # ties
    for ours, theirs in (
        (later.state_dict(), whole.state_dict()),
        (dict(later.named_buffers()), dict(whole.named_buffers())),
        (dict(named_weights(later)), dict(named_weights(whole))),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype and torch.equal(ours[name], tensor), name
    assert later.config.to_dict() == whole.config.to_dict()
    assert later.config._attn_implementation == whole.config._attn_implementation
    assert later.generation_config.temperature == 0.25
    ids = torch.arange(5).unsqueeze(0)
    assert torch.equal(later(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert later.training is False


def test_files_that_are_no_safetensors_are_loaded_whole_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model(tmp_path / "tiny")
    whole = load_model(str(folder), dtype=torch.float32)
    (folder / "model.safetensors").unlink()
    torch.save(whole.state_dict(), folder / "pytorch_model.bin")
    with caplog.at_level(logging.INFO, "cosmos_core"):
        model = init_on_meta(str(folder), dtype=torch.float32, device=CPU)
    assert "every rank loads the whole of" in caplog.text and "it has no model.safetensors" in caplog.text
    assert not any(parameter.is_meta for parameter in model.parameters())
    load_sharded(model)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
