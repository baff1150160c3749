"""What a connection may cost before anybody is known: 16 KiB of a request's head, and seconds until it is there.

uvicorn's other parser (httptools) has no bound for headers, and neither has a timeout for a head that does not come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

_DISCARD_SECONDS, _DISCARD_BYTES, _PAUSE_SECONDS = 30.0, 2**30, 2.0

Message = MutableMapping[str, Any]


class Connection(H11Protocol):
    """A connection that ends where no request comes."""

    head_seconds = 10.0
    """A connection without a whole head of a request for so long is closed."""
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; the name is that of asyncio, as are the next two."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read on, and see whether a request is there."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Count the seconds from the first byte on until a request is there, whatever drips in meanwhile."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class Refused(Response):
    """A response to a request whose body nobody has read: what is left of it is read and discarded, within bounds.

    A connection that is closed with bytes that nobody has read is reset, and the client would never see why.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code)
        self.raw_headers = response.raw_headers

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Send the response at once, and end it when the body is over; the signature is that of ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard(receive)
        await send({"type": "http.response.body", "body": b""})


async def _discard(receive: Callable[[], Awaitable[Message]]) -> None:
    deadline, left = time.monotonic() + _DISCARD_SECONDS, _DISCARD_BYTES
    while left > 0 and time.monotonic() < deadline:
        try:
            async with asyncio.timeout(_PAUSE_SECONDS):
                message = await receive()
        except TimeoutError:
            return
        if not message.get("more_body"):
            return
        left -= len(message["body"])
