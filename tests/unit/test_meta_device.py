"""Adapters that are made before the weights of their model are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.models.freeze import mark_trained_weights
from cosmos_core.models.hf import load_model, model_without_weights
from cosmos_core.models.meta_device import needs_base_weights
from tests.unit.tiny_model import save_tiny_model

POLICY = PolicyConfig.model_validate(
    {"lora": {"r": 4, "target_modules": "all-linear", "modules_to_save": ["model.norm"], "init_lora_weights": False}}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model")))


def test_an_adapter_begins_as_it_would_on_the_weights(folder: str) -> None:
    with torch.device("meta"):
        later = model_without_weights(folder, dtype=torch.float32)
    loaded = load_model(folder, dtype=torch.float32)
    for model in (later, loaded):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            mark_trained_weights(model, POLICY)
    found, expected = dict(later.named_parameters()), dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    assert {name for name in found if found[name].requires_grad} == {n for n in expected if expected[n].requires_grad}
    adapters = [name for name in found if ".lora_" in name]
    assert len(adapters) == 2 * 7 * later.config.num_hidden_layers
    for name in adapters:
        assert torch.equal(found[name], expected[name]), name
    assert all(found[name].is_meta for name in found if ".lora_" not in name and "modules_to_save" not in name)


def test_an_estimate_has_no_data_in_adapters_either(folder: str) -> None:
    with torch.device("meta"):
        model = model_without_weights(folder, dtype=torch.float32)
        mark_trained_weights(model, POLICY)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(("start", "expected"), [("pissa", True), ("pissa_niter_4", True), ("olora", True),
                                                 (True, False), (False, False), ("gaussian", False)])  # fmt: skip
def test_some_adapters_cannot_begin_without_the_weights(start: Any, expected: bool) -> None:
    assert needs_base_weights(LoraConfig(init_lora_weights=start)) is expected
    assert not needs_base_weights(None)
