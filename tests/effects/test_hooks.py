"""Keys that name functions of a user's own inside a training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.observe.sinks.base import send_to_sinks
from cosmos_core.run.progress import ProgressWriter
from tests.effects.change import SMALL, Change, changes, recipe, stage_of
from tests.effects.test_training import MEASURED, SAVING, trained

FILE = """
import json
from functools import partial
def note(name, stage, report_data):
    with open(stage.path / f"{name}.jsonl", "a") as file:
        file.write(json.dumps(report_data) + "\\n")
def __getattr__(name):
    if name.endswith("_hook"):
        return partial(note, name)
    raise AttributeError(name)
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


def hook(name: str) -> Change:
    return Change(f"train.hooks.{name}", f"hooks.py:{name}", SMALL)


CALLS = [
    (hook("pre_training_hook"), [{"start_step": 0, "total_steps": 4}, {"start_step": 2, "total_steps": 4}]),
    (hook("pre_training_step_hook"), STEPS),
    (hook("post_training_step_hook"), STEPS),
    (hook("post_training_hook"), [{"final_step": 4, "total_steps": 4}]),
    (hook("pre_validation_hook"), [{"current_step": 4}]),
    (hook("post_validation_hook"), [{"current_step": 4}]),
    (hook("load_checkpoint_hook"), [{"step": 2}]),
    (hook("save_checkpoint_hook"), [{"step": step} for step in (1, 2, 3, 4)]),
]


@pytest.fixture(scope="module")
def calls_of_all(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a training with every hook, which stops after two steps and goes on."""
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "hooks.py").write_text(FILE)
    settings = {**SAVING, **MEASURED, "train.ckpt.save_freq": 1}
    settings |= {change.key: f"{folder}/{change.value}" for change, _ in CALLS}
    for stop_after in (2, 0):
        trained(recipe(settings), inputs, folder / "sft", stop_after)
    return folder / "sft"


@changes(*CALLS)
def test_it_calls_a_function_of_the_users_own(
    change: Change, expected: list[dict[str, int]], calls_of_all: Path
) -> None:
    lines = (calls_of_all / f"{change.key.rpartition('.')[2]}.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    assert [{key: call[key] for key in like} for call, like in zip(calls, expected, strict=True)] == expected
    has_metrics = "loss" if change.key.endswith("training_hook") else "validation/loss"
    if change.key.startswith("train.hooks.post_"):
        assert all("loss" in call or has_metrics in call for call in calls)


def test_one_that_raises_ends_the_training_in_one_line(code: Path, inputs: Path, tmp_path: Path) -> None:
    settings = {**SMALL, "train.hooks.post_training_step_hook": f"{code}:fail"}
    with pytest.raises(ConfigError, match=r"^train.hooks.post_training_step_hook: ZeroDivisionError: .*hooks.py:12\)$"):
        trained(recipe(settings), inputs, tmp_path / "sft")


def test_a_function_is_told_the_metrics(code: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    stage = stage_of(tmp_path / "sft", recipe({**SMALL, "logging.logger": [f"{code}:log"]}))
    stage.__dict__["progress"] = ProgressWriter(stage.path / "progress.json")
    with send_to_sinks(stage):
        stage.metrics.log(3, {"loss": 0.5})
    assert "logged 3 0.5" in capfd.readouterr().out
