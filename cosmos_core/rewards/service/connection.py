"""Limits of a connection before authentication: 16 KiB for the head of a request, and a timeout for receiving it.

uvicorn's other parser (httptools) has no limit for headers, and neither parser has a timeout for the head.
"""

import asyncio
import time
from contextlib import suppress

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_MAX_DISCARD_SECONDS, _MAX_DISCARDED_BYTES, _READ_TIMEOUT_SECONDS = 30.0, 2**30, 2.0


class ConnectionWithTimeout(H11Protocol):
    """HTTP connection that closes if the head of a request does not arrive in time."""

    request_head_timeout_seconds = 10.0
    """Seconds after which a connection without a complete request head is closed."""
    _timeout_handle: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of a new connection; asyncio calls this method."""
        super().connection_made(transport)
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        """Parse received data, and stop the timeout if the head of a request is complete."""
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout of a closed connection."""
        super().connection_lost(exc)
        self._cancel_timeout()

    def _update_timeout(self) -> None:
        """Start the timeout for receiving a request head unless it is running, so that further bytes do not extend it.
        Cancel it while a request is processed."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timeout()
        elif self._timeout_handle is None:
            self._timeout_handle = self.loop.call_later(self.request_head_timeout_seconds, self.transport.close)

    def _cancel_timeout(self) -> None:
        if self._timeout_handle is not None:
            self._timeout_handle.cancel()
            self._timeout_handle = None


class RefusalResponse(Response):
    """Response to a request with an unread body, whose remaining bytes are read and discarded, within limits. A
    connection that is closed with unread bytes is reset, and the client would not receive the response."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.body, response.status_code)
        self.raw_headers = response.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response at once, and end it after the body of the request was read; ASGI prescribes the
        signature."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        deadline, num_bytes_left = time.monotonic() + _MAX_DISCARD_SECONDS, _MAX_DISCARDED_BYTES
        with suppress(TimeoutError):
            while num_bytes_left > 0 and time.monotonic() < deadline:
                async with asyncio.timeout(_READ_TIMEOUT_SECONDS):
                    asgi_message = await receive()
                if not asgi_message.get("more_body"):
                    break
                num_bytes_left -= len(asgi_message["body"])
        await send({"type": "http.response.body", "body": b""})
