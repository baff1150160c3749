"""Limits of a connection before authentication: 16 KiB for the head of a request, and a timeout for receiving it.

uvicorn's other parser (httptools) has no limit for headers, and neither parser has a timeout for the head.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_DISCARD_SECONDS, _MAX_DISCARDED_BYTES, _READ_TIMEOUT_SECONDS = 30.0, 2**30, 2.0

Message = MutableMapping[str, Any]


class Connection(H11Protocol):
    """Connection that closes if no request arrives in time."""

    head_seconds = 10.0
    """Seconds after which a connection without a complete request head is closed."""
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of a new connection; asyncio calls this method."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Parse received data, and stop the timeout if the head of a request is complete."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout of a closed connection."""
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Start the timeout if no request is in progress; bytes of an incomplete request head do not extend it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop()
        elif self._waiting is None:
            self._waiting = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class RefusalResponse(Response):
    """Response to a request with an unread body, whose remaining bytes are read and discarded, within limits.

    A connection that is closed with unread bytes is reset, and the client would not receive the response.
    """

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code)
        self.raw_headers = response.raw_headers

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Send the response at once, and end it after the request body; ASGI prescribes the signature."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        deadline, num_bytes_left = time.monotonic() + _MAX_DISCARD_SECONDS, _MAX_DISCARDED_BYTES
        with suppress(TimeoutError):
            while num_bytes_left > 0 and time.monotonic() < deadline:
                async with asyncio.timeout(_READ_TIMEOUT_SECONDS):
                    message = await receive()
                if not message.get("more_body"):
                    break
                num_bytes_left -= len(message["body"])
        await send({"type": "http.response.body", "body": b""})
