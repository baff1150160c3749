"""Settings that are `auto`: what is found, and that a training with them is the one with the values that were found."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from configs.demo import arithmetic
from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.algorithms.sft import Sft
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train import tuning as tuning_module
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.setup import open_trainer, train
from cosmos_core.train.trainer import SpeedSettings, Trainer
from cosmos_core.train.tuning import (
    SettingsSearch,
    SpeedTuning,
    _Measurement,
    micro_batch_sizes,
    thread_counts,
)
from tests.feeds import row_feed
from tests.unit.test_train import GRPO, SFT, make_stage, recipe
from tests.unit.trainers import assert_same_weights, curve, train_until

DPO = {"type": "sft", "trainer_type": "dpo", "mini_batch": 2}
AUTO_KEYS = {"tuning/rows_per_pass", "tuning/num_threads", "time/tuning"}


@pytest.fixture(autouse=True)
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second to measure, unless a test says otherwise: most hold whatever is chosen. All samples are used,
    however slow the machine is."""
    monkeypatch.setattr(tuning_module, "MAX_TUNING_SECONDS", 0.5)
    monkeypatch.setattr(tuning_module, "_MEASUREMENT_SECONDS", 1e9)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Two threads to choose from, whatever the suite gives a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows for SFT and GRPO."""
    folder = tmp_path_factory.mktemp("task")
    arithmetic.make(
        make_stage(folder / "task", "custom", recipe(SFT)), train_rows=64, heldout_rows=16, hidden_size=32, layers=1
    )
    for name, policy in (("sft", SFT), ("rl", GRPO)):
        stage = make_stage(
            folder / f"{name}-data", "prepare", recipe(policy), folder / "task/model", folder / "task/data"
        )
        prepare.run(stage)
    return folder


TRAININGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", SFT, {}),
    "groups": ("rl", {**GRPO, "mu_iterations": 2}, {"optm_lr": 3e-3}),
    "an average": ("sft", SFT, {"ema_enable": True, "sequence_packing": True}),
}


def stage_of(task: Path, path: Path, name: str, size: int | str, threads: str | None = None) -> Stage:
    kind, policy, settings = TRAININGS[name]
    config = recipe(
        {**policy, "mini_batch": size}, train_batch_per_replica=8, max_num_steps=2, epoch=3, num_threads=threads,
        ckpt={"enable_checkpoint": True, "save_freq": 1, "save_mode": "sync"}, **settings,
    )  # fmt: skip
    return make_stage(path, kind, config, task / "task/model", task / f"{kind}-data" / "data")


@pytest.mark.parametrize("name", [pytest.param("sft", marks=pytest.mark.full), "groups", "an average"])
def test_a_training_with_auto_has_the_bits_of_one_with_the_values_that_were_chosen_also_after_a_stop(
    task: Path, tmp_path: Path, name: str
) -> None:
    measured = stage_of(task, tmp_path / "auto", name, "auto")
    train_until(measured, 1)
    (first,) = read_metrics(measured.path / "metrics.jsonl")
    resumed = stage_of(task, tmp_path / "auto", name, "auto")
    found = train(resumed)
    assert [line.keys() >= AUTO_KEYS for line in read_metrics(resumed.path / "metrics.jsonl")] == [True, False]

    size = int(first["tuning/rows_per_pass"])
    assert size in {1, 2, 4, 8}
    named = stage_of(task, tmp_path / "named", name, size)
    expected = train(named)
    assert_same_weights(found.adapter.model, expected.adapter.model)
    assert [{k: v for k, v in line.items() if k not in AUTO_KEYS} for line in curve(resumed)] == curve(named)


def tuning_of(stage: Stage) -> tuple[SpeedTuning, RowFeed]:
    trainer = open_trainer(stage)
    feed = row_feed(open_sequences(stage.data or Path(), "train"), stage.recipe)
    return SpeedTuning(trainer, feed, make_algorithm(stage.recipe), stage.recipe.train, stage), feed


def test_a_size_that_might_not_fit_into_memory_is_not_tried(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "full", "sft", "auto"))
    tuning.max_memory_fraction, tuning.max_tuning_seconds = 0.0, 1e9
    samples, _ = feed.samples(0)
    feed.step = 1
    _, metrics = tuning.choose(samples)
    assert metrics["tuning/rows_per_pass"] == 1


def test_a_measurement_leaves_weights_gradients_and_random_numbers_as_they_were(
    task: Path, tmp_path: Path, two_threads: None
) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "trace", "sft", "auto", "auto"))
    trainer = tuning._trainer
    weights = {name: p.detach().clone() for name, p in trainer.adapter.model.named_parameters()}
    state, (samples, _) = torch.get_rng_state(), feed.samples(0)
    feed.step = 1
    divided, _ = tuning.choose(samples)
    assert torch.equal(state, torch.get_rng_state()) and not trainer.optimizer.state
    assert all(torch.equal(weights[n], p) and p.grad is None for n, p in trainer.adapter.model.named_parameters())
    assert sorted(map(repr, divided)) == sorted(map(repr, samples)) and tuning.chosen is not None
    assert trainer.speed_settings == tuning.chosen and tuning.chosen.num_threads in {1, 2}
    assert torch.get_num_threads() == 2


def test_a_step_of_which_most_samples_are_left_out_is_not_measured(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "idle", "sft", "auto"))
    samples, _ = feed.samples(0)
    feed.step = 1
    updates = tuning._algorithm.updates
    with monkeypatch.context() as patch:
        patch.setattr(tuning._algorithm, "updates", lambda each, view: updates(each[:3], view))
        again, metrics = tuning.choose(samples)
        assert list(map(repr, again)) == list(map(repr, samples)) and metrics.keys() == {"time/tuning"}
        assert tuning.chosen is None
        assert tuning._trainer.speed_settings.rows_per_pass == feed.rows_per_pass == 2
    assert tuning.choose(samples)[1].keys() == AUTO_KEYS


def test_a_stop_ends_the_measurement_without_a_choice(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "stopped", "sft", "auto"))
    samples, _ = feed.samples(0)
    feed.step = 1
    measured: list[bool] = []

    class Stopping:
        progress = tuning._workspace.progress

        @property
        def stop_requested(self) -> bool:
            measured.append(True)
            # Three gradients choose the samples, and the fourth one is the first to be compared.
            return len(measured) >= 4

    workspace, tuning._workspace = tuning._workspace, Stopping()  # type: ignore[assignment]
    tuning.max_tuning_seconds = 1e9
    assert tuning.choose(samples)[1].keys() == {"time/tuning"} and len(measured) == 4
    assert tuning.chosen is None and tuning._trainer.speed_settings.rows_per_pass == feed.rows_per_pass == 2
    tuning._workspace, tuning.max_tuning_seconds = workspace, 0.5
    assert tuning.choose(samples)[1].keys() == AUTO_KEYS and tuning.chosen is not None


@pytest.fixture(scope="module")
def pairs(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared pairs for DPO, of one or two digits."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [{"prompt": f"{i}+{i % 7}=", "chosen": str(i + i % 7), "rejected": str(i)} for i in range(1, 33)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = {**DPO, "dataset": {"name": str(folder / "rows.jsonl")}}
    prepare.run(make_stage(folder / "data", "prepare", recipe(policy), task / "task/model"))
    return folder / "data/data"


def test_pairs_are_divided_by_the_chosen_size_while_it_is_measured_afterwards_and_when_resumed(
    task: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(name: str, size: int | str) -> Stage:
        config = recipe(
            {**DPO, "mini_batch": size}, train_batch_per_replica=4, max_num_steps=2,
            ckpt={"enable_checkpoint": True, "save_freq": 1, "save_mode": "sync"},
        )  # fmt: skip
        return make_stage(tmp_path / name, "sft", config, task / "task/model", pairs)

    monkeypatch.setattr(tuning_module, "MAX_TUNING_SECONDS", 1e9)
    passes: list[tuple[int, int]] = []
    compute = Trainer._run_micro_batches

    def noted(
        trainer: Trainer, adapter: Any, samples: Any, *rest: Any, num_rows_per_pass: Any = None, **keys: Any
    ) -> None:
        batches = Counter(sample.micro_batch for sample in samples)
        if num_rows_per_pass is None and len(samples) == 8:
            passes.append((trainer.speed_settings.rows_per_pass, max(batches.values()) // 2))
        compute(trainer, adapter, samples, *rest, num_rows_per_pass=num_rows_per_pass, **keys)

    monkeypatch.setattr(Trainer, "_run_micro_batches", noted)
    train_until(stage("auto", "auto"), 1)
    assert {divided for divided, _ in passes} >= {1, 2} and all(wanted == done for wanted, done in passes)
    chosen, passes[:] = passes[-1][0], []
    found = train(stage("auto", "auto"))
    assert passes == [(chosen, chosen)]
    expected = train(stage("named", chosen))
    for one, other in zip(found.adapter.model.parameters(), expected.adapter.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)  # the reference was scored two pairs at a time


def test_a_choice_that_the_recipe_does_not_leave_open_is_not_restored(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "restored", "sft", "auto"))
    tuning.restore([3, 1])
    tuning.restore(None)
    assert tuning.chosen is None
    tuning.restore([4, 77])  # another machine had more threads
    assert tuning._trainer.speed_settings == (4, torch.get_num_threads()) and feed.rows_per_pass == 4
    named, _ = tuning_of(stage_of(task, tmp_path / "named", "sft", 2))
    named.restore([8, 77])
    assert named._trainer.speed_settings == (2, torch.get_num_threads())


def test_the_state_of_an_algorithm_is_restored_though_it_hands_out_its_own(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "stateful", "sft", "auto"))
    algorithm = tuning._algorithm = Counting(tuning._algorithm.config)
    samples, _ = feed.samples(0)
    feed.step = 1
    tuning.choose(samples)
    assert algorithm.calls == {"updates": 0}


class Counting(Sft):
    """An algorithm that counts, in a dictionary that is its state."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls = {"updates": 0}

    def updates(self, samples: Any, view: Any) -> Iterator[Any]:
        self.calls["updates"] += 1
        yield from super().updates(samples, view)

    def state_dict(self) -> dict[str, Any]:
        return self.calls

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state


def test_rows_of_the_greatest_length_have_to_fit_whatever_the_first_step_has(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "long", "sft", "auto"))
    samples, _ = feed.samples(0)
    measurement = _Measurement(tuning, samples)
    measurement._max_row_tokens, measurement._bytes_per_token, measurement._max_activation_bytes = 100, 10.0, 4000.0
    sizes = [size for size in (1, 2, 4, 8) if measurement.is_affordable(SpeedSettings(size, 1), 0.0)]
    assert sizes == [1, 2, 4] and not measurement.is_affordable(SpeedSettings(1, 1), 46.0)
    measurement._max_measured_rows, measurement._max_measured_bytes = 1, 1500.0  # more than its tokens say
    assert [size for size in (1, 2, 4, 8) if measurement.is_affordable(SpeedSettings(size, 1), 0.0)] == [1, 2]


def test_threads_are_chosen_for_a_named_size_that_the_measured_samples_do_not_fill(
    task: Path, tmp_path: Path, two_threads: None
) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "threads", "sft", 8, "auto"))
    samples, _ = feed.samples(0)
    feed.step = 1
    _, metrics = tuning.choose(samples[:7])
    assert metrics["tuning/rows_per_pass"] == 8 and metrics["tuning/num_threads"] in {1, 2}


def test_the_default_is_kept_where_no_step_has_enough_samples_or_no_time_is_left(task: Path, tmp_path: Path) -> None:
    tuning, feed = tuning_of(stage_of(task, tmp_path / "waiting", "sft", "auto"))
    samples, _ = feed.samples(0)
    feed.step = 1
    updates = tuning._algorithm.updates
    idle = tuning._algorithm = copy.copy(tuning._algorithm)
    idle.updates = lambda each, view: updates(each[:1], view)  # type: ignore[method-assign]
    for _ in range(3):
        assert tuning.chosen is None and tuning.choose(samples)[1].keys() == {"time/tuning"}
    assert tuning.chosen is not None and tuning.chosen.rows_per_pass == 2 and tuning.choose(samples)[1] == {}

    late, feed = tuning_of(stage_of(task, tmp_path / "late", "sft", "auto"))
    late.max_tuning_seconds, feed.step = 0.0, 1
    assert late.choose(feed.samples(0)[0])[1]["tuning/rows_per_pass"] == 2


def grid(seconds: Callable[[int, int], float], sizes: list[int], threads: list[int]) -> dict[SpeedSettings, float]:
    return {SpeedSettings(s, t): seconds(s, t) for s, t in itertools.product(sizes, threads)}


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(lambda size, threads: 1 / size + 0.01 * size + 1 / threads, id="a middle"),
        pytest.param(lambda size, threads: 10 - size / 20, id="the more the better"),
        pytest.param(lambda size, threads: 1 + size / 20, id="the fewer the better"),
        pytest.param(lambda size, threads: 1.0, id="all alike"),
        pytest.param(lambda size, threads: 1 + 0.2 * threads + abs(size - 12) / 12, id="one thread"),
        pytest.param(lambda size, threads: 8 / min(size, 8) / threads + 0.1 * threads, id="as many threads as rows"),
        pytest.param(lambda size, threads: 4 / size + (size * threads > 64) * 9, id="full caches"),
        pytest.param(lambda size, threads: 2.0 if size < 48 else 0.9, id="fast at the end"),
    ],
)
def test_the_search_ends_within_five_per_cent_of_the_fastest_of_the_grid(seconds: Callable[[int, int], float]) -> None:
    sizes, threads = [size for size in range(1, 97) if 96 % size == 0], [1, 2, 4, 8]
    times = grid(seconds, sizes, threads)
    search = SettingsSearch(sizes, threads, times.__getitem__)
    assert times[search.run()] <= 1.05 * min(times.values())
    assert len(search.seconds) <= len(times)


def test_settings_that_cost_too_much_are_not_measured_and_the_smaller_of_two_alike_is_taken() -> None:
    measured: list[SpeedSettings] = []

    def measure(settings: SpeedSettings) -> float:
        measured.append(settings)
        return 1.0 if settings.rows_per_pass > 2 else 2.0

    search = SettingsSearch([1, 2, 4, 8, 16], [1], measure, lambda each, seconds: each[0] <= 8)
    assert search.run() == (4, 1) and max(measured) == (8, 1)
    nothing = SettingsSearch([1, 2], [1], measure, lambda each, seconds: False)
    assert nothing.run() == (1, 1)


def test_a_size_for_which_memory_does_not_suffice_ends_its_direction_and_is_never_taken() -> None:
    times = {1: 3.0, 2: 2.0, 4: math.inf, 8: 1.0}
    search = SettingsSearch([1, 2, 4, 8], [1, 2], lambda each: times[each[0]] * each[1])
    assert search.run() == (2, 1) and not {each for each in search.seconds if each[0] == 8}
    assert SettingsSearch([1, 2], [1], lambda each: math.inf if each[0] > 1 else 1.0).run() == (1, 1)


def sizes_of(ranks: int, batch: int, **policy: Any) -> list[int]:
    return micro_batch_sizes(recipe({**policy, "mini_batch": "auto"}, train_batch_per_replica=batch).train, ranks)


def test_sizes_are_those_that_a_recipe_may_name() -> None:
    assert sizes_of(1, 12, **SFT) == [1, 2, 3, 4, 6, 12] and sizes_of(2, 12, **SFT) == [1, 2, 3, 4, 6]
    assert sizes_of(1, 16, **GRPO) == [1, 2, 4, 8, 16] and sizes_of(4, 16, **GRPO) == [1, 2, 4]
    assert sizes_of(1, 16, **GRPO, batch_size_per_optimize=4) == [1, 2, 4]
    assert sizes_of(1, 7, **SFT) == [1, 7]
    assert [thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_auto_needs_no_divisor_and_other_words_are_refused() -> None:
    odd = recipe({**SFT, "mini_batch": "auto"}, train_batch_per_replica=7)
    assert odd.train.rows_per_pass == 1 and odd.train.train_policy.mini_batch == "auto"
    assert Recipe.model_validate(odd.model_dump()) == odd
    with pytest.raises(ValidationError, match="mini_batch"):
        recipe({**SFT, "mini_batch": "fast"})
    with pytest.raises(ValidationError, match="num_threads"):
        recipe(SFT, num_threads=0)


def test_tokens_per_micro_batch_leave_nothing_to_choose(task: Path, tmp_path: Path) -> None:
    policy = {**SFT, "mini_batch": "auto", "enable_dp_load_balancing": True, "load_balanced_max_tokens_for_batch": 96}
    stage = make_stage(
        tmp_path / "tokens", "sft", recipe(policy, max_num_steps=2), task / "task/model", task / "sft-data/data"
    )
    train(stage)
    assert not AUTO_KEYS & {key for line in read_metrics(stage.path / "metrics.jsonl") for key in line}
