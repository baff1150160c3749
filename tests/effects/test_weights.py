"""The key of weights that lie elsewhere than the configuration of their model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ModelError
from cosmos_core.run.digests import shared_digest_cache
from cosmos_core.run.directory import Run, create_run
from cosmos_core.run.fingerprint import compute_fingerprint
from cosmos_core.run.inputs import check_inputs
from tasks.kinds import all_kinds
from tasks.layout import prepare_stage_folder
from tests.effects.change import Change, changes
from tests.unit.tiny_model import save_tiny_model

RECIPE = """
[pipeline]
name = "elsewhere"
[train.train_policy]
type = "sft"
[[pipeline.stages]]
name = "sft"
kind = "sft"
model = "model"
data = "rows"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and other weights of the same form in a folder that has nothing else."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    (tmp_path / "others").mkdir()
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "others/part.safetensors")
    (tmp_path / "rows").mkdir()
    (tmp_path / "p.toml").write_text(RECIPE)
    return tmp_path


def made(folder: Path, *settings: str) -> tuple[str, float]:
    """The fingerprint of the training, and the first weight of the model that it is given."""
    pipeline = load_pipeline(folder / "p.toml", settings, all_kinds())
    run: Run = create_run(pipeline)
    [sft] = [stage for stage in pipeline.stages if stage.name == "sft"]
    stage = sft.model_copy(update={"after": (), "data": str(folder / "rows")})
    found = compute_fingerprint(pipeline, stage, all_kinds()["sft"], {}, shared_digest_cache(run.output_dir))
    laid_out = prepare_stage_folder(run, stage, found)
    model = AutoModelForCausalLM.from_pretrained(laid_out.model, dtype=torch.float32)
    return found.value, next(model.parameters()).flatten()[0].item()


@changes(Change("policy.model_safetensor_path", "others"))
def test_it_changes_the_weights_of_a_model(change: Change, folder: Path) -> None:
    (usual, before), (found, after) = made(folder), made(folder, f"{change.key}='{change.value}'")
    assert after == pytest.approx(before + 1) and found != usual
    file = made(folder, f"{change.key}='others/part.safetensors'")
    assert file[1] == after
    save_file(load_file(folder / "model/model.safetensors"), folder / "others/part.safetensors")
    other, again = made(folder, f"{change.key}='others'")
    assert again == before and other != found, "the content counts"


def test_weights_that_are_not_there_are_one_line(folder: Path) -> None:
    shutil.rmtree(folder / "others")
    pipeline = load_pipeline(folder / "p.toml", ("policy.model_safetensor_path='others'",), all_kinds())
    with pytest.raises(ModelError, match=r"model_safetensor_path = 'others': no .safetensors file, and no folder with"):
        check_inputs(pipeline)
