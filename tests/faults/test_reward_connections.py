"""Connections of nobody that is known cost a reward service little, and a refusal reaches whoever sent a large body."""

from __future__ import annotations

import asyncio

import uvicorn

from cosmos_core.rewards.service.connection import ConnectionWithTimeout


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
