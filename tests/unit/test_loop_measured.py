"""Which steps are measured: the last one, known or not, and one whose measuring a stop cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from cosmos_core.algorithms.base import TrainerView, Update
from cosmos_core.algorithms.sft import Sft
from cosmos_core.checkpoint.best import BestStep
from cosmos_core.config.schema.sft import SftConfig
from cosmos_core.errors import Preempted
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.setup import train as train_stage
from cosmos_core.train.stop import StopRequested
from tests.unit.test_loop import inputs, interrupted, loop_of, stage  # noqa: F401 - the first two are fixtures

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter


@pytest.mark.parametrize("stopped", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_last_step_is_measured_where_the_data_ends_before_anybody_knows(
    stopped: bool,
    inputs: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    class Ends(RowFeed):
        def next_samples(self) -> Any:
            return super().next_samples() if self.step < 3 else None

    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(validation=at.recipe.validation.copy_with(freq=2))
    measured: list[int] = []
    published: list[int] = []

    def measure(step: int) -> dict[str, float]:
        measured.append(step)
        return {"validation/loss": 1 / step}

    def publish(step: int) -> dict[str, float]:
        published.append(step)
        return {}

    for _ in range(1 + stopped):  # who goes on from the last checkpoint does not measure it again
        loop = loop_of(at, measure, Ends, publish=publish)
        assert loop.run()["validation/loss"] == 1 / 3
        loop.checkpointer.close()
    assert measured == [2, 3] and published == [0, 1, 2, 3, 3] + [3] * stopped
    assert loop.validation.best_step == BestStep(3, "validation/loss", 1 / 3)
    lines = read_metrics(at.path / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation/loss" in line] == [2, 3]


def test_a_stop_cuts_a_validation_off_and_the_step_is_measured_when_the_training_goes_on(
    inputs: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(validation=at.recipe.validation.copy_with(freq=2))
    measured: list[int] = []

    def measure(step: int) -> dict[str, float]:
        measured.append(step)
        if measured == [2, 4]:
            raise StopRequested
        return {"validation/loss": 1 / step}

    for is_stopped in (True, False):
        loop = loop_of(at, measure)
        stops = pytest.raises(Preempted, match="stopped after step 4 of 6; checkpoint")
        with stops if is_stopped else nullcontext():
            loop.run()
        loop.checkpointer.close()
    assert measured == [2, 4, 4, 6] and loop.validation.best_step == BestStep(6, "validation/loss", 1 / 6)
    lines = read_metrics(at.path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [(line["step"], line["validation/loss"]) for line in lines if "validation/loss" in line] == [
        (step, 1 / step) for step in (2, 4, 6)
    ]


def test_a_validation_has_its_own_metrics_whatever_their_names(inputs: Path, tmp_path: Path) -> None:  # noqa: F811
    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(validation=at.recipe.validation.copy_with(freq=2))
    loop = loop_of(at, lambda step: {"validation/loss": 1 / step, "validation/reward/length_max": 1 / step})
    assert loop.run()["validation/reward/length_max"] == 1 / 6
    loop.checkpointer.close()


def test_a_stop_cuts_off_the_loss_of_held_out_rows(inputs: Path, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    at = stage(tmp_path / "sft", inputs)
    at.progress.advance = lambda *_: setattr(at, "stop_requested", True)  # type: ignore[method-assign]
    with pytest.raises(Preempted, match="stopped after step 1 of 6; checkpoint saved"):
        train_stage(at)
    assert not any("validation/loss" in line for line in read_metrics(at.path / "metrics.jsonl"))


def test_a_train_step_without_samples_is_a_step_of_the_algorithm(
    inputs: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    class Empty(RowFeed):
        def samples(self, step: int) -> tuple[list[Any], dict[str, float]]:
            return ([], {}) if step == 1 else super().samples(step)

    class Counts(Sft):
        steps: ClassVar[list[int]] = []

        def after_train_step(self, step: int, view: TrainerView) -> None:
            self.steps.append(step)

    algorithm = Counts(SftConfig(type="sft"))
    loop_of(stage(tmp_path / "sft", inputs, steps=3), lambda step: {}, Empty, algorithm).run()
    assert algorithm.steps == [1, 2, 3]


def test_a_training_that_goes_on_from_another_run_is_measured_before_its_first_step(
    inputs: Path,  # noqa: F811 - the fixture
    interrupted: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    """Whatever attempts before have left, and the step of the other run, whose checkpoint lies there, is not the best
    one here."""
    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(validation=at.recipe.validation.copy_with(freq=2, val_before_train=True))
    measured: list[int] = []

    def measure(step: int) -> dict[str, float]:
        measured.append(step)
        if measured == [3, 4]:
            raise KeyboardInterrupt  # killed without a checkpoint
        return {"validation/loss": 1 - 1 / step}

    for is_killed in (True, False):
        loop = loop_of(at, measure)
        loop.initial_checkpoint = interrupted / "stages/sft/checkpoints/step_3/policy"
        with pytest.raises(KeyboardInterrupt) if is_killed else nullcontext():
            loop.run()
        loop.checkpointer.close()
    assert measured == [3, 4, 3, 4, 6]
    assert loop.validation.best_step == BestStep(4, "validation/loss", 0.75)
    lines = read_metrics(at.path / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation/loss" in line] == [3, 4, 6]


def test_a_stop_before_the_first_step_saves_no_checkpoint_of_another_run(
    inputs: Path,  # noqa: F811 - the fixture
    interrupted: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    """The next attempt is the first one again, and measures before its first step."""
    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(validation=at.recipe.validation.copy_with(freq=2, val_before_train=True))
    measured: list[int] = []

    def measure(step: int) -> dict[str, float]:
        measured.append(step)
        if measured == [3]:
            raise StopRequested
        return {"validation/loss": 1 / step}

    stops = pytest.raises(Preempted, match="stopped after step 3 of 6; nothing saved")
    for stopping in (stops, nullcontext()):
        loop = loop_of(at, measure)
        loop.initial_checkpoint = interrupted / "stages/sft/checkpoints/step_3/policy"
        with stopping:
            loop.run()
        loop.checkpointer.close()
    assert measured == [3, 3, 4, 6]


def test_an_algorithm_gets_no_state_from_a_checkpoint_without_one(
    inputs: Path,  # noqa: F811 - the fixture
    interrupted: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    class Counting(Sft):
        count = 0

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    algorithm = Counting(SftConfig(type="sft"))
    loop = loop_of(stage(tmp_path / "sft", inputs), lambda step: {}, algorithm=algorithm)
    loop.initial_checkpoint = interrupted / "stages/sft/checkpoints/step_3/policy"
    loop.run()
    loop.checkpointer.close()
    assert loop.step == 6 and algorithm.count == 0


def test_the_tokens_of_a_second_are_those_that_were_trained_and_a_training_of_none_is_reported(
    inputs: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Leaving(Sft):
        """An algorithm that leaves out the first row of each step, and in the first step all."""

        num_tokens: ClassVar[list[int]] = []

        def updates(self, samples: Sequence[Any], view: TrainerView) -> Iterator[Update]:
            kept = samples[1:] if self.num_tokens else []
            self.num_tokens.append(sum(len(sample.input_ids) for sample in kept))
            yield from super().updates(kept, view) if kept else ()

    at = stage(tmp_path / "sft", inputs)
    at.recipe = at.recipe.copy_with(train=at.recipe.train.copy_with(train_batch_per_replica=2))
    loop_of(at, lambda step: {}, algorithm=Leaving(SftConfig(type="sft"))).run()
    lines = [line for line in read_metrics(at.path / "metrics.jsonl") if "tokens" in line]
    trained = [line["throughput/tokens_per_second"] * line["time/train"] for line in lines]
    assert trained == pytest.approx(Leaving.num_tokens) and Leaving.num_tokens[0] == 0 and len(lines) == 3
    assert [message for message in caplog.messages if "trains on none" in message] == [
        "step 1: the algorithm trains on none of 2 samples, and no step before has changed the weights"
    ]
