"""Engines that die or hang where it is easily missed: between two replies, in a load, several at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.rollout import fleet as fleet_module
from cosmos_core.rollout.base import Bucket, LoadReceipt
from cosmos_core.rollout.replica import EngineReplica
from tests.conftest import wait_until
from tests.unit.replicas import PROMPTS, SAMPLING, Drawing, Stuck, Threaded, all_open, fleet_of, load_new, weights


def test_an_engine_that_dies_between_two_questions_is_found_dead_by_the_next() -> None:
    """Which reaches the process that has taken its place, and was never told of the session."""

    class Unnoticed(Threaded):
        dies = False

        def call(self, method: str, *arguments: Any, **keywords: Any) -> Future[Any]:
            if method == "completed" and self.dies:
                self.dies = False
                self._start()
            return super().call(method, *arguments, **keywords)

    handle = Unnoticed()
    with fleet_of(handle, version=1) as fleet:
        handle.dies = True
        while handle.dies or fleet.num_restarts == 0 or not fleet.needs_weights:
            time.sleep(0.01)
        fleet.load_weights(2, weights(2))
        assert fleet.request(PROMPTS[0], SAMPLING, 2).result().version == 2
        assert fleet.num_restarts == 1


def test_an_engine_that_only_a_load_finds_dead_is_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    """The reply to the thread that talks to it had left before it died."""
    handle = Threaded()
    with fleet_of(handle, version=1) as fleet:
        (member,) = fleet._pool.open_engines()
        fleet._pool.mark_engine_dead(member, member.description, ConnectionError("the actor died"))
        while member.connection_error or not fleet._pool.open_engines():
            time.sleep(0.01)
        assert fleet.needs_weights and fleet.num_restarts == 1
    assert "an engine died (the actor died)" in caplog.text


def test_a_death_during_a_load_is_one_death_though_another_process_is_there_before_the_next_bucket() -> None:
    handles = [Threaded(), Threaded()]
    with fleet_of(*handles) as fleet:
        all_open(fleet, 2)
        description = fleet._pool.engines[handles[1]].description

        def buckets() -> Iterator[Bucket]:
            yield weights(1)[0]
            handles[1].kill()
            while (now := fleet._pool.engines[handles[1]].description) is None or now is description:
                time.sleep(0.01)
            yield weights(1)[1]

        assert fleet.load_weights(1, buckets()) == LoadReceipt(1, 2)
        with fleet.loading_new_engines():
            assert fleet.load_weights(1, weights(1)) == LoadReceipt(1, 2)
        assert fleet.num_restarts == 1 and not fleet.needs_weights


def test_engines_that_hang_together_in_a_load_are_ended_together() -> None:
    """All ranks wait meanwhile, in a collective that has a deadline of its own."""

    class Together(Threaded):
        def kill(self) -> None:
            """Wait for the others: were they ended one after the other, none ever would be."""
            ended.add(self)
            if len(ended) == 4:
                for handle in ended:
                    Threaded.kill(handle)

    ended: set[Threaded] = set()
    handles = [Together(Stuck) for _ in range(4)]
    with fleet_of(*handles, patience=3.0) as fleet:
        all_open(fleet, 4)
        for handle in handles:
            handle.engine.hangs.set()
        fleet.load_weights(1, weights(1) + [[(str(i), weights(1)[0][0][1])] for i in range(4)])
        assert len(ended) == 4


def test_prompts_whose_submission_an_engine_never_got_are_submitted_again() -> None:
    class Deaf(Threaded):
        is_deaf = False

        def call(self, method: str, *arguments: Any, **keywords: Any) -> Future[Any]:
            if method == "submit" and self.is_deaf:
                self.is_deaf = False
                lost: Future[Any] = Future()
                lost.set_exception(ConnectionRefusedError("the connection was lost"))
                return lost
            return super().call(method, *arguments, **keywords)

    handle = Deaf()
    with fleet_of(handle, patience=600.0, version=1) as fleet:
        handle.is_deaf = True
        asked = fleet.request(PROMPTS[0], SAMPLING, 1)
        wait_until(lambda: fleet.num_restarts, 5, "it is found dead")
        load_new(fleet, 1)
        assert asked.result().prompt == PROMPTS[0] and handle.deaths == 0


def test_no_engine_has_memory_of_a_gpu_before_or_after_all_ranks_leave_it_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Threaded()
    with fleet_of(handle, sleeps_in_training=True) as fleet:
        calls = handle.engine.calls
        monkeypatch.setattr(fleet_module, "all_reduce_any", lambda flag: calls.append("all ranks"))
        fleet.load_weights(1, weights(1))
        fleet.wake()
        fleet.sleep()
    assert calls == ["all ranks", "all ranks", "wake", "sleep", "all ranks"]


def test_an_engine_on_the_gpu_of_a_rank_is_opened_once_and_after_the_ranks_model() -> None:
    opened: list[Any] = []

    def open_engine(beat: Any) -> Any:
        opened.append(beat)
        return Drawing()

    replica = EngineReplica(open_engine, should_wait_for_trainer=True)
    time.sleep(0.05)
    assert opened == [], "no trainer has asked for it yet"
    assert replica.begin_session("first").name == replica.begin_session("second").name == "drawing" and len(opened) == 1


def test_an_engine_that_cannot_be_opened_again_fails_the_attempt_and_is_no_error_of_the_recipe() -> None:
    made: list[Drawing] = []

    def make() -> Drawing:
        if made:
            raise ConfigError("vLLM refuses 'model': Free memory on device cuda:0 is less than desired")
        made.append(Drawing())
        return made[0]

    handle = Threaded(make)
    with fleet_of(handle, version=1) as fleet:
        handle.kill()
        with pytest.raises(StageFailed, match="an engine that died cannot be opened again: vLLM refuses 'model': Free"):
            fleet.request(PROMPTS[0], SAMPLING, 1).result(60)


@pytest.mark.parametrize("shares", [True, False], ids=["of the trainer", "of their own"])
def test_a_slow_engine_is_waited_for_where_its_gpu_is_needed_for_the_training(shares: bool) -> None:
    """vLLM that opens while its GPU trains finds no memory, and one that nobody puts to sleep leaves none."""

    def open_late() -> Drawing:
        time.sleep(0.5)
        return Drawing()

    with fleet_of(Threaded(), Threaded(open_late), sleeps_in_training=shares) as fleet:
        assert len(fleet._pool.open_engines()) == 1 + shares
