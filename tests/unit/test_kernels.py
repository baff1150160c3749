"""Kernels of other packages: what fp8 changes of a model and what it leaves, and what is refused."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.config.capabilities import check_capabilities
from cosmos_core.config.schema.precision import FP8Config
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import ConfigError
from cosmos_core.machine_properties import MachineProperties
from cosmos_core.models import causal_lm, kernels
from cosmos_core.models.causal_lm import CausalLM, InputProcessing
from cosmos_core.models.hf import load_model, load_tokenizer
from cosmos_core.models.kernels import (
    convert_to_fp8,
    enable_flash_attention_3,
    enable_fp8_if_supported,
    patch_with_liger,
    remove_fp8,
)
from cosmos_core.run import inputs
from cosmos_core.run.inputs import check_inputs, list_kernel_packages
from tests.unit import test_config_load
from tests.unit.tiny_model import save_tiny_model

IDS = torch.arange(3, 30).reshape(1, 27)  # no multiple of 16


@pytest.fixture
def model(tmp_path: Path) -> PreTrainedModel:
    return load_model(str(save_tiny_model(tmp_path / "model")), dtype=torch.float32)


@pytest.mark.parametrize("scales", ["rowwise", "tensorwise"])
def test_fp8_is_near_and_leaves_names_weights_and_the_head(model: PreTrainedModel, scales: str) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exact = model(input_ids=IDS, use_cache=False).logits
    exact.square().mean().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    convert_to_fp8(model, FP8Config(enable_fp8=True, quant_recipe=scales), should_emulate=True)
    kinds = {name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds.pop("lm_head") == "Linear" and set(kinds.values()) == {"Float8Linear"} and len(kinds) == 14
    logits = model(input_ids=IDS, use_cache=False).logits
    assert 1e-5 < (logits - exact).norm() / exact.norm() < 0.25
    logits.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert torch.cosine_similarity(parameter.grad.flatten(), gradients[name].flatten(), dim=0) > 0.9, name
    assert remove_fp8(model) is model
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert model.state_dict().keys() == state.keys()
    assert torch.equal(model(input_ids=IDS, use_cache=False).logits, exact)


@pytest.mark.parametrize(("has_gpu", "said"), [(True, "has one of 8.0"), (False, "has none")])
def test_fp8_is_left_out_with_a_warning_where_there_is_none(
    has_gpu: bool, said: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    enable_fp8_if_supported(model, FP8Config(enable_fp8=True))
    assert f"need an NVIDIA GPU of capability 8.9 or newer, and this machine {said}" in caplog.text
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}


def test_a_gpu_that_has_fp8_multiplies_in_it(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    enable_fp8_if_supported(model, FP8Config(enable_fp8=True))
    layers: list[Any] = [module for module in model.modules() if type(module).__name__ == "Float8Linear"]
    assert [layer.config.emulate for layer in layers] == [False] * 14


def test_a_family_that_liger_does_not_know_is_refused(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {}
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", package)
    with pytest.raises(ConfigError, match="Liger has no kernels for qwen3; leave it out"):
        patch_with_liger(model)


def test_the_export_of_a_model_with_kernels_of_liger_is_computed_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need a GPU, and the exported model is verified in host memory."""
    folder = save_tiny_model(tmp_path / "model")
    train = TrainConfig.model_validate({"sequence_packing": False, "train_policy": {"type": "sft"}})
    model = load_model(str(folder), dtype=torch.float32)
    namespace, exact = vars(sys.modules[type(model).__module__]), model(input_ids=IDS, use_cache=False).logits
    rotate, moves = namespace["apply_rotary_pos_emb"], list[Any]()
    monkeypatch.setitem(namespace, "apply_rotary_pos_emb", rotate)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: moves.append(device) or module)

    def triton(*arguments: Any, **keywords: Any) -> Any:
        raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")

    def patch(model: PreTrainedModel, **settings: Any) -> None:
        namespace["apply_rotary_pos_emb"] = triton
        for layer in model.model.layers:
            layer.mlp.forward = MethodType(triton, layer.mlp)

    triton.__module__ = "liger_kernel.ops"
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": patch}
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", package)
    patch_with_liger(model)
    adapter = CausalLM(model, train, InputProcessing(0, tokenizer=load_tokenizer(str(folder))))
    monkeypatch.setattr(causal_lm, "verify_export", lambda model, *_, **__: [model(input_ids=IDS).logits])
    export = adapter.export(tmp_path / "export")
    assert export is not None and torch.equal(export.passed_checks[0], exact) and moves == ["cpu"]
    assert namespace["apply_rotary_pos_emb"] is rotate


SFT = test_config_load.SFT


@pytest.mark.parametrize(
    ("setting", "package"),
    [("policy.enable_liger_kernel=true", "liger-kernel"), ("train.fp8.enable_fp8=true", "torchao")],
)
def test_kernels_are_refused_without_a_gpu_and_without_their_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, package: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    rows = f"train.train_policy.dataset.name={tmp_path}/rows.jsonl"
    pipeline = test_config_load.load(tmp_path, SFT, setting, f"policy.model_name_or_path={tmp_path}/model", rows)
    check_capabilities(pipeline)
    assert list(list_kernel_packages(pipeline.recipes["sft"])) == [package]
    key = setting.replace("=", " = ")

    def machine(gpus: tuple[str, ...], versions: dict[str, str]) -> None:
        facts = MachineProperties("host", gpus, 1, versions)
        monkeypatch.setattr(inputs, "measure_worker_machine", lambda *_, **__: facts)

    machine((), {package: "1"})
    refused = pytest.raises(ConfigError, match=f"{key}: these kernels need an NVIDIA GPU, and this machine has none")
    with nullcontext() if package == "torchao" else refused:  # without fp8 the same is computed, with a note
        check_inputs(pipeline)
    machine(("NVIDIA H100",), {})
    with pytest.raises(ConfigError, match=f"{key}: the package {package} is not installed"):
        check_inputs(pipeline)
    machine(("NVIDIA H100",), {package: "1"})
    check_inputs(pipeline)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["policy.lora.r=4"], "train.fp8.enable_fp8 = true excludes policy.lora"),
        (["train.param_dtype='float32'"], "train.fp8.enable_fp8 = true needs train.param_dtype = 'bfloat16'"),
        (["policy.parallelism.cp_size=2", "train.compile=false"], "excludes policy.parallelism.cp_size = 2"),
        (["train.fp8.fp8_recipe='delayed_scaling'"], "torchao scales dynamically alone"),
    ],
)
def test_what_fp8_does_not_go_with_is_refused(tmp_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_capabilities(test_config_load.load(tmp_path, SFT, "train.fp8.enable_fp8=true", *settings))


def test_a_hopper_takes_flash_attention_3_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with caplog.at_level("INFO"):
        assert not enable_flash_attention_3(), "its package is not installed here"
    asked: list[str] = []
    monkeypatch.setattr(kernels, "activate_flash_attention_impl", asked.append)
    assert enable_flash_attention_3() and asked == ["FA3"]
    capability = (8, 0)
    assert not enable_flash_attention_3() and asked == ["FA3"]
    assert "FlashAttention 2, because 3 is not there" in caplog.text
