"""What a reward service accepts it scores, and what waits in it is bounded: uploads at a stop, replies that the store
loses, decoded videos."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cosmos_core.rewards.protocol import encode_request
from cosmos_core.rewards.service.config import RewardArgs, ServiceConfig
from cosmos_core.rewards.service.engine import CapacityExceededError, Engine, ShutdownError
from cosmos_core.rewards.service.pool import RewardJob
from cosmos_core.rewards.service.request import parse_request
from cosmos_core.rewards.service.store import MemoryStore
from tests.faults.test_reward_service import body

KEY = "0123abcd-0000-4000-8000-000000000000"


class Pool:
    """Keeps what is queued; nothing is ever scored."""

    def __init__(self) -> None:
        self.jobs: list[RewardJob] = []

    def submit(self, job: RewardJob) -> None:
        self.jobs.append(job)


class Severed(MemoryStore):
    """Keeps a request, and loses its reply the first time."""

    is_whole = False

    async def accept_request(self, uuid: str, body: bytes) -> None:
        await super().accept_request(uuid, body)
        if not self.is_whole:
            self.is_whole = True
            raise ConnectionError("the reply is lost")


def engine(**settings: Any) -> Engine:
    found = Engine(ServiceConfig(reward_args=(RewardArgs(reward_type="jpeg_size"),), **settings))
    found.pools["jpeg_size"] = Pool()  # type: ignore[assignment]
    return found


def queued(found: Engine) -> list[str]:
    return [job.request.uuid for job in found.pools["jpeg_size"].jobs]  # type: ignore[attr-defined]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


def test_what_comes_after_the_last_was_finished_is_refused_and_not_lost() -> None:
    async def late() -> Engine:
        found = engine(drain_seconds=0.1)
        with found.reserve_capacity(10):
            await found.drain()
            with pytest.raises(ShutdownError):
                await found.accept_request(KEY, body("p", jpeg_size=1.0))
        return found

    found = asyncio.run(late())
    assert not found.pending_requests and not queued(found) and found.pending_bytes == 0


def test_a_request_that_the_store_kept_and_did_not_confirm_is_queued_when_it_comes_again() -> None:
    async def sent_again() -> Engine:
        found = engine()
        found.store = Severed(60.0, 100, 2**20)
        with pytest.raises(ConnectionError):
            await found.accept_request(KEY, body("p", jpeg_size=1.0))
        assert await found.store.has_request(KEY) and not queued(found)
        for _ in range(2):
            await found.accept_request(KEY, body("p", jpeg_size=1.0))
        assert queued(found) == [KEY], "once"
        await found._store_result(
            RewardJob(found.pending_requests[KEY], "jpeg_size"), {"scores": {"jpeg_size": [1.0]}}, 0.0
        )
        await found.accept_request(KEY, body("p", jpeg_size=1.0))
        return found

    found = asyncio.run(sent_again())
    assert queued(found) == [KEY], "what has its scores is not scored again"
    assert not found.pending_requests and found.pending_bytes == 0


def test_uploads_count_as_requests_that_wait() -> None:
    found = engine(max_pending=2)
    with found.reserve_capacity(10), found.reserve_capacity(20):
        assert found.pending_bytes == 30
        with pytest.raises(CapacityExceededError), found.reserve_capacity(10):
            pass
    with found.reserve_capacity(10):
        assert found.pending_bytes == 10


def test_decoded_videos_wait_for_room() -> None:
    async def decoded() -> None:
        found = engine(max_pending_bytes=250)
        requests = [parse_request(str(i), body("p", jpeg_size=1.0), found.pools) for i in range(3)]
        for request in requests:
            found._add_pending_request(request)
        video = {"array": np.zeros(100, np.uint8)}
        tasks = [
            asyncio.create_task(found._handle_decoded_video(RewardJob(request), video, 0.0)) for request in requests
        ]
        await until(lambda: len(queued(found)) == 2)
        await asyncio.sleep(0.1)
        assert (queued(found), found.decoded_bytes) == (["0", "1"], 200)
        await found._store_result(RewardJob(requests[0], "jpeg_size"), {"scores": {"jpeg_size": [1.0]}}, 0.0)
        await until(tasks[2].done)
        assert (queued(found), found.decoded_bytes) == (["0", "1", "2"], 200)

    asyncio.run(decoded())


def test_what_no_reward_is_told_is_not_kept() -> None:
    fields = {"prompts": ["p"], "reward_fn": {"r": 1.0}, "media_type": "image", "x": [{}] * 9, "references": ["y"]}
    request = parse_request(KEY, encode_request(fields, np.zeros((1, 2, 2, 3), np.uint8)), {"r"})
    assert request.fields == {"prompts": ["p"], "references": ["y"]}
    assert (request.fields, request.media_type) == ({"prompts": ["p"], "references": ["y"]}, "image")


def test_services_of_two_machines_have_queues_of_their_own_in_one_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    async def queues() -> set[str]:
        found = set()
        for machine in ("first", "second"):
            monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
            found.add(engine(queue="redis").store._unfinished_set_key)  # type: ignore[attr-defined]
        return found

    monkeypatch.delenv("LEPTON_REPLICA_ID", raising=False)
    assert asyncio.run(queues()) == {f"cosmos:reward:pending:{name}:localhost:8080" for name in ("first", "second")}
