"""Keys that name functions of a user's own inside a training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.observe.sinks.base import send_to_sinks
from cosmos_core.run.progress import Progress
from tests.effects.change import Change, changes, recipe, stage_of
from tests.effects.test_training import MEASURED, SAVING, SMALL, inputs, trained

__all__ = ["inputs"]

FILE = """
import json
def note(stage, report_data):
    with open(stage.path / "calls.jsonl", "a") as file:
        file.write(json.dumps(report_data) + "\\n")
def fail(stage, report_data):
    return 1 / 0
def log(data, step):
    print("logged", step, data["loss"])
"""
STEPS = [{"current_step": step, "total_steps": 4} for step in (1, 2, 3, 4)]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    file = tmp_path / "hooks.py"
    file.write_text(FILE)
    return file


def hook(key: str, base: dict[str, Any] = SMALL) -> Change:
    return Change(f"train.hooks.{key}", "hooks.py:note", base)


@changes(
    (hook("pre_training_hook"), [{"start_step": 0, "total_steps": 4}, {"start_step": 2, "total_steps": 4}]),
    (hook("pre_training_step_hook"), STEPS),
    (hook("post_training_step_hook"), STEPS),
    (hook("post_training_hook"), [{"final_step": 4, "total_steps": 4}]),
    (hook("pre_validation_hook", MEASURED), [{"current_step": 4}]),
    (hook("post_validation_hook", MEASURED), [{"current_step": 4}]),
    (hook("load_checkpoint_hook"), [{"step": 2}]),
    (hook("save_checkpoint_hook", {**SAVING, "train.ckpt.save_freq": 1}), [{"step": step} for step in (1, 2, 3, 4)]),
)
def test_it_calls_a_function_of_the_users_own(
    change: Change, expected: list[dict[str, int]], code: Path, inputs: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "sft"
    for stop_after in (2, 0):
        trained(change.after, inputs, path, stop_after)
    calls = [json.loads(line) for line in (path / "calls.jsonl").read_text().splitlines()]
    assert [{key: call[key] for key in like} for call, like in zip(calls, expected, strict=True)] == expected
    has_metrics = "loss" if change.key.endswith("training_hook") else "validation/loss"
    if change.key.startswith("train.hooks.post_"):
        assert all("loss" in call or has_metrics in call for call in calls)


def test_one_that_raises_ends_the_training_in_one_line(code: Path, inputs: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "train.hooks.post_training_step_hook": f"{code}:fail"}
    with pytest.raises(ConfigError, match=r"^train.hooks.post_training_step_hook: ZeroDivisionError: .*hooks.py:7\)$"):
        trained(recipe(settings), inputs, tmp_path / "sft")


def test_a_function_is_told_the_metrics(code: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage = stage_of(tmp_path / "sft", recipe({**SMALL, "logging.logger": [f"{code}:log"]}))
    stage.__dict__["progress"] = Progress(stage.path / "progress.json")
    with send_to_sinks(stage):
        stage.metrics.log(3, {"loss": 0.5})
    assert "logged 3 0.5" in capfd.readouterr().out
