"""Keys of what is trained of a model: which of its weights, or which adapter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.models.lora import save_adapter
from cosmos_core.train.setup import open_trainer
from tests.effects.change import SFT, Change, changes, difference, stage_of

EAGER = {**SFT, "train.compile": False}
ADAPTED = {**EAGER, "policy.lora.target_modules": ("q_proj", "v_proj")}
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def model_of(recipe: Recipe, folder: Path, path: Path) -> PreTrainedModel:
    return open_trainer(stage_of(path / "stage", recipe, model=folder)).adapter.model


def facts(model: PreTrainedModel) -> dict[str, Any]:
    """What is seen of the adapter."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        "modules": {name.rpartition(".")[2] for name in layers},
        "ranks": {layer.r["default"] for layer in layers.values()},
        "scales": {layer.scaling["default"] for layer in layers.values()},
        "dropout": {getattr(layer.lora_dropout["default"], "p", 0.0) for layer in layers.values()},
        "starts at zero": not any(layer.lora_B["default"].weight.any() for layer in layers.values()),
        "whole": {name for name in trained if ".lora_" not in name},
    }


_FACTS: dict[str, dict[str, Any]] = {}
"""By recipe what is seen of its adapter before a change, found once."""


@changes(
    (Change("policy.lora.r", 4, ADAPTED), {"ranks": {4}, "scales": {2.0}}),
    (Change("policy.lora.lora_alpha", 16.0, ADAPTED), {"scales": {2.0}}),
    (Change("policy.lora.lora_dropout", 0.1, ADAPTED), {"dropout": {0.1}}),
    (Change("policy.lora.target_modules", "all-linear", {**EAGER, "policy.lora.r": 8}), {"modules": LINEAR}),
    (Change("policy.lora.use_rslora", True, ADAPTED), {"scales": {8 / math.sqrt(8)}}),
    (
        Change("policy.lora.modules_to_save", ("model.norm",), ADAPTED),
        {"whole": {"model.norm.modules_to_save.default.weight"}},
    ),
    (Change("policy.lora.alpha_pattern", {"v_proj": 4.0}, ADAPTED), {"scales": {1.0, 0.5}}),
    (Change("policy.lora.r_pattern", {"v_proj": 4}, ADAPTED), {"ranks": {8, 4}, "scales": {1.0, 2.0}}),
    (Change("policy.lora.init_lora_weights", False, ADAPTED), {"starts at zero": False}),
)
def test_it_changes_the_adapter(change: Change, expected: dict[str, Any], model: Path, tmp_path: Path) -> None:
    if (key := repr(change.before)) not in _FACTS:
        _FACTS[key] = facts(model_of(change.before, model, tmp_path))
    before, after = _FACTS[key], facts(model_of(change.after, model, tmp_path))
    assert before == {
        "modules": {"q_proj", "v_proj"}, "ranks": {8}, "scales": {1.0}, "dropout": {0.0}, "starts at zero": True,
        "whole": set(),
    }  # fmt: skip
    assert difference(before, after) == expected


@changes(
    (Change("policy.trainable_map", {"model": False, "model.norm": True}, EAGER), {"model.norm.weight"}),
    (Change("policy.freeze_pattern", ("proj", "embed", "layers"), EAGER), {"model.norm.weight"}),
    (Change("policy.trainable_pattern", ("model.norm",), EAGER), {"model.norm.weight"}),
)
def test_it_changes_which_weights_are_trained(change: Change, expected: set[str], model: Path, tmp_path: Path) -> None:
    def trained(recipe: Recipe) -> set[str]:
        parameters = model_of(recipe, model, tmp_path).named_parameters()
        return {name for name, parameter in parameters if parameter.requires_grad}

    assert len(trained(change.before)) == 24
    assert trained(change.after) == expected


def test_a_stage_that_validates_adds_no_adapter_to_what_it_measures(model: Path, tmp_path: Path) -> None:
    recipe = Change("policy.lora.r", 4, ADAPTED).after
    rank = open_trainer(stage_of(tmp_path / "stage", recipe, kind="validate", model=model))
    assert facts(rank.adapter.model)["modules"] == set()


@changes(Change("policy.lora.lora_path", "first", ADAPTED))
def test_it_changes_which_adapter_is_begun_with(
    change: Change, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = Change("policy.lora.r", 4, {**ADAPTED, "policy.lora.init_lora_weights": False}).after
    save_adapter(model_of(random, model, tmp_path), tmp_path / "first")
    before, after = (facts(model_of(side, model, tmp_path)) for side in (change.before, change.after))
    assert difference(before, after) == {"ranks": {4}, "scales": {2.0}, "starts at zero": False}
