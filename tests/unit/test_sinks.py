"""W&B and TensorBoard: what they are told, what a resume does to it, and that their trouble is never the training's."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError
from cosmos_core.observe.sinks import base as sinks
from cosmos_core.observe.sinks.base import find_sink_class, send_to_sinks
from cosmos_core.run.inputs import check_inputs
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.types import Outcome
from cosmos_core.worker.program import _run_with_metrics
from tasks.kinds import all_kinds
from tests.conftest import wait_until
from tests.unit.run_folder import load_recipe, make_inputs


def make_stage(run: Path, *loggers: str, name: str = "sft", **settings: Any) -> Stage:
    path = run / "stages" / name
    path.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps({"pipeline": "math"}))
    recipe = Recipe.model_validate({"logging": {"logger": list(loggers), **settings}, "train": {"epoch": 3}})
    return Stage(path, StageConfig(name=name, kind="sft"), recipe, "", None, {}, "f" * 64, kind=all_kinds()["sft"])


def loss(step: int) -> float:
    return 1 / (step + 1)


def train(stage: Stage, first: int, last: int, **openers: Any) -> None:
    """One attempt that goes on behind the checkpoint of step `first - 1`."""
    with send_to_sinks(stage, openers.__getitem__ if openers else find_sink_class):
        stage.metrics.remove_lines_after_step(first - 1)
        for step in range(first, last + 1):
            stage.metrics.log(step, {"loss": loss(step), "reward/mean": step / 2})


def steps_on_disk(stage: Stage) -> list[int]:
    return [line["step"] for line in read_metrics(stage.path / "metrics.jsonl")]


class FakeWandB:
    """What a server would keep of several attempts: one history a run id, and no step twice."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.history: dict[str, dict[int, dict[str, float]]] = {}
        self.finished: list[int] = []
        self.is_reachable = True

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **arguments: Any) -> Any:
        self.inits.append(arguments)
        if not self.is_reachable:
            raise ConnectionError("no route\nto host")
        history = self.history.setdefault(arguments["id"], {})

        def log(values: dict[str, float], step: int) -> None:
            assert not history.get(step, {}).keys() & values and step >= max(history, default=0)
            history[step] = history.get(step, {}) | values

        return SimpleNamespace(
            starting_step=max(history) + 1 if history else 0,
            log=log,
            finish=lambda exit_code: self.finished.append(exit_code),
        )


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    return fake


def test_a_stage_is_a_run_named_after_recipe_run_and_stage(tmp_path: Path, wandb: FakeWandB) -> None:
    named = {"project_name": "algebra", "group_name": "sweep", "experiment_name": "small"}
    train(make_stage(tmp_path / "r1", "console", "wandb", **named), 1, 3)
    train(make_stage(tmp_path / "r1", "wandb", name="rl"), 1, 1)
    first, second = wandb.inits
    assert [first[key] for key in ("project", "group", "name")] == ["algebra", "sweep", "small-r1-sft"]
    assert first["job_type"] == "sft"
    assert [second[key] for key in ("project", "group", "name")] == ["cosmos_rl", "math-r1", "math-r1-rl"]
    assert first["config"]["train"]["epoch"] == 3 and first["id"] != second["id"] and first["resume"] == "allow"
    quiet = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
    assert quiet.items() <= first["settings"].items()
    assert wandb.history[first["id"]] == {step: {"loss": loss(step), "reward/mean": step / 2} for step in (1, 2, 3)}
    assert wandb.finished == [0, 0]


def test_a_service_is_told_no_secret_of_the_settings(tmp_path: Path, wandb: FakeWandB) -> None:
    stage = make_stage(tmp_path / "r1", "wandb")
    stage.recipe = stage.recipe.copy_with(custom={"api_key": "correct horse", "steps": 3})
    train(stage, 1, 1)
    assert wandb.inits[0]["config"]["custom"] == {"api_key": "***", "steps": 3}


@pytest.mark.parametrize(("loggers", "steps"), [(["console"], [1, 2, 3]), (["wandb", "tensorboard"], [])])
def test_only_the_sinks_that_are_named_are_told_and_none_without_metrics(
    tmp_path: Path, wandb: FakeWandB, loggers: list[str], steps: list[int]
) -> None:
    stage = make_stage(tmp_path / "r1", *loggers)
    train(stage, 1, len(steps))
    assert wandb.inits == [] and not (stage.path / "tensorboard").exists() and steps_on_disk(stage) == steps


def test_a_resumed_stage_goes_on_in_its_run_and_repeats_no_step(tmp_path: Path, wandb: FakeWandB) -> None:
    for first, last in ((1, 7), (5, 9)):  # killed after 7, the checkpoint was of 4
        train(make_stage(tmp_path / "r1", "wandb"), first, last)
    (history,) = wandb.history.values()
    assert list(history) == list(range(1, 10)) and len(wandb.inits) == 2


def test_a_resumed_stage_sends_what_could_not_be_sent_before(tmp_path: Path, wandb: FakeWandB) -> None:
    wandb.is_reachable = False
    train(make_stage(tmp_path / "r1", "wandb"), 0, 7)
    wandb.is_reachable = True
    train(make_stage(tmp_path / "r1", "wandb"), 5, 9)
    (history,) = wandb.history.values()
    assert {step: values["loss"] for step, values in history.items()} == {step: loss(step) for step in range(10)}


def interrupted(folder: Path, sink: str) -> Stage:
    """A training that was stopped in the validation of step 3, then of step 5 in its second attempt: each is resumed
    from the checkpoint of that step."""
    validated = {"validation/loss": 0.5, "time/validate": 1.0}
    for start, last in ((0, 3), (3, 5), (5, 6)):
        stage = make_stage(folder / "r1", sink)
        with send_to_sinks(stage):
            stage.metrics.remove_lines_after_step(start)
            if start:
                stage.metrics.log(start, {**validated, "validation/at": start})
            for step in range(start + 1, last + 1):
                stage.metrics.log(step, {"loss": loss(step)})
    return stage


def test_a_validation_that_was_cut_off_is_sent_by_the_next_attempt(tmp_path: Path, wandb: FakeWandB) -> None:
    interrupted(tmp_path, "wandb")
    (history,) = wandb.history.values()
    assert {step: values["loss"] for step, values in history.items()} == {step: loss(step) for step in range(1, 7)}
    late = {step: values for step, values in history.items() if "validation/at" in values}
    assert {step: values["validation/step"] for step, values in late.items()} == {4: 3, 6: 5}


def test_a_validation_that_is_tried_again_is_sent_once(tmp_path: Path, wandb: FakeWandB) -> None:
    for attempt in range(2):  # it measures step 0 each time, and cuts nothing back
        wandb.is_reachable = attempt == 1
        stage = make_stage(tmp_path / "r1", "wandb")
        with send_to_sinks(stage):
            stage.metrics.log(0, {"validation/loss": 0.5 + attempt})
    assert list(wandb.history.values()) == [{0: {"validation/loss": 1.5}}] and wandb.finished == [0]


def test_a_measurement_that_is_tried_again_leaves_one_line_of_metrics(tmp_path: Path) -> None:
    for attempt in range(2):
        stage = replace(make_stage(tmp_path / "r1"), kind=all_kinds()["validate"])
        _run_with_metrics(stage, lambda stage, attempt=attempt: stage.metrics.log(0, {"loss": attempt}) or Outcome())
    assert [line["loss"] for line in read_metrics(stage.path / "metrics.jsonl")] == [1]


def test_a_stage_made_anew_is_another_run_and_a_failed_stage_a_failed_run(tmp_path: Path, wandb: FakeWandB) -> None:
    stage = make_stage(tmp_path / "r1", "wandb")
    with pytest.raises(ZeroDivisionError), send_to_sinks(stage):
        stage.metrics.log(1, {"loss": 1.0})
        raise ZeroDivisionError
    stage.path.rename(tmp_path / "aside")
    train(make_stage(tmp_path / "r1", "wandb"), 1, 3)
    assert [list(history) for history in wandb.history.values()] == [[1], [1, 2, 3]] and wandb.finished == [1, 0]


class _Broken:
    """A sink that fails from its `limit`-th call on."""

    starting_step = 0

    def __init__(self, limit: int) -> None:
        self.limit, self.calls = limit, 0

    def open(self, stage: Stage, first_step: int) -> _Broken:
        self.log({})
        return self

    def log(self, line: dict[str, Any]) -> None:
        self.calls += 1
        if self.calls >= self.limit:
            raise RuntimeError("broken\npipe")

    def close(self, exit_code: int) -> None:
        self.log({})


@pytest.mark.parametrize("limit", [1, 2, 4, 7])  # at the opening, at the first line, later, at the end
def test_a_sink_that_raises_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int) -> None:
    stage, sink = make_stage(tmp_path / "r1", "wandb"), _Broken(limit)
    train(stage, 1, 5, wandb=sink.open)
    assert steps_on_disk(stage) == [1, 2, 3, 4, 5] and sink.calls == limit
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == (
        "logging.logger 'wandb': RuntimeError: broken pipe; training does not need it, metrics.jsonl is complete"
    )


@pytest.mark.parametrize(
    ("is_stopping", "limit"), [(False, "SINK_CLOSE_TIMEOUT_SECONDS"), (True, "SINK_STOP_TIMEOUT_SECONDS")]
)
def test_a_sink_that_hangs_is_waited_for_so_long_and_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, is_stopping: bool, limit: str
) -> None:
    for each in ("SINK_CLOSE_TIMEOUT_SECONDS", "SINK_STOP_TIMEOUT_SECONDS"):  # the other is longer than a test may take
        monkeypatch.setattr(sinks, each, 0.1 if each == limit else 7200.0)
    stage, released = make_stage(tmp_path / "r1", "wandb", "tensorboard"), threading.Event()
    stage.stop_requested = is_stopping

    def hang(stage: Stage, first_step: int) -> Any:
        released.wait()
        raise TimeoutError

    train(stage, 1, 5, wandb=hang, tensorboard=hang)
    # A sink thread of the test before may log its error as late as now.
    warnings = [said for record in caplog.records if "not done" in (said := record.getMessage())]
    released.set()
    assert steps_on_disk(stage) == [1, 2, 3, 4, 5]
    assert len(warnings) == 2 and "not done 0.1 s after the end" in warnings[0]


def tensorboard_events(stage: Stage, tag: str) -> list[Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(stage.path / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return accumulator.Scalars(tag) if tag in accumulator.Tags()["scalars"] else []


def tensorboard_scalars(stage: Stage, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in tensorboard_events(stage, tag)]


def test_tensorboard_shows_every_step_once_after_a_resume(tmp_path: Path) -> None:
    stage = make_stage(tmp_path / "r1", "tensorboard")
    train(stage, 0, 7)
    assert [step for step, _ in tensorboard_scalars(stage, "loss")] == list(range(8))
    resumed = make_stage(tmp_path / "r1", "tensorboard")
    train(resumed, 5, 9)
    assert tensorboard_scalars(resumed, "loss") == [(step, float(np.float32(loss(step)))) for step in range(10)]
    assert tensorboard_scalars(resumed, "reward/mean") == [(step, step / 2) for step in range(10)]
    times = [line["time"] for line in read_metrics(stage.path / "metrics.jsonl")]
    assert [event.wall_time for event in tensorboard_events(resumed, "loss")] == times


def test_tensorboard_keeps_the_step_whose_validation_was_cut_off(tmp_path: Path) -> None:
    stage = interrupted(tmp_path, "tensorboard")
    assert [step for step, _ in tensorboard_scalars(stage, "loss")] == list(range(1, 7))
    assert tensorboard_scalars(stage, "validation/at") == [(3, 3.0), (5, 5.0)]


def test_tensorboard_has_each_step_while_the_stage_still_runs(tmp_path: Path) -> None:
    stage = make_stage(tmp_path / "r1", "tensorboard")
    expected = [(1, 0.5), (2, 0.25), (3, 0.125)]
    with send_to_sinks(stage):
        for step, value in expected:
            stage.metrics.log(step, {"loss": value})
        folder = stage.path / "tensorboard"
        wait_until(lambda: folder.exists() and tensorboard_scalars(stage, "loss") == expected, 30, "all steps")


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of a `.wandb` file: blocks of 32 KiB, each part with 4 bytes of checksum, 2 of length, 1 of kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, record = file.read_bytes(), b""
    position = 7  # the header of the file
    while position + 7 <= len(data):
        rest = 32768 - position % 32768
        if rest < 7:
            position += rest
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        part = data[position + 7 : position + 7 + size]
        position += 7 + size
        record = part if kind in {1, 2} else record + part  # 1 whole, 2 first, 3 middle, 4 last
        if kind in {1, 4}:
            yield Record.FromString(record)


def finished_records(file: Path) -> list[Any]:
    """All records of a run; W&B's own process writes the last of them when it gets to it."""

    def kinds() -> list[str]:
        return [record.WhichOneof("record_type") for record in wandb_records(file)]

    wait_until(lambda: "exit" in kinds(), 60, lambda: f"only {kinds()}", pause=0.2)
    return list(wandb_records(file))


def offline_runs(stage: Stage) -> list[dict[int, float]]:
    """Losses by step of each offline run."""
    found = []
    for file in stage.path.glob("wandb/offline-run-*/*.wandb"):
        records = finished_records(file)
        losses = {}
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                assert int(items["_step"]) not in losses
                losses[int(items["_step"])] = float(items["loss"])
        found.append(losses)
    return found


def test_offline_an_attempt_leaves_a_folder_with_all_steps_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(sinks, "SINK_CLOSE_TIMEOUT_SECONDS", 60.0)
    train(make_stage(tmp_path / "r1"), 1, 7)
    stage = make_stage(tmp_path / "r1", "wandb")
    state = np.random.get_state()[1]
    train(stage, 5, 9)
    [losses] = offline_runs(stage)
    assert losses == {step: loss(step) for step in range(1, 10)}
    assert np.array_equal(np.random.get_state()[1], state)


def without(folder: Path, *packages: str) -> str:
    """An interpreter that lists every package but these."""
    (folder / "program.py").write_text(
        "import importlib.metadata as m, runpy, sys\n"
        "real = m.version\n"
        "def version(name):\n"
        f"    if name in {packages!r}:\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "sys.argv = sys.argv[2:]\n"
        "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    )
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {folder}/program.py "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_what_needs_a_package_that_the_workers_lack_is_refused_before_anything_runs(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    python = f"pipeline.python={without(tmp_path, 'wandb', 'mlflow-skinny', 'torchao')}"
    check_inputs(load_recipe(tmp_path, python, "logging.logger=['console']", "train.optm_name=AdamW"))
    check_inputs(load_recipe(tmp_path, "logging.logger=['wandb', 'tensorboard']"))
    for setting, need, package, extra in (
        ("logging.logger=['console', 'wandb', 'tensorboard']", "logging.logger 'wandb'", "wandb", "wandb"),
        ("logging.logger=['console', 'mlflow']", "logging.logger 'mlflow'", "mlflow-skinny", "mlflow"),
        ("train.optm_name=AdamW8bit", "stage 'sft': train.optm_name = 'AdamW8bit'", "torchao", "torchao"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_inputs(load_recipe(tmp_path, python, setting))
        said = (
            f"{need}: the package {package} is not installed; pip install 'cosmos-posttrain[{extra}]' or leave it out"
        )
        assert str(caught.value).endswith(said) and "\n" not in str(caught.value)
        assert caught.value.exit_code == 64
    with pytest.raises(ConfigError, match=r"pipeline\.python = '/no/python' does not run"):
        check_inputs(load_recipe(tmp_path, "pipeline.python=/no/python", "logging.logger=['wandb']"))
