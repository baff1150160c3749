"""Connections of nobody that is known cost a reward service little, and a refusal reaches whoever sent a large body."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import uvicorn

from cosmos_core.rewards.protocol import encode_request
from cosmos_core.rewards.service.connection import ConnectionWithTimeout
from tests.faults.reward_service import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = {"reward_args": [{"reward_type": "exact_match"}], "max_body_bytes": 2**20}
    with running(tmp_path_factory.mktemp("service"), config) as found:
        yield found


def test_headers_without_end_are_not_kept(server: Running) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    with server.connect() as client, pytest.raises(OSError):
        client.sendall(b"POST /api/reward/enqueue HTTP/1.1\r\nHost: x\r\n")
        for i in range(48):
            client.sendall(b"X-%d: " % i + b"a" * 2**20 + b"\r\n")
    assert process.memory_info().rss - before < 16 * 2**20
    assert server.is_alive()


@pytest.mark.parametrize("status", [401, 413])
def test_a_refusal_is_read_by_whoever_sent_a_large_body(server: Running, status: int) -> None:
    token = {401: "wrong", 413: server.token}[status]
    fields = {"prompts": ["p"], "reward_fn": {"exact_match": 1.0}, "media_type": "image"}
    content = encode_request(fields, np.zeros((1, 2304, 2304, 3), np.uint8))
    for _ in range(2):
        response = server.post("enqueue", content=content, headers={"Authorization": f"Bearer {token}"})
        reason = {401: "a bearer token is needed", 413: r"the body has \d+ bytes; at most 1048576 are read"}[status]
        assert response.status_code == status and re.search(reason, response.json()["message"])


class Impatient(ConnectionWithTimeout):
    """Waits for a head less long."""

    request_head_timeout_seconds = 0.3


def test_a_connection_without_a_whole_head_of_a_request_is_closed() -> None:
    """Silent from the start, with a head that drips, and with one that drips behind a first request."""
    head = b"GET / HTTP/1.1\r\nHost: x\r\n"

    async def application(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})  # type: ignore
        await send({"type": "http.response.body", "body": b""})  # type: ignore[operator]

    async def until_closed(first: bytes, rest: bytes, address: tuple[str, int]) -> bool:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(first)
        closed = asyncio.create_task(reader.read())
        while not closed.done():
            writer.write(rest)
            await asyncio.wait({closed}, timeout=0.1)
        writer.close()
        return closed.exception() is None

    async def all_closed() -> list[bool]:
        config = uvicorn.Config(application, port=0, http=Impatient, lifespan="off", log_config=None, ws="none")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        address = server.servers[0].sockets[0].getsockname()[:2]
        sent = [(b"", b""), (head, b"X: y\r\n"), (head + b"\r\n" + head, b"X: y\r\n")]
        found = await asyncio.gather(*(until_closed(*each, address) for each in sent))
        server.should_exit = True
        await serving
        return found

    assert len(asyncio.run(all_closed())) == 3


def test_scores_under_no_uuid_are_not_there(server: Running) -> None:
    response = server.post("pull", data={"uuid": "no uuid", "type": "exact_match"})
    assert (response.status_code, response.headers["X-Reward-State"]) == (400, "unknown")
    assert response.json() == {"message": "Not found scores for no uuid"}
