"""Keys of kernels that need a GPU: which modules they change. What the GPU does is emulated, or left out."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from cosmos_core.models import open_causal_lm
from cosmos_core.models.kernels import convert_to_fp8
from cosmos_core.train import setup
from tests.effects.change import SFT, Change, changes, stage_of

EAGER = {**SFT, "train.compile": False}
FP8 = {**EAGER, "train.fp8.enable_fp8": True}


@changes(
    (Change("train.fp8.enable_fp8", True, EAGER), [{"Linear"}, {"Float8Linear"}]),
    (Change("train.fp8.quant_recipe", "tensorwise", FP8), ["axiswise", "tensorwise"]),
)
def test_it_changes_the_linear_layers(
    change: Change, expected: list[Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    monkeypatch.setattr(open_causal_lm, "enable_fp8_if_supported", partial(convert_to_fp8, should_emulate=True))
    found: list[Any] = []
    for side in (change.before, change.after):
        trained = setup.open_trainer(stage_of(tmp_path / "stage", side, model=model)).adapter.model
        layers: list[Any] = [
            m for name, m in trained.named_modules() if isinstance(m, nn.Linear) and ".layers." in name
        ]
        if change.key == "train.fp8.enable_fp8":
            found.append({type(layer).__name__ for layer in layers})
        else:
            found += {layer.config.cast_config_input.scaling_granularity.value for layer in layers}
    assert found == expected


@changes(Change("policy.enable_liger_kernel", True, EAGER))
def test_it_changes_whether_liger_is_asked(
    change: Change, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    package: Any = ModuleType("liger_kernel.transformers.monkey_patch")
    package.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": lambda **settings: asked.append(settings)}
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", package)
    setup.open_trainer(stage_of(tmp_path / "before", change.before, model=model))
    assert asked == []
    trainer = setup.open_trainer(stage_of(tmp_path / "after", change.after, model=model))
    assert asked == [{"model": trainer.adapter.model, "cross_entropy": False, "fused_linear_cross_entropy": False}]
