"""An export that is pinned to a checkpoint: what the training had at that step, and not what it ended with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.checkpoint import export
from cosmos_core.checkpoint.load_checkpoint_model import find_train_stage
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.data import prepare
from cosmos_core.errors import ConfigError, ModelError
from cosmos_core.export.formats import _find_benchmarks, _find_prepared_rows
from cosmos_core.run.manifest import adopt_result, commit_manifest
from cosmos_core.run.stage import Stage, find_source_stage
from cosmos_core.train.setup import run
from cosmos_core.types import Outcome
from tasks.kinds import all_kinds
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.tiny_model import save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter

STEPS: dict[str, Any] = {
    **SFT, "train.compile": False, "train.param_dtype": "float32", "train.train_batch_per_replica": 1,
    "train.optm_lr": 1e-2, "train.ckpt.enable_checkpoint": True, "train.ckpt.save_freq": 2, "train.ckpt.max_keep": -1,
    "policy.model_max_length": 32,
}  # fmt: skip
VALIDATED = {"validation.enable": True, "validation.freq": 2}
LORA = {"policy.lora": {"r": 2, "lora_alpha": 4, "lora_dropout": 0.0, "target_modules": "all-linear"}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prepared rows: six to learn, which are six steps, and two held out."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"{i} is a number"}) + "\n" for i in range(8)))
    dataset = {"train.train_policy.dataset.name": str(folder / "rows.jsonl"), "train.train_policy.dataset.test_size": 2}
    save_tiny_model(folder / "model")
    prepare.run(stage_of(folder / "rows", recipe({**STEPS, **dataset}), kind="prepare", model=folder / "model"))
    return folder


def trained(path: Path, inputs: Path, **settings: Any) -> dict[str, Any]:
    """The result of a training, as a stage behind it gets it."""
    config = recipe({**STEPS, **settings})
    stage = stage_of(path, config, model=inputs / "model", data=inputs / "rows/data")
    stage.save()
    outcome = run(stage)
    return {
        "kind": "sft", "digest": "d", "fingerprint": "f", "metrics": {}, "path": str(path), "info": dict(outcome.info),
        "inputs": {},
    }  # fmt: skip


def exporting(path: Path, upstream: dict[str, Any], checkpoint: str) -> Stage:
    path.mkdir(parents=True)
    config = StageConfig(name="export", kind="export", model="stage:sft", after=("sft",), checkpoint=checkpoint)
    model, settings = str(Path(upstream["path"]) / upstream["info"]["model"]), recipe({"train.param_dtype": "float32"})
    return Stage(path, config, settings, model, None, {"sft": upstream}, "e" * 64, kind=all_kinds()[config.kind])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.full),
        pytest.param({"train.ema_enable": True}, marks=pytest.mark.full),
        LORA,
        pytest.param({"policy.freeze_pattern": ["embed_tokens"]}, marks=pytest.mark.full),
    ],
    ids=["all weights", "average", "adapter", "frozen"],
)
def test_the_last_checkpoint_is_what_the_training_handed_over_and_best_the_step_that_validation_named(
    inputs: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    upstream = trained(tmp_path / "run/stages/sft", inputs, **settings, **VALIDATED)
    stage = exporting(tmp_path / "run/stages/export", upstream, "6")
    outcome = export.run(stage)
    assert outcome.info["step"] == 6
    handed_over, pinned = Path(upstream["path"]) / "safetensors/step_6", stage.path / "safetensors/step_6"
    names = {str(file.relative_to(handed_over)) for file in handed_over.rglob("*.safetensors")}
    assert ("lora/adapter_model.safetensors" in names) == (settings is LORA)
    for name in sorted(names):
        expected, found = load_file(handed_over / name), load_file(pinned / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items()), name
    assert not (stage.path / "pinned").exists()
    best = exporting(tmp_path / "run/stages/best", upstream, "best")
    assert export.run(best).info["step"] == upstream["info"]["best"]["step"]


@pytest.mark.full
def test_an_earlier_checkpoint_is_exported_as_it_was(inputs: Path, tmp_path: Path) -> None:
    upstream = trained(tmp_path / "run/stages/sft", inputs)
    stage = exporting(tmp_path / "run/stages/export", upstream, "2")
    assert export.run(stage).outputs == ("safetensors/step_2",)
    policy = Path(upstream["path"]) / "checkpoints/step_2/policy"
    saved = {name: tensor for file in policy.glob("*.safetensors") for name, tensor in load_file(file).items()}
    found = load_file(stage.path / "safetensors/step_2/model.safetensors")
    last = load_file(Path(upstream["path"]) / "safetensors/step_6/model.safetensors")
    assert found.keys() == last.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[f"model.{name}"]), name
        assert not torch.equal(tensor, last[name]), name


def test_a_reused_training_has_its_checkpoints_and_settings_in_the_run_that_made_it(
    inputs: Path, tmp_path: Path
) -> None:
    made, reused, third = (tmp_path / run / "stages/sft" for run in ("one", "two", "three"))
    upstream = trained(made, inputs)
    info, metrics = upstream["info"], {"evaluation/task/acc": 0.5}
    result = commit_manifest(made, Outcome((info["model"],), metrics, info), kind="sft", fingerprint="f", inputs={})
    adopt_result(reused, third, adopt_result(made, reused, result))
    upstream |= {"path": str(third), "metrics": metrics}
    stage = exporting(tmp_path / "three/stages/export", upstream, "2")
    assert export.run(stage).info["step"] == 2
    assert _find_prepared_rows(stage) == inputs / "rows/data" and _find_benchmarks(stage) is None
    adopt_result(third, made, result)  # its own files were damaged
    assert find_source_stage(made) == made
    (made / "stage.toml").unlink()
    assert find_source_stage(third) == third
    for text in ("", "x = ", "[kind]\ngone = 1\n[stage]\n"):
        with pytest.raises(ConfigError, match=r"another machine or version made stage 'sft' \(.* --from-stage sft"):
            _find_benchmarks(stage)
        (third / "stage.toml").write_text(text)


def test_a_training_of_a_run_that_was_moved_has_the_model_and_the_rows_of_the_run(tmp_path: Path) -> None:
    old, new = (tmp_path / name / "stages" for name in ("old", "new"))
    result = {"kind": "sft", "digest": "d", "fingerprint": "f", "metrics": {}, "info": {}, "inputs": {}}
    stage = stage_of(old / "sft", recipe(STEPS), model=old / "first/safetensors/step_6", data=old / "rows/data")
    stage.config = stage.config.model_copy(update={"model": "stage:first", "data": "stage:rows"})
    stage.inputs = {name: {**result, "path": str(old / name)} for name in ("first", "rows")}
    stage.save()
    for folder in ("rows/data", "first"):
        (old / folder).mkdir(parents=True)
    (tmp_path / "old").rename(tmp_path / "new")
    exported = exporting(new / "export", {**result, "path": str(new / "sft"), "info": {"model": "m"}}, "6")
    training = find_train_stage(exported)
    assert (training.model, training.data) == (str(new / "first/safetensors/step_6"), new / "rows/data")
    assert _find_prepared_rows(exported) == new / "rows/data"


def test_formats_of_a_merge_in_a_run_that_was_moved_are_compared_on_the_rows_of_the_run(tmp_path: Path) -> None:
    result = {"kind": "sft", "digest": "d", "fingerprint": "f", "metrics": {}, "info": {"model": "m"}, "inputs": {}}
    old, new = (tmp_path / name / "stages" for name in ("old", "new"))
    results = {name: {**result, "path": str(old / name)} for name in ("rows", "first", "sft")}
    for name, kind, source in (("first", "sft", "rows"), ("sft", "merge", "first")):
        stage = stage_of(old / name, recipe(STEPS), kind=kind, model=tmp_path / "model", data=old / "rows/data")
        stage.inputs, stage.data = {source: results[source]}, stage.data if kind == "sft" else None
        stage.save()
    (old / "rows/data").mkdir(parents=True)
    (tmp_path / "old").rename(tmp_path / "new")
    merged = exporting(new / "export", {**results["sft"], "path": str(new / "sft")}, "")
    assert _find_prepared_rows(merged) == new / "rows/data"


def test_what_is_not_there_is_said(inputs: Path, tmp_path: Path) -> None:
    upstream = trained(tmp_path / "run/stages/sft", inputs, **{"train.ckpt.max_keep": 2})
    with pytest.raises(ModelError) as caught:
        export.run(exporting(tmp_path / "run/stages/two", upstream, "2"))
    assert str(caught.value) == (
        "checkpoint = '2' of stage 'sft': there is no checkpoint of step 2, only 4, 6; train with "
        "train.ckpt.enable_checkpoint = true, and raise train.ckpt.max_keep to keep more; a finished training is made "
        "again with --from-stage sft"
    )
    with pytest.raises(ModelError, match="it was not validated, so no step is the best"):
        export.run(exporting(tmp_path / "run/stages/best", upstream, "best"))
    file = next((Path(upstream["path"]) / "checkpoints/step_4/policy").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"step_4: .* bytes instead of .*; choose another step"):
        export.run(exporting(tmp_path / "run/stages/four", upstream, "4"))
