"""Groups ahead of the training: none too old, none lost, none trained twice."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.errors import RewardError
from cosmos_core.rollout.groups import GroupFilter, GroupPlan
from cosmos_core.types import Group, Prompt, Score, ScoredGroup
from tests.conftest import wait_until
from tests.unit.replicas import (
    PROMPTS,
    SAMPLING,
    Threaded,
    fleet_of,
    ids,
    score,
    score_slowly,
    source_of,
    weights,
)


def take(start: int, count: int) -> list[Prompt]:
    return PROMPTS[start : start + count]


def wait_for_engines(source: Any) -> None:
    """Wait until the source has looked whether engines may get more, and they have finished all that they got."""
    states, send_prompts = list[bool](), source._send_prompts

    def look() -> None:
        send_prompts()
        states.append(not source._group_futures)

    source._send_prompts = look
    wait_until(lambda: any(states), 5, "the engines have finished all that they may have ahead")
    source._send_prompts = send_prompts


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, patience=0.5, version=0) as fleet:
        source = source_of(fleet, tmp_path, send_missing_weights=lambda step: fleet.load_weights(step, weights(step)))
        assert ids(source.next_groups(0)[0]) == [0, 1, 2, 3]
        fleet.load_weights(1, weights(1))
        handle.engine.hangs.set()
        seen = [ids(source.next_groups(step)[0]) for step in range(1, 4)]
        assert seen == [list(range(4 * step, 4 * step + 4)) for step in range(1, 4)] and handle.deaths == 1
        source.close()


@pytest.mark.parametrize(
    ("allowed", "scores"), [(1, score_slowly), *(pytest.param(each, score, marks=pytest.mark.full) for each in (0, 3))]
)
def test_no_group_is_older_than_allowed_and_every_prompt_is_trained_once(
    allowed: int, scores: Any, tmp_path: Path
) -> None:
    with fleet_of(Threaded(), Threaded(), version=0) as fleet:
        source = source_of(fleet, tmp_path, max_lag=allowed, score=scores)
        lags, trained, outdated = [], [], 0.0
        for step in range(10):
            groups, metrics = source.next_groups(step)
            trained += ids(groups)
            lags.append(metrics["rollout/version_lag"])
            histogram = {k: metrics.get(f"rollout/groups_of_lag_{k}", 0) for k in range(allowed + 1)}
            assert sum(histogram.values()) == len(groups) and histogram[int(lags[-1])] > 0
            assert histogram == {k: sum(step - g.group.version == k for g in groups) for k in range(allowed + 1)}
            outdated += metrics["rollout/outdated"]
            if step % 2:  # a train step, in which engines go on
                wait_for_engines(source)
            fleet.load_weights(step + 1, weights(step + 1))
        assert trained == list(range(40))
        assert max(lags) == allowed and outdated == 0
        source.close()


def test_what_was_fetched_too_far_ahead_is_generated_again(tmp_path: Path) -> None:
    with fleet_of(Threaded(), most_groups=40, version=0) as fleet:
        source = source_of(fleet, tmp_path, max_lag=1, num_extra_prompts=8)
        trained, outdated = [], 0.0
        for step in range(10):
            groups, metrics = source.next_groups(step)
            assert metrics["rollout/version_lag"] <= 1
            trained += ids(groups)
            outdated += metrics["rollout/outdated"]
            wait_for_engines(source)
            fleet.load_weights(step + 1, weights(step + 1))
        assert trained == list(range(40)) and outdated > 0
        source.close()


def test_all_groups_of_a_step_that_are_too_old_are_asked_for_at_once(tmp_path: Path) -> None:
    asked: list[tuple[int, bool]] = []

    def request(prompt: Prompt, sampling: Any, step: int, *, is_urgent: bool = False) -> Future[Group]:
        asked.append((prompt.id, is_urgent))
        return Future()

    fleet: Any = SimpleNamespace(version=3, request=request)
    source = source_of(fleet, tmp_path, max_lag=1)
    with fleet_of(Threaded()) as real:
        real.load_weights(0, weights(0))
        groups = [real.request(prompt, SAMPLING, 5).result() for prompt in PROMPTS[20:24]]
    source._first_unused_position = 20
    source._scored_groups = dict(zip(range(20, 24), score(groups), strict=True))
    assert source._find_step_groups(5) is None and asked == [], "the engines have no weights yet that would do"
    fleet.version = 4
    assert source._find_step_groups(5) is None
    assert asked == [(prompt, True) for prompt in (23, 22, 21, 20)], "each goes before the one asked for last"
    assert source._find_step_groups(5) is None and len(asked) == source._num_outdated_groups == 4


def test_a_ceiling_bounds_what_is_fetched_ahead(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, most_groups=40, version=0) as fleet:
        source = source_of(fleet, tmp_path, max_lag=1, num_extra_prompts=30, max_steps_ahead=3)
        source.next_groups(0)
        wait_for_engines(source)
        assert sorted(handle.engine.seen) == list(range(4 + 12)), "step 0 is trained, and three more are ahead"
        assert not source._group_futures
        source.close()


def test_dropped_groups_are_replaced_by_the_next_prompts_and_a_resumed_source_goes_on(
    tmp_path: Path,
) -> None:
    def run(start: int, state: dict[str, Any] | None, steps: int) -> tuple[list[int], dict[str, Any]]:
        trained: list[int] = []
        with fleet_of(Threaded(), Threaded()) as fleet:
            fleet.load_weights(start, weights(start))
            source = source_of(fleet, tmp_path, take_prompts=take, group_filter=GroupFilter())
            if state:
                source.load_state_dict(state)
            for step in range(start, start + steps):
                groups, metrics = source.next_groups(step)
                trained += ids(groups)
                assert metrics["rollout/sampled_groups"] == 2 * len(groups)
                fleet.load_weights(step + 1, weights(step + 1))
            assert source.is_exhausted == (trained[-1] == 39)
            source.close()
            return trained, source.state_dict()

    whole, end = run(0, None, 5)
    assert whole == list(range(1, 40, 2)) and end == {"drawn": 40}
    first, state = run(0, None, 2)
    assert first + run(2, state, 3)[0] == whole


@pytest.mark.parametrize("sleeps_in_training", [True, False])
def test_engines_on_the_gpus_of_the_trainer_sleep_while_it_trains(sleeps_in_training: bool, tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, sleeps_in_training=sleeps_in_training, version=0) as fleet:
        source = source_of(fleet, tmp_path, max_lag=0)
        for step in range(2):
            source.next_groups(step)
            fleet.load_weights(step + 1, weights(step + 1))
        assert handle.engine.calls == ["wake", "sleep"] * 2 * sleeps_in_training
        source.close()


def test_nothing_is_scored_after_the_end(tmp_path: Path) -> None:
    begun: list[bool] = []
    """Whether the source was closed already, for each call of the reward."""

    def slowly(groups: Sequence[Group]) -> list[ScoredGroup]:
        begun.append(source._is_closed)
        time.sleep(0.05)
        return score(groups)

    with fleet_of(Threaded(), version=0) as fleet:
        source = source_of(fleet, tmp_path, score=slowly, max_lag=8)
        source.next_groups(0)
        source.close()
        assert sum(begun) <= 1, "more than what was about to begin"
        assert source._rollout_thread is not None and not source._rollout_thread.is_alive()


def test_prompts_beyond_the_allowed_steps_are_as_many_as_will_be_dropped(tmp_path: Path) -> None:
    """Groups that engines make beyond that are too old when their step comes, and all are made twice."""

    def take(start: int, count: int) -> list[Prompt]:
        return prompts[start : start + count]

    prompts = [replace(PROMPTS[i % 2], id=i) for i in range(400)]  # every second group is dropped
    handle, outdated = Threaded(), []
    with fleet_of(handle, most_groups=40, version=0) as fleet:
        source = source_of(fleet, tmp_path, take_prompts=take, group_filter=GroupFilter(), num_extra_prompts=128)
        for step in range(20):
            groups, metrics = source.next_groups(step)
            assert len(groups) == 4
            outdated.append(metrics["rollout/outdated"])
            wait_for_engines(source)
            assert len(handle.engine.seen) - sum(outdated) <= source._first_unused_position + 3 * 8
            fleet.load_weights(step + 1, weights(step + 1))
        source.close()
    assert sum(outdated[5:]) <= 4


def test_an_engine_that_dies_while_the_training_computes_is_in_the_metrics_of_the_next_step(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, version=0) as fleet:
        source = source_of(fleet, tmp_path, send_missing_weights=lambda step: fleet.load_weights(step, weights(step)))
        assert source.next_groups(0)[1]["rollout/restarts"] == 0
        handle.kill()
        while fleet.num_restarts == 0 or not fleet.needs_weights:
            time.sleep(0.01)
        fleet.load_weights(1, weights(1))
        assert [source.next_groups(step)[1]["rollout/restarts"] for step in (1, 2)] == [1, 0]
        source.close()


@pytest.mark.parametrize(
    "window",
    [
        {"max_lag": 0},
        {"max_lag": 0, "max_steps_ahead": 1, "sleeps_in_training": True},
        {"max_lag": 1, "max_steps_ahead": 2},
    ],
)
def test_a_step_whose_groups_were_dropped_gets_others_however_few_prompts_engines_may_have(
    window: dict[str, Any], tmp_path: Path
) -> None:
    handle = Threaded()
    with fleet_of(handle, most_groups=40, sleeps_in_training="sleeps_in_training" in window, version=0) as fleet:
        source = source_of(fleet, tmp_path, take_prompts=take, group_filter=GroupFilter(max_retries=2), **window)
        trained = []
        for step in range(5):
            groups, _ = source.next_groups(step)
            trained += ids(groups)
            if "sleeps_in_training" in window:
                assert not handle.engine.waiting and not source._group_futures, "it sleeps with prompts in flight"
                assert handle.engine.seen == list(range(8 * (step + 1)))
            fleet.load_weights(step + 1, weights(step + 1))
        assert trained == list(range(1, 40, 2))
        source.close()


@pytest.mark.parametrize("needed", [(2, 2, 2), (1, 2, 2)])
def test_a_step_gets_the_groups_that_it_needs_after_one_that_kept_fewer(needed: Sequence[int], tmp_path: Path) -> None:
    """Groups of 2 completions for steps of 3, which by their numbers begin 2, 1 and 2 groups."""

    def differ(groups: Sequence[Group]) -> list[ScoredGroup]:
        return [ScoredGroup(group, (Score(1.0), Score(0.0))) for group in groups]

    handle, waits = Threaded(), list[int]()
    with fleet_of(handle, most_groups=40, sleeps_in_training=True, version=0) as fleet:
        source = source_of(
            fleet, tmp_path, take_prompts=take, group_plan=GroupPlan(3, 2),
            group_filter=GroupFilter(), score=differ, max_lag=0, max_steps_ahead=1, sleeps_in_training=True,
            on_wait=lambda: waits.append(0) if len(waits) < 20 else pytest.fail("it waits for prompts"),
        )  # fmt: skip
        for step, count in enumerate(needed):
            groups, _ = source.next_groups(step, count)
            assert len(groups) == count and not source._group_futures, "it sleeps with prompts in flight"
            assert handle.engine.seen == list(range(sum(needed[: step + 1])))
            fleet.load_weights(step + 1, weights(step + 1))
        source.close()


def test_engines_that_take_turns_get_new_weights_as_seldom_as_the_recipe_says(tmp_path: Path) -> None:
    handle = Threaded()
    with fleet_of(handle, most_groups=40, sleeps_in_training=True, version=0) as fleet:
        source = source_of(fleet, tmp_path, max_lag=1, max_steps_ahead=1, sleeps_in_training=True)
        for step in range(4):
            _, metrics = source.next_groups(step)
            wait_for_engines(source)
            assert not source._group_futures, "it got prompts while it sleeps"
            assert handle.engine.seen == list(range(4 * (step + 1)))
            assert metrics["rollout/version_lag"] == step % 2
            if step % 2:
                fleet.load_weights(step + 1, weights(step + 1))
        source.close()


@pytest.mark.parametrize(
    ("filter", "scores", "message"),
    [
        (GroupFilter(("accuracy/near",)), (Score(1.0, {"accuracy": 1.0}), Score(0.0, {"accuracy": 0.0})),
         "filter_reward_metric: no reward reports 'accuracy/near'; take of 'accuracy'"),
        (GroupFilter(), (Score(None, error="KeyError", is_permanent_error=True),) * 2,
         "step 1: all 8 rewards are invalid; the first: KeyError"),
    ],
    ids=["a metric that no reward reports", "no valid reward"],
)  # fmt: skip
def test_rewards_of_no_use_end_the_training_before_all_prompts_are_used_up(
    filter: GroupFilter, scores: tuple[Score, Score], message: str, tmp_path: Path
) -> None:
    with fleet_of(Threaded(), version=0) as fleet:
        rewards = lambda groups: [ScoredGroup(group, scores) for group in groups]  # noqa: E731
        source = source_of(fleet, tmp_path, group_filter=filter, score=rewards)
        with pytest.raises(RewardError, match=message):
            source.next_groups(0)
        source.close()
