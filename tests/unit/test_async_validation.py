"""Validation while the training goes on: what is measured, when weights are held back, and what a checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.checkpoint.best import BestStep
from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.cluster.group import RanksMustRestart
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.errors import CosmosError, DataError, DiskFull, Preempted, StageFailed
from cosmos_core.parallel.exchange import _deserialize, _serialize
from cosmos_core.rollout.engine_pool import WeightsUnavailable
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import async_validation
from cosmos_core.train.async_validation import AsyncValidation
from cosmos_core.train.loop import TrainLoop
from cosmos_core.train.setup import open_trainer
from cosmos_core.types import Group
from tests.effects.change import recipe, stage_of
from tests.feeds import row_feed
from tests.unit.test_loop import STEPS, inputs, kept, named, pytestmark, validation  # noqa: F401 - a fixture and a mark
from tests.unit.trainers import sft


class Slow:
    """Validation by engines apart: each is done once so many train steps went by, with a value that is given."""

    def __init__(self, values: dict[int, float], asked: list[int]) -> None:
        self.values, self.validation_requests, self.step, self.left = values, asked, None, 0
        self.on_validation_end: Callable[[int, dict[str, float]], None] = lambda step, metrics: None

    def start_async(self, step: int) -> None:
        self.step, self.left = step, 2
        self.validation_requests.append(step)

    def poll(self) -> None:
        self.left -= 1
        if self.step is not None and self.left < 0:
            step, self.step = self.step, None
            self.on_validation_end(step, {"validation/reward": self.values[step]})

    def wait(self, present: int, between: Callable[[], None]) -> None:
        while self.step is not None:
            between()
            self.poll()


def train_apart(at: Stage, published: list[int], asked: list[int], stop_after: int = 0) -> BestStep | None:
    """Six steps, of which the second and the fourth are validated while the next are taken."""
    checkpointer = Checkpointer(at.path / "checkpoints", fingerprint="f", max_keep=1, is_async=False)
    at.stop_requested = False
    apart: Any = Slow({2: 0.9, 4: 0.5, 6: 0.1}, asked)

    def publish(step: int) -> dict[str, float]:
        published.append(step)
        return {}

    def watch(step: int, metrics: dict[str, float]) -> dict[str, float]:
        at.stop_requested = step == stop_after
        return {}

    assert at.data is not None
    feed = row_feed(open_sequences(at.data, "train"), at.recipe)
    loop = TrainLoop(
        at, at.recipe.train, open_trainer(at), feed, sft(), checkpointer,
        validation(at, lambda step: {"validation/reward": apart.values[step]}, async_validation=apart, publish=publish),
        check_metrics=watch,
    )  # fmt: skip
    try:
        loop.run()
    except Preempted as stopped:
        assert stop_after and "while step 2 was validated; the checkpoint is of step 2" in str(stopped)
    finally:
        checkpointer.close()
    return loop.validation.best_step


def apart_stage(path: Path, inputs: Path) -> Stage:  # noqa: F811
    config = recipe({**STEPS, "validation.freq": 2, "train.ckpt.max_keep": 1})
    return stage_of(path, config, model=inputs / "model", data=inputs / "rows/data")


def test_the_training_goes_on_while_engines_validate_and_the_best_step_is_the_one_that_was_measured(
    inputs: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    at, published, asked = apart_stage(tmp_path / "rl", inputs), [], []
    assert train_apart(at, published, asked) == BestStep(2, "validation/reward", 0.9)
    assert asked == [2, 4]
    # Step 3 has no weights of its own in the engines, which still have those of step 2; likewise 5.
    assert published == [0, 1, 2, 4, 6]
    lines = read_metrics(at.path / "metrics.jsonl")
    found = [(line["step"], line["validation/reward"]) for line in lines if "validation/reward" in line]
    assert found == [(2, 0.9), (4, 0.5), (6, 0.1)]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert kept(at) == [2, 6] and named(at) == {"step": 2, "metric": "validation/reward", "value": 0.9}


def test_a_validation_that_a_stop_cut_off_is_made_again_and_told_once(inputs: Path, tmp_path: Path) -> None:  # noqa: F811
    whole = apart_stage(tmp_path / "whole", inputs)
    train_apart(whole, [], [])
    at, asked = apart_stage(tmp_path / "rl", inputs), []
    train_apart(at, [], asked, stop_after=3)
    train_apart(at, [], asked)
    assert asked == [2, 2, 4]
    lines, expected = ([{k: v for k, v in line.items() if k in {"step", "loss", "validation/reward"}}
                        for line in read_metrics(each.path / "metrics.jsonl")] for each in (at, whole))  # fmt: skip
    assert sorted(lines, key=str) == sorted(expected, key=str)
    assert named(at) == named(whole)


class Full(DiskFull):
    """A class that other ranks do not know."""


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (WeightsUnavailable("the engines have died"), RanksMustRestart, "validation of step 4: the engines have died"),
        (DataError("no answer"), DataError, "no answer"),
        (Full("no room"), DiskFull, "no room"),
        (KeyError("text"), StageFailed, "validation of step 4: KeyError: 'text'"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_rank_raises_what_ended_a_validation_on_the_first(
    error: Exception, raised: type[CosmosError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_validation, "broadcast_object", lambda value: _deserialize(_serialize(value)))
    reply: Future[Group] = Future()
    reply.set_exception(error)
    fleet: Any = SimpleNamespace(version=4, is_stale=False, request=lambda *_, **__: reply)
    completions: Any = SimpleNamespace(validation_requests=([None], None, None), score=lambda groups: groups)
    apart = AsyncValidation(completions, fleet, send_missing_weights=lambda step: None, send_heartbeat=lambda: None)
    apart.start_async(4)
    with pytest.raises(raised) as found:
        apart.wait(4, lambda: None)
    assert type(found.value) is raised and str(found.value) == message
    assert apart.step is None


def test_a_stop_while_a_validation_ends_waits_for_the_line_of_the_train_step() -> None:
    def stop() -> None:
        raise AssertionError("asked to stop although nothing is waited for")

    metrics = {"validation/reward": 0.5}
    completions: Any = SimpleNamespace(validation_requests=([], None, None), log_metrics=lambda step, groups: metrics)
    fleet: Any = SimpleNamespace(version=4)
    runner = AsyncValidation(completions, fleet, lambda version: None, lambda: None)
    ended: list[tuple[int, float]] = []
    runner.on_validation_end = lambda step, found: ended.append((step, found["validation/reward"]))
    runner.start_async(4)
    assert runner._done_event.wait(60)
    runner.wait(5, stop)
    assert ended == [(4, 0.5)]
