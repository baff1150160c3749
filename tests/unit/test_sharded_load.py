"""A model that is read later, in parts, is the model that is loaded whole: every family, every tensor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import GenerationConfig

from cosmos_core.models.hf import load_model
from cosmos_core.models.sharded_load import _allocate_shards, init_on_meta, load_shards
from cosmos_core.parallel.fsdp import reshard
from tests.unit.test_model_families import ALIKE
from tests.unit.tiny_families import FAMILIES, save_family
from tests.unit.tiny_model import iter_checkpoint_weights, save_tiny_model

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [pytest.param(n, marks=[pytest.mark.full] * (n in ALIKE)) for n in FAMILIES])
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=["float32", "bfloat16"]
)
def test_every_family_is_the_one_that_is_loaded_whole(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path / family)
    GenerationConfig(temperature=0.25, do_sample=True).save_pretrained(folder)
    whole, later = load_model(str(folder), dtype=dtype), init_on_meta(str(folder), dtype=dtype, device=CPU)
    assert all(parameter.is_meta for parameter in later.parameters())
    load_shards(later)
    assert [name for name, _ in later.named_parameters()] == [name for name, _ in whole.named_parameters()]  # ties
    for ours, theirs in (
        (later.state_dict(), whole.state_dict()),
        (dict(later.named_buffers()), dict(whole.named_buffers())),
        (dict(iter_checkpoint_weights(later)), dict(iter_checkpoint_weights(whole))),
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
        model = init_on_meta(str(folder), dtype=torch.float32, device=torch.device("cuda"))  # too small for all of it
    assert "every rank loads the whole of" in caplog.text and "it has no model.safetensors" in caplog.text
    assert not any(parameter.is_meta for parameter in model.parameters())
    load_shards(model)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_shards_that_are_offloaded_are_allocated_in_host_memory_on_a_mesh_of_gpus() -> None:
    """FSDP refuses a shard that was made on the GPU: `train.fsdp_offload` would fail in the first forward pass."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh, module = init_device_mesh("cuda", (2,)), nn.Module()
        shard = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)])
        module.weight = nn.Parameter(shard, requires_grad=False)
        [weight] = _allocate_shards(module, CPU)["weight"]  # type: ignore[arg-type]
        assert isinstance(weight, DTensor) and weight is module.weight
        assert weight.device == weight.to_local().device == CPU
        assert (weight.shape, weight.to_local().shape, weight.placements) == ((4, 3), (2, 3), (Shard(0),))
    finally:
        dist.destroy_process_group()


def test_the_weights_may_change_in_host_memory_once_the_gpu_has_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are copied to the GPU in the background: a reference would be computed with weights of the policy."""
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("for the GPU"))
    reshard(nn.Linear(2, 2, device="meta"))
    assert not waits, "only for weights in host memory"
    reshard(nn.Linear(2, 2))
    assert waits == ["for the GPU"]
