"""KTO: which rows are read, what of them is learned, and a training that tells good responses from bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.kto import Kto
from cosmos_core.config.schema.kto import KtoConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.data import prepare, quick_check
from cosmos_core.data.kinds.labelled import LabelledSequences
from cosmos_core.data.kinds.registry import load_row_kind
from cosmos_core.data.sample import Sample
from cosmos_core.errors import ConfigError, DataError
from cosmos_core.models.hf import load_tokenizer
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import validate
from cosmos_core.train.setup import run
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.data_tokenizers import learned
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import Given

KTO: dict[str, Any] = {
    **SFT, "train.train_policy.trainer_type": "kto", "train.compile": False, "train.param_dtype": "float32",
    "train.train_batch_per_replica": 4, "policy.model_max_length": 64, "policy.chat_template": "chatml",
    "train.optm_lr": 1e-3, "train.optm_warmup_steps": 0,
}  # fmt: skip


def stage(folder: Path, rows: list[dict[str, Any]], model: Path, **settings: Any) -> Stage:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"train.train_policy.dataset.name": str(folder / "rows.jsonl"), **settings}
    at = stage_of(folder / "stage", recipe({**KTO, **names}), model=model)
    prepare.run(at)
    at.data = at.path / "data"
    return at


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


TURNS = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
RESPONSE = [{"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "3", "completion": "4", "label": True}, ("4", True)),
        ({"prompt": TURNS, "completion": RESPONSE, "label": False}, ("4", False)),
        ({"messages": [*TURNS, *RESPONSE], "label": 1}, ("4", True)),
        ({"question": "3", "answer": "4", "label": "False"}, ("4", False)),
        ({"messages": [*TURNS, *RESPONSE], "kto_tag": True}, ("4", True)),
    ],
)
def test_of_a_row_with_a_label_the_last_response_is_learned(
    row: dict[str, Any], expected: tuple[str, bool], model: Path, tmp_path: Path
) -> None:
    at = stage(tmp_path, [row], model)
    rows = load_row_kind("labelled").open(at.path / "data", "train", at.recipe.policy)
    assert isinstance(rows, LabelledSequences)
    ids, mask = rows[0]
    assert learned(load_tokenizer(str(model)), ids.tolist(), mask.tolist()) == [f"{expected[0]}<|im_end|>"]
    assert rows.labels.tolist() == [expected[1]]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "3", "completion": "4"}, "label None among the columns prompt, completion must be true or false"),
        ({"prompt": "3", "completion": "4", "label": 0.5}, "0.5 among .* set train.train_policy.label_column_name"),
        ({"text": "3 4", "label": True}, "plain text has no prompt"),
        ({"messages": RESPONSE, "label": True}, "without a prompt"),
    ],
)
def test_rows_without_a_label_or_a_prompt_are_refused(
    row: dict[str, Any], told: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=told):
        stage(tmp_path, [row], model)
    if "without" not in told:  # a row to leave out, which the first look passes over
        names = {**KTO, "train.train_policy.dataset.name": str(tmp_path / "rows.jsonl")}
        with pytest.raises(DataError, match=told):
            quick_check.run(stage_of(tmp_path / "stage", recipe(names)))


MEASURED = {"train.epoch": 3, "validation.enable": True, "validation.freq": 12, "validation.val_before_train": True}
LABELLED = [{"prompt": str(i), "completion": ("yes", "no")[i % 2], "label": i % 2 == 0} for i in range(20)]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"policy.lora.r": 8, "train.optm_lr": 1e-2}, id="LoRA"),
        pytest.param({"train.train_policy.kto.loss_type": "apo_zero_unpaired"}, id="APO", marks=pytest.mark.full),
    ],
)
def test_labels_are_learned_and_measured_on_what_was_held_out(
    settings: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    settings = {**MEASURED, "train.train_policy.dataset.test_size": 4, **settings}
    at = stage(tmp_path / "train", LABELLED, model, **settings)
    outcome = run(at)
    lines = read_metrics(at.path / "metrics.jsonl")
    first, last = lines[1], lines[-1]
    assert lines[0]["validation/loss"] == pytest.approx(0.5) and first["loss"] == pytest.approx(0.5)
    assert first["kl"] == pytest.approx(0, abs=1e-5) and first["rewards/chosen"] == pytest.approx(0, abs=1e-5)
    assert last["loss"] < 0.45 and last["validation/loss"] < 0.45
    assert last["validation/rewards/chosen"] > last["validation/rewards/rejected"]
    assert "policy.lora.r" not in settings or last["validation/kl"] > 0

    apart = stage(tmp_path / "validate", LABELLED, model, **settings)
    apart.config = apart.config.model_copy(update={"kind": "validate"})
    with pytest.raises(ConfigError, match="name the stage that trained with the same rows"):
        validate.run(apart)
    apart.model, apart.inputs = str(at.path / str(outcome.info["model"])), {"kto": {"path": str(at.path)}}
    metrics = validate.run(apart).metrics
    names = [name for name in last if name.startswith("validation/")]
    assert {"validation/loss", "validation/kl", "validation/rewards/chosen"} <= {*names}
    assert {name: metrics[name] for name in names} == pytest.approx({name: last[name] for name in names}, rel=1e-4)


def test_a_step_that_lacks_another_prompt_is_refused(tmp_path: Path) -> None:
    settings = {**KTO, "train.train_batch_per_replica": 1, "train.train_policy.mini_batch": 1}
    at = stage_of(tmp_path / "s", recipe(settings))
    (line,) = at.recipe.train.train_policy.unsupported_setting_errors(StageContext(at.recipe, at.kind))
    assert "another prompt of" in line


def test_a_step_of_one_row_has_no_kl_because_no_other_response_is_there(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "completion": "4 5 6", "label": i % 2 == 0} for i in range(3)]
    settings = {
        "train.train_batch_per_replica": 2, "train.train_policy.dataloader_drop_last": False, "train.epoch": 2,
        "train.train_policy.dataset.test_size": 0,
    }  # fmt: skip
    at = stage(tmp_path, rows, model, **settings)
    run(at)
    divergences = [line["kl"] for line in read_metrics(at.path / "metrics.jsonl")]
    assert len(divergences) == 4 and divergences[1::2] == [0.0] * 2


def test_a_held_out_row_alone_has_no_kl_either() -> None:
    row = Sample(np.arange(3), np.array([0, 1, 1], dtype=np.uint8), reward=1.0, reference_logprob=-3.0)
    metrics = Kto(KtoConfig(type="sft")).measure([[row, row]], Given(policy=[torch.full((2,), -1.0)]), 1)
    assert metrics["rewards/chosen"] == pytest.approx(0.1) and metrics["kl"] == 0.0
