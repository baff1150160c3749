"""Keys of exports: which formats are written, whether one is that vLLM does not run here, and which one is read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.export.formats import plan_quantized_formats
from tasks.layout import resolve_output
from tests.effects.change import SFT, Change, changes, stage_of
from tests.unit.tiny_model import save_tiny_model

INT8 = {**SFT, "export.formats": ["bf16", "int8"]}


def planned(recipe: Recipe, folder: Path) -> list[str]:
    stage = stage_of(folder / "export", recipe, kind="export", model=save_tiny_model(folder / "model"))
    return [plan.format_name for plan in plan_quantized_formats(stage)]


@changes((Change("export.formats", ["bf16", "fp8", "int8"], INT8), (["int8"], ["fp8", "int8"])))
def test_it_changes_which_formats_are_written(change: Change, expected: tuple[Any, Any], tmp_path: Path) -> None:
    assert (planned(change.before, tmp_path), planned(change.after, tmp_path)) == expected


@changes(Change("export.unproven", True, INT8))
def test_it_allows_formats_that_vllm_does_not_run(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else find_spec(name, *rest)
    )
    with pytest.raises(ConfigError, match="vLLM is not installed"):
        planned(change.before, tmp_path)
    assert planned(change.after, tmp_path) == ["int8"]


@changes(
    Change("pipeline.stages.format", "int8", {"pipeline.stages.kind": "upload", "pipeline.stages.model": "stage:e"})
)
def test_it_changes_which_format_is_read(change: Change) -> None:
    info: dict[str, Any] = {"model": "safetensors/step_3", "formats": {"int8": "int8/step_3"}}
    inputs: Any = {"e": {"path": "run/e", "kind": "export", "info": info}}
    values = {key.removeprefix("pipeline.stages."): value for key, value in change.base.items()}
    stages = [StageConfig.model_validate({"name": "u", **values, "format": name}) for name in ("", change.value)]
    found = [resolve_output(each.name, "model", each.model, inputs, each.format) for each in stages]
    assert found == ["run/e/safetensors/step_3", "run/e/int8/step_3"]
    del info["formats"]  # as of an export with export.formats = ["bf16"]
    assert resolve_output("u", "model", "stage:e", inputs, "bf16") == "run/e/safetensors/step_3"
