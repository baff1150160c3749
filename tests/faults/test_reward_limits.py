"""What a reward service remembers is bounded, one odd request costs no other, and a bad start is one line."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from cosmos_core.rewards.service import pool as pools
from cosmos_core.rewards.service.config import RewardArgs, read_config
from cosmos_core.rewards.service.engine import Engine
from cosmos_core.rewards.service.pool import ProcessError, ProcessSettings, RewardJob, RewardPool, RewardProcess
from cosmos_core.rewards.service.request import parse_request
from cosmos_core.rewards.service.store import MemoryStore
from tests.conftest import wait_until
from tests.faults.reward_service import PROGRAM
from tests.faults.test_reward_service import body


def test_what_it_remembers_is_bounded(tmp_path: Path) -> None:
    async def scored() -> Engine:
        file = tmp_path / "rewards.toml"
        file.write_text('max_results = 3\nresult_seconds = 1e9\n[[reward_args]]\nreward_type = "jpeg_size"\n')
        engine = Engine(read_config(file))
        for i in range(10):
            request = parse_request(str(i), body("p", jpeg_size=1.0), {"jpeg_size"})
            engine.pending_requests[request.uuid] = request
            await engine._store_result(RewardJob(request, "jpeg_size"), {"scores": {"jpeg_size": [1.0]}}, 0.0)
            engine._item_counts.appendleft((-math.inf, 1))  # long ago
        return engine

    engine = asyncio.run(scored())
    assert not engine.pending_requests and len(engine._item_counts) <= 11 and engine.items_per_second() <= 10.0
    assert engine.store.has_unfetched_scores()
    assert len(engine.store._unfetched_score_keys) == 3  # type: ignore[attr-defined]
    store = MemoryStore(1e9, 1000, 100)
    for i in range(10):
        asyncio.run(store.put(str(i), "r", "s" * 30))
    assert [asyncio.run(store.has_request(str(i))) for i in range(10)] == [False] * 7 + [True] * 3
    assert [asyncio.run(store.get(str(i), "r")) for i in (6, 7)] == [None, "s" * 30]


@pytest.mark.usefixtures("executed")
def test_a_reply_that_is_too_long_costs_its_request_and_not_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wordy.py").write_text(
        "class Wordy:\n"
        "    def __init__(self, settings): pass\n"
        "    def score(self, items):\n"
        "        return {'wordy': ['x' * 9999 if item.prompt == 'long' else 1.0 for item in items]}\n"
    )
    file = tmp_path / "rewards.toml"
    reward = {"reward_type": "wordy", "entry": f"{tmp_path}/wordy.py:Wordy", "device": "cpu"}
    file.write_text(tomli_w.dumps({"reward_args": [reward], "attempts": 2}))
    monkeypatch.setattr(pools, "_MAX_HEADER_BYTES", 1000)

    async def scored(*prompts: str) -> list[Mapping[str, Any]]:
        results: list[Mapping[str, Any]] = []

        async def deliver(job: RewardJob, result: dict[str, Any], seconds: float) -> None:
            results.append(result)

        config = read_config(file)
        pool = RewardPool(Engine(config).process_settings(config.rewards[0]), deliver)
        for prompt in prompts:
            pool.submit(RewardJob(parse_request(prompt, body(prompt, wordy=1.0), {"wordy"}), "wordy"))
        async with asyncio.timeout(60):
            while len(results) < len(prompts):
                await asyncio.sleep(0.02)
        await pool.close()
        return results

    long, short = asyncio.run(scored("long", "short"))
    assert long["is_lost"] and "its reply is a line of more than 1000 bytes" in long["error"]
    assert short["scores"] == {"wordy": [1.0]}


def test_pauses_between_starts_grow_until_a_process_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[dict[str, bool]] = [{"ready": True}, {}, {}, {"ready": True}]
    pauses: list[float] = []

    async def start(*command: str, **settings: Any) -> None: ...

    async def reply(process: RewardProcess, *message: object) -> tuple[dict[str, bool], list[np.ndarray]]:
        return replies[len(pauses)], []

    async def end(pool: RewardPool, process: RewardProcess) -> None:
        raise ProcessError("it has ended")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == len(replies):
            raise asyncio.CancelledError

    async def run() -> None:
        settings = ProcessSettings(
            {"name": "mean", "settings": {}}, RewardArgs(reward_type="mean"), 0.0, max_attempts=1
        )
        await asyncio.gather(*RewardPool(settings, deliver)._process_tasks, return_exceptions=True)

    async def deliver(job: RewardJob, result: dict[str, Any], seconds: float) -> None: ...

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(RewardProcess, "_send_and_receive", reply)
    monkeypatch.setattr(RewardPool, "_score_batches", end)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(run())
    assert pauses == [0.2, 0.2, 0.4, 0.2]


@pytest.mark.parametrize("queue", [pytest.param("memory", marks=pytest.mark.full), "redis"])
def test_a_stop_while_it_loads_and_a_queue_that_is_not_there_are_no_traceback(tmp_path: Path, queue: str) -> None:
    file = tmp_path / "rewards.toml"
    loads = tmp_path / "loads"
    slow = {"file": str(loads), "load_seconds": 7200} if queue == "memory" else {"file": ""}
    reward = {"reward_type": "counted", "entry": f"{PROGRAM}:Counted", "device": "cpu", "options": slow}
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    table = {"port": 0, "queue": queue, "redis_host": "127.0.0.1", "redis_port": port, "reward_args": [reward]}
    file.write_text(tomli_w.dumps(table))
    command = [sys.executable, "-m", "cosmos_core.rewards.service", "--config", str(file)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    if queue == "memory":
        wait_until(loads.exists, 30, "its process is loading")
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert "Traceback" not in said, said
    if queue == "redis":
        assert process.returncode == 1 and "the queue cannot be reached: ConnectionError" in said.splitlines()[-1]
    else:
        assert process.returncode == 0
