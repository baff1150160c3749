"""Engines apart from the trainer: what is lost when they die or hang, and when weights reach them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cosmos_core.errors import ConfigError, DataError, StageFailed
from cosmos_core.rollout import engine_pool, replica
from cosmos_core.rollout import fleet as fleet_module
from cosmos_core.rollout.base import Bucket, LoadReceipt, generate
from cosmos_core.rollout.engine_pool import WeightsUnavailable
from cosmos_core.rollout.fleet import EngineFleet
from cosmos_core.rollout.publish import WeightPublisher
from cosmos_core.rollout.replica import EngineReplica, pack_bucket, unpack_bucket
from cosmos_core.types import Completion, Group, Prompt, Segment
from tests.conftest import wait_until
from tests.unit.replicas import (
    PROMPTS,
    SAMPLING,
    Drawing,
    Stuck,
    Threaded,
    all_open,
    fleet_of,
    is_back,
    load_new,
    weights,
)


def kill_four_times(fleet: EngineFleet, handle: Threaded) -> None:
    """Each time it is found dead; a kill that meets nobody at work is seen by nobody, and is made again."""
    while (deaths := fleet.num_restarts) < 4:
        handle.kill()
        again = time.monotonic() + 1
        while fleet.num_restarts == deaths and time.monotonic() < again:
            time.sleep(0.01)


def test_a_bucket_travels_as_one_array_with_every_dtype_and_shape() -> None:
    tensors = {
        "a": torch.randn(3, 5, dtype=torch.bfloat16), "b": torch.arange(7, dtype=torch.int8), "c": torch.tensor(1.5),
        "d": torch.randn(2, 2, dtype=torch.float64).T, "e": torch.empty(0, 4),
    }  # fmt: skip
    found = dict(unpack_bucket(pack_bucket(list(tensors.items()))))
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_several_engines_are_one_and_each_gets_the_weights() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles) as fleet:
        all_open(fleet, 2)
        assert fleet.load_weights(4, weights(4)) == LoadReceipt(4, 2) and fleet.has_new_engine
        groups = generate(fleet, PROMPTS[:9], SAMPLING, 5)
        assert [(group.prompt.id, group.step, group.version) for group in groups] == [(i, 5, 4) for i in range(9)]
        assert all(handle.engine.seen for handle in handles), "one engine has done it all"
        assert fleet.logprobs_per_engine([1, 2, 3]) == [[4.0, 4.0], [4.0, 4.0]]
        assert fleet.load_weights(5, weights(5)) == LoadReceipt(5, 2)
        assert not fleet.has_new_engine and not fleet.needs_weights


def test_an_engine_that_dies_is_replaced_and_its_prompts_go_to_others() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles, most_groups=20, version=1) as fleet:
        handles[0].engine.hangs.set()
        fleet.submit(PROMPTS[:12], SAMPLING, 1)
        wait_until(lambda: fleet._pool.engines[handles[0]].requests, 5, "it has prompts")
        handles[0].kill()
        assert sorted(group.prompt.id for group in fleet.completed()) == list(range(12))
        assert fleet.num_restarts == 1
        load_new(fleet, 1)
        assert fleet.has_new_engine and not fleet.needs_weights and handles[0].engine.version == 1


@pytest.mark.parametrize("swap", ["disabled", "inference"])
def test_an_engine_that_dies_while_it_gets_weights_is_left_out_and_gets_them_when_it_is_back(swap: Any) -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles, weight_sync_mode=swap) as fleet:
        all_open(fleet, 2)

        def dying() -> Iterator[Bucket]:
            yield weights(3)[0]
            handles[1].kill()
            wait_until(lambda: fleet.num_restarts, 5, "it is found dead")
            yield weights(3)[1]

        assert fleet.load_weights(3, dying()) == LoadReceipt(3, 2)
        assert fleet.logprobs_per_engine([1, 2]) == [[3.0]]
        load_new(fleet, 3)
        assert fleet.logprobs_per_engine([1, 2]) == [[3.0], [3.0]]


def test_an_engine_that_hangs_while_it_gets_weights_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "_MIN_BUCKET_TIMEOUT_SECONDS", 0.5)  # neither it nor what waits for it gives up before
    handle, other = Threaded(Stuck), Threaded()
    with fleet_of(handle, other, patience=3.0) as fleet:
        all_open(fleet, 2)
        handle.engine.hangs.set()
        many = [[(f"{i}", torch.zeros(2))] for i in range(4)]
        assert fleet.load_weights(1, weights(1) + many) == LoadReceipt(1, 6)
        assert (handle.deaths, other.deaths) == (1, 0)
        is_back(fleet)
        fleet.load_weights(1, weights(1))
        assert fleet.logprobs_per_engine([1, 2]) == [[1.0], [1.0]]


def test_an_engine_that_refuses_the_first_of_many_buckets_says_why() -> None:
    class Refusing(Drawing):
        def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
            raise StageFailed(f"it has no {next(iter(buckets))[0][0]}")

    handle = Threaded(Refusing)
    with fleet_of(handle) as fleet:
        all_open(fleet, 1)
        with pytest.raises(StageFailed, match="it has no 0"):
            fleet.load_weights(1, [[(f"{i}", torch.zeros(2))] for i in range(5)])
    assert handle.deaths == 0


@pytest.mark.parametrize("swap", ["disabled", "generation"])
def test_an_engine_that_works_for_longer_than_the_patience_is_left_alone(
    swap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes bucket after bucket, or ends what it has in flight before that; the clock goes on as it does."""
    passed: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(passed), sleep=time.sleep)
    for module in (engine_pool, fleet_module):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(engine_pool, "POLL_SECONDS", 0.02)

    class Slow(Drawing):
        def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
            def slowly() -> Iterator[Bucket]:
                for bucket in buckets:
                    passed.append(80.0 if version == 2 and swap == "disabled" else 0.0)
                    yield bucket

            return super().load_weights(version, slowly())

        def step(self) -> list[Group]:
            engine = fleet._pool.engines[handle]
            wait_until(lambda: engine.num_forward_passes >= handle._replica._num_forward_passes, 5, "they are seen")
            passed.append(80.0)
            return self.completed() if len(self.seen) or self.passed() else []

        def passed(self) -> bool:
            self.passes = getattr(self, "passes", 0) + 1
            return self.passes > 9

    handle = Threaded(Slow)
    with fleet_of(handle, patience=600.0, weight_sync_mode=swap, version=1) as fleet:
        fleet.submit(PROMPTS[:2], SAMPLING, 1)
        wait_until(lambda: handle._replica._num_groups_in_flight, 5, "it has prompts")
        fleet.load_weights(2, weights(2) + [[(f"{i}", torch.zeros(2))] for i in range(8)])
        assert [group.prompt.id for group in fleet.completed()] == [0, 1]
        assert handle.deaths == 0 and sum(passed) > 600.0


def test_an_engine_that_waits_for_its_tools_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "POLL_SECONDS", 0.05)

    class Waiting(Drawing):
        def completed(self) -> list[Group]:
            for _ in range(20):
                time.sleep(0.05)
                self.beat()  # type: ignore[attr-defined]
            return super().completed()

    handle = Threaded(Waiting)
    with fleet_of(handle, patience=0.5, version=1) as fleet:
        fleet.submit(PROMPTS[:1], SAMPLING, 1)
        assert [group.prompt.id for group in fleet.completed()] == [0] and handle.deaths == 0


def test_an_engine_that_is_not_back_is_waited_for_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pool, "_RETRY_INTERVAL_SECONDS", 0.02)
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles, version=1) as fleet:
        monkeypatch.setattr(engine_pool, "_ENGINE_OPEN_TIMEOUT_SECONDS", 0.0)
        handles[0].refusals = 10**6
        handles[0].kill()
        wait_until(lambda: handles[0].refusals < 10**6 - 5, 5, "it is asked again and again")
        fleet.submit(PROMPTS[:3], SAMPLING, 1)
        assert len(fleet.completed()) == 3
        assert fleet.num_restarts == 1
        handles[1].refusals = 10**6
        handles[1].kill()
        with pytest.raises(StageFailed, match="died 4 times"):
            fleet.submit(PROMPTS[:1], SAMPLING, 1)
            fleet.completed()


def test_ranks_meet_again_and_again_while_completions_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that all others wait in for an hour would end them."""
    looks: list[Any] = []

    def broadcast(value: Any) -> Any:
        looks.append(value)
        if len(looks) > 4:
            handle.engine.hangs.clear()
        return value

    monkeypatch.setattr(fleet_module, "POLL_SECONDS", 0.05)
    handle = Threaded()
    with fleet_of(handle, version=1) as fleet:
        monkeypatch.setattr(fleet_module, "broadcast_object", broadcast)
        handle.engine.hangs.set()
        fleet.submit(PROMPTS[:2], SAMPLING, 1)
        assert len(fleet.completed()) == 2


def test_an_engine_that_cannot_be_opened_or_refuses_a_prompt_says_why() -> None:
    def refuse() -> Any:
        raise ConfigError("head_dim = 7")

    with pytest.raises(ConfigError, match="head_dim = 7"):
        EngineFleet(lambda: [Threaded(refuse)], max_groups=1, timeout_seconds=9)
    with fleet_of(Threaded(), version=0) as fleet, pytest.raises(DataError, match="too long"):
        fleet.request(Prompt(1, (1,), "refused", ""), SAMPLING, 0).result()


@pytest.mark.parametrize("has_died", [False, True])
def test_an_error_that_no_other_process_mends_is_told_and_no_engine_is_ended_for_it(has_died: bool) -> None:
    class Overflowing(Drawing):
        def completed(self) -> list[Group]:
            raise ConfigError("its logits are not finite")

    handle = Threaded(Overflowing)
    with fleet_of(handle, version=0) as fleet:
        if has_died:
            handle.kill()
            load_new(fleet, 0)
        with pytest.raises(ConfigError, match=r"^its logits are not finite$"):
            fleet.request(PROMPTS[0], SAMPLING, 0).result()
    assert handle.deaths == has_died


def test_an_engine_that_dies_again_and_again_ends_the_stage() -> None:
    handle = Threaded()
    with fleet_of(handle) as fleet:
        kill_four_times(fleet, handle)
        with pytest.raises(StageFailed, match="died 4 times"):
            fleet.submit(PROMPTS[:1], SAMPLING, 0)
            fleet.completed()


def test_whoever_waits_for_a_group_hears_that_the_engines_are_given_up() -> None:
    """Also who has asked before, and who asks afterwards; a validation looks at nothing but its groups."""
    handle = Threaded()
    with fleet_of(handle, version=1) as fleet:
        handle.engine.hangs.set()
        asked = [fleet.request(prompt, SAMPLING, 0, version=version) for prompt in PROMPTS[:8] for version in (1, None)]
        kill_four_times(fleet, handle)
        for group in asked:
            with pytest.raises(StageFailed, match="died 4 times"):
                group.result()
        with pytest.raises(StageFailed, match="died 4 times"):
            fleet.request(PROMPTS[0], SAMPLING, 0).result()


def test_an_engine_that_is_on_its_way_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses calls while it starts an actor again, which on a busy machine takes longer than a few questions."""
    monkeypatch.setattr(engine_pool, "_RETRY_INTERVAL_SECONDS", 0.02)
    handle = Threaded()
    with fleet_of(handle, version=1) as fleet:
        handle.refusals = 20
        handle.kill()
        load_new(fleet, 1)
        fleet.submit(PROMPTS[:2], SAMPLING, 1)
        assert sorted(group.prompt.id for group in fleet.completed()) == [0, 1]
        assert fleet.num_restarts == 1 and handle.refusals == 0


def test_weights_reach_completions_in_flight_only_as_the_recipe_says() -> None:
    class Slow(Drawing):
        def step(self) -> list[Group]:
            is_over = self.version == 2 or (swap == "generation" and is_loading.is_set())
            return self.completed() if len(self.seen) < 4 or is_over else []

    def loaded() -> Iterator[Bucket]:
        is_loading.set()
        yield from weights(2)

    for swap, versions in (("disabled", {1, 2}), ("inference", {1, 2}), ("generation", {1})):
        handle, is_loading = Threaded(Slow), threading.Event()
        with fleet_of(handle, most_groups=20, weight_sync_mode=swap, version=1) as fleet:
            fleet.submit(PROMPTS[:8], SAMPLING, 1)
            wait_until(lambda: len(handle.engine.seen) == 4, 5, "half of them are there")  # noqa: B023
            fleet.load_weights(2, loaded())
            assert {group.version for group in fleet.completed()} == versions, swap
            assert handle.engine.version == 2


def test_requests_for_one_version_come_behind_all_others_and_are_made_by_engines_that_have_it() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles, most_groups=1, version=3) as fleet:
        handles[1].engine.hangs.set()
        held_out = [fleet.request(prompt, SAMPLING, 0, version=3) for prompt in PROMPTS[:4]]
        others = [fleet.request(prompt, SAMPLING, 5) for prompt in PROMPTS[10:14]]
        handles[1].kill()  # what it had goes to the other, which alone has these weights
        load_new(fleet, 4)
        assert fleet.version == 3, "prompts are given to engines that are old enough for them"
        assert [group.result().version for group in held_out] == [3] * 4
        assert {group.result().version for group in others} <= {3, 4}


def test_a_request_for_weights_that_no_engine_has_any_more_is_told_so() -> None:
    with fleet_of(Threaded(), version=1) as fleet:
        fleet.load_weights(2, weights(2))
        with pytest.raises(WeightsUnavailable, match="the engines with the weights of step 1 have died"):
            fleet.request(PROMPTS[0], SAMPLING, 0, version=1).result()
        assert fleet.request(PROMPTS[0], SAMPLING, 0, version=2).result().version == 2


def test_an_engine_that_dies_while_its_completions_are_awaited_gets_the_weights_again() -> None:
    handle = Threaded()

    def die() -> None:
        if handle.engine is not None and handle.engine.hangs.is_set():
            handle.kill()

    def send_missing_weights() -> None:
        with fleet.loading_new_engines():
            fleet.load_weights(7, weights(7))

    with fleet_of(handle, send_heartbeat=die, version=7) as fleet:
        fleet.send_missing_weights = send_missing_weights
        handle.engine.hangs.set()
        fleet.submit(PROMPTS[:4], SAMPLING, 0)
        assert [(group.prompt.id, group.version) for group in fleet.completed()] == [(i, 7) for i in range(4)]


def test_an_engine_that_comes_back_is_probed_and_not_those_that_wait_for_the_next_weights() -> None:
    handles = [Threaded(), Threaded()]
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50))
    with fleet_of(*handles, version=3) as fleet:
        handles[1].kill()
        is_back(fleet)
        with fleet.loading_new_engines():  # two steps later, none of which sent its weights
            fleet.load_weights(5, weights(5))
        model: Any = SimpleNamespace(config=config)
        sender = WeightPublisher(fleet, model, lambda ids: torch.full((len(ids) - 1,), 5.0), torch.float32)
        assert sorted(fleet.logprobs_per_engine([1, 2])) == [[3.0], [5.0]]
        sender._probe_engines(5)


@pytest.mark.parametrize("background", [False, True])
def test_a_load_that_a_trainer_began_and_did_not_end_is_given_up_for_that_of_the_next(background: bool) -> None:
    replica = EngineReplica(lambda beat: Drawing())
    replica.begin_session("of a trainer that dies")
    replica.begin_weight_load(1, loads_in_background=background, timeout_seconds=9)
    replica.receive_bucket(pack_bucket(weights(1)[0]))
    replica.begin_session("of the next")
    replica.begin_weight_load(2, loads_in_background=background, timeout_seconds=9)
    for bucket in weights(2):
        replica.receive_bucket(pack_bucket(bucket))
    assert replica.end_weight_load(2, loads_in_background=background, drains_requests=False) == LoadReceipt(2, 2)
    assert replica.logprobs(2, [1, 2]) == [2.0]


def test_two_requests_that_differ_in_their_seeds_alone_are_each_given_their_own_group() -> None:
    """As a validation of the training's own rows is, and a prompt that a step draws a second time."""

    class Backwards(Drawing):
        """Ends what was submitted last before what was submitted first, and takes the seed for the token."""

        def step(self) -> list[Group]:
            time.sleep(0.1)  # in which more is submitted
            *self.waiting, (prompt, sampling, step) = self.waiting
            segment = Segment((sampling.seed,), True, (-1.0,), 0)
            return [Group(prompt, (Completion((segment,), "stop", ""),) * sampling.num_completions, step)]

    handle = Threaded(Backwards)
    with fleet_of(handle, most_groups=8, version=1) as fleet:
        samplings = [replace(SAMPLING, seed=seed) for seed in (3, 4, 5)]
        with fleet._pool.lock:  # all of them wait before the first is handed out
            asked = [fleet.request(PROMPTS[i], sampling, 1) for i in (0, 1) for sampling in samplings]
        found = [group.result() for group in asked]
    assert [group.prompt.id for group in found] == [0, 0, 0, 1, 1, 1]
    assert [group.completions[0].segments[0].token_ids for group in found] == [(3,), (4,), (5,)] * 2
