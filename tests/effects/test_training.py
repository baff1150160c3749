"""Keys of a training's course: the checkpoints that it leaves and the steps at which it is measured, of real trainings
of four steps."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.errors import Preempted
from cosmos_core.run.progress import ProgressWriter, read_metrics
from cosmos_core.train.setup import train
from tests.effects.change import SMALL, Change, changes, difference, recipe, stage_of
from tests.unit.data_tokenizers import CHATML

SAVING = {**SMALL, "train.ckpt.enable_checkpoint": True}
MEASURED = {**SAVING, "validation.enable": True}


class Watch(ProgressWriter):
    """Notes who says that a checkpoint is complete, and calls `then` after a step."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.savers: set[str] = set()
        self.then: Any = lambda step: None

    def report_checkpoint(self, step: int) -> None:
        self.savers.add(threading.current_thread().name.partition("_")[0])

    def step(self, step: int, total: int | None = None, **metrics: float) -> None:
        self.then(step)


def trained(recipe_: Recipe, inputs: Path, path: Path, stop_after: int = 0) -> dict[str, Any]:
    """What a training leaves; one that is stopped after a step has more to go on with."""
    stage = stage_of(path, recipe_, model=inputs / "model", data=inputs / "rows/data")
    watch = stage.__dict__["progress"] = Watch(path / "progress.json")

    def stop(step: int) -> None:
        stage.stop_requested = stage.stop_requested or step == stop_after > 0

    watch.then = stop
    try:
        train(stage)
    except Preempted:
        assert stop_after
    lines = read_metrics(path / "metrics.jsonl")
    return {
        "checkpoints": sorted(int(folder.name.removeprefix("step_")) for folder in (path / "checkpoints").iterdir()),
        "savers": watch.savers,
        "steps": max(line["step"] for line in lines),
        "measured": [line["step"] for line in lines if "validation/loss" in line],
    }


_TRAINED: dict[str, tuple[Path, dict[str, Any]]] = {}


def trained_once(recipe_: Recipe, inputs: Path, path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of a training, and what it leaves; a training with the same recipe is not repeated."""
    key = repr(recipe_)
    if key not in _TRAINED:
        _TRAINED[key] = path, trained(recipe_, inputs, path)
    return _TRAINED[key]


@changes(
    (Change("train.ckpt.enable_checkpoint", True, {**SMALL, "train.ckpt.save_freq": 1}),
     {"checkpoints": [1, 2, 3, 4]}),
    (Change("train.ckpt.save_freq", 1, SAVING), {"checkpoints": [1, 2, 3, 4]}),
    (Change("train.ckpt.save_freq_in_epoch", 1, {**SAVING, "train.epoch": 2, "train.train_batch_per_replica": 4}),
     {"checkpoints": [2, 4]}),
    (Change("train.ckpt.max_keep", 1, {**SAVING, "train.ckpt.save_freq": 1}), {"checkpoints": [4]}),
    (Change("train.ckpt.save_mode", "sync", SAVING), {"savers": {"MainThread"}}),
    (Change("validation.enable", True, SAVING), {"measured": [4]}),
    (Change("validation.val_before_train", True, MEASURED), {"measured": [0, 4]}),
    (Change("validation.freq", 2, MEASURED), {"checkpoints": [2, 4], "measured": [2, 4]}),  # one of them is the best
)  # fmt: skip
def test_it_changes_what_a_training_leaves(
    change: Change, expected: dict[str, Any], inputs: Path, tmp_path: Path
) -> None:
    _, before = trained_once(change.before, inputs, tmp_path / "before")
    _, after = trained_once(change.after, inputs, tmp_path / "after")
    assert before["savers"] == {"checkpoint"} and before["steps"] == 4
    assert difference(before, after) == expected


def test_sft_that_completes_held_out_rows_measures_their_loss_as_well(inputs: Path, tmp_path: Path) -> None:
    model = shutil.copytree(inputs / "model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHATML)
    rows = [{"prompt": f"{i} + 1?", "response": str(i + 1)} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **MEASURED, "train.train_policy.dataset.name": str(tmp_path / "rows.jsonl"), "policy.model_max_length": 64,
        "train.train_policy.dataset.test_size": 2, "rollout.backend": "hf", "rollout.max_response_length": 4,
        "train.max_num_steps": 1,
    }  # fmt: skip
    found = []
    for name, more in (("plain", {}), ("judged", {"validation.reward_function": "exact_match"})):
        config = recipe({**settings, **more})
        data = stage_of(tmp_path / f"{name}-rows", config, kind="prepare", model=model)
        prepare.run(data)
        train(stage_of(tmp_path / name, config, model=model, data=data.path / "data"))
        found.append(read_metrics(tmp_path / name / "metrics.jsonl")[-1])
    plain, judged = found
    assert judged["validation/loss"] == pytest.approx(plain["validation/loss"], abs=1e-6)
    assert judged["validation/reward"] == 0.0 and "validation/reward" not in plain


AVERAGED = {**SMALL, "train.ema_enable": True, "train.optm_lr": 1e-3}
DECAYS = [2 / 11, 3 / 12, 4 / 13, 5 / 14]
_LEFT: dict[str, tuple[Path, Any]] = {}
"""By recipe the folder of a training with an average, and the model that it leaves."""


@changes(
    (Change("train.ema_enable", True, {**SMALL, "train.optm_lr": 1e-3}), ([0, 0, 0, 0], DECAYS)),
    (Change("train.ema_decay", 0.2, AVERAGED), (DECAYS, [2 / 11, 0.2, 0.2, 0.2])),
    (Change("train.ema_update_step_interval", 2, AVERAGED), (DECAYS, [2 / 11, 1, 4 / 13, 1])),
)
def test_it_changes_which_average_of_the_weights_is_left(
    change: Change, expected: tuple[list[float], list[float]], inputs: Path, tmp_path: Path
) -> None:
    """`expected`: what each of the four steps multiplies the average with, before and after the change."""
    for name, side, decays in zip(("before", "after"), (change.before, change.after), expected, strict=True):
        if (key := repr(side)) not in _LEFT:
            ckpt = side.train.ckpt.copy_with(enable_checkpoint=True, save_freq=1, max_keep=-1)
            config = side.model_copy(update={"train": side.train.copy_with(ckpt=ckpt)})
            stage = stage_of(tmp_path / name, config, model=inputs / "model", data=inputs / "rows/data")
            _LEFT[key] = stage.path, train(stage).adapter.model
        path, left = _LEFT[key]
        average = load_file(inputs / "model/model.safetensors")
        for step, decay in enumerate(decays, start=1):
            policy = path / f"checkpoints/step_{step}/policy"
            saved = {k: v for file in policy.glob("*.safetensors") for k, v in load_file(file).items()}
            average = {key: decay * old + (1 - decay) * saved[f"model.{key}"] for key, old in average.items()}
        for key, tensor in average.items():
            torch.testing.assert_close(left.state_dict()[key], tensor, rtol=1e-5, atol=1e-7)


@changes(Change("train.resume", True, SMALL))
def test_it_changes_where_a_training_begins(change: Change, inputs: Path, tmp_path: Path) -> None:
    trained(change.before, inputs, tmp_path / "out/first/stages/sft", stop_after=3)
    for name, side, begin in (("before", change.before, 0), ("after", change.after, 3)):
        stage = stage_of(tmp_path / f"out/{name}/stages/sft", side, model=inputs / "model", data=inputs / "rows/data")
        watch = stage.__dict__["progress"] = Watch(stage.path / "progress.json")
        steps: list[int] = []
        watch.then = steps.append
        train(stage)
        assert steps == list(range(begin, 5))
        shutil.rmtree(stage.path)


@changes(Change("train.save_ckpt_at_exit", False, SMALL))
def test_it_changes_what_a_stopped_training_leaves(change: Change, inputs: Path, tmp_path: Path) -> None:
    before = trained(change.before, inputs, tmp_path / "before", stop_after=2)
    after = trained(change.after, inputs, tmp_path / "after", stop_after=2)
    assert before["steps"] == after["steps"] == 2
    assert (before["checkpoints"], after["checkpoints"]) == ([2], [])
