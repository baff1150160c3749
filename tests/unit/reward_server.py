"""A reward service of a few lines for the tests of its client: scripted, in a thread, and it keeps what it was sent."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import numpy as np

from cosmos_core.rewards.exchange import ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE, TOKEN_VARIABLE, ServiceEndpoints
from cosmos_core.rewards.protocol import decode_request

Reply = tuple[int, dict[str, Any], dict[str, str]]
"""Status, JSON and headers."""


def reply(status: int = 200, /, headers: Mapping[str, str] | None = None, **said: Any) -> Reply:
    return status, said, dict(headers or {})


@dataclass
class Sent:
    """A request as it arrived."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def form(self) -> dict[str, str]:
        return {key: value[0] for key, value in parse_qs(self.body.decode()).items()}

    @property
    def decoded(self) -> tuple[dict[str, Any], np.ndarray]:
        return decode_request(self.body)


@dataclass
class RewardServer:
    """What arrives is `sent`; `on_enqueue` and `on_pull` reply, by default at once with the mean of each image."""

    replica: str = ""
    on_enqueue: Callable[[Sent], Reply | None] = lambda sent: None
    on_pull: Callable[[Sent], Reply | None] = lambda sent: None
    score: Callable[[dict[str, Any], np.ndarray, str], dict[str, Any]] = field(
        default=lambda fields, array, name: {name: [float(each.mean()) if each.size else 0.0 for each in array]}
    )
    sent: list[Sent] = field(default_factory=list)
    url: str = ""
    _known: dict[str, bytes] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def enqueued(self) -> list[Sent]:
        return [each for each in self.sent if each.path.endswith("/enqueue")]

    @property
    def pulled(self) -> list[Sent]:
        return [each for each in self.sent if each.path.endswith("/pull")]

    @property
    def service(self) -> ServiceEndpoints:
        return service(self)

    @property
    def environment(self) -> dict[str, str]:
        urls = {ENQUEUE_URL_VARIABLE: f"{self.url}/enqueue", FETCH_URL_VARIABLE: f"{self.url}/pull"}
        return urls | {TOKEN_VARIABLE: "a secret token"}

    def reply_to(self, sent: Sent) -> Reply:
        with self._lock:
            self.sent.append(sent)
            if sent.path.endswith("/enqueue"):
                return self.on_enqueue(sent) or self.accept(sent)
            if sent.path.endswith("/pull"):
                return self.on_pull(sent) or self.scored(sent)
            return reply(message="received")

    def accept(self, sent: Sent) -> Reply:
        key = sent.headers.get("Idempotency-Key", f"{len(self._known)}")
        self._known[key] = sent.body
        return reply(uuid=key, **({"replica_id": self.replica} if self.replica else {}))

    def scored(self, sent: Sent) -> Reply:
        if sent.form["uuid"] not in self._known:
            return reply(400, {"X-Reward-State": "unknown"}, message="Not found")
        fields, array = decode_request(self._known[sent.form["uuid"]])
        return reply(scores=self.score(fields, array, sent.form["type"]), type=sent.form["type"])


def service(*servers: RewardServer) -> ServiceEndpoints:
    return ServiceEndpoints(
        tuple((f"{server.url}/enqueue", f"{server.url}/pull") for server in servers), "a secret token"
    )


@contextmanager
def serving(tls: ssl.SSLContext | None = None, **settings: Any) -> Iterator[RewardServer]:
    state = RewardServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status, said, headers = state.reply_to(Sent(self.path, dict(self.headers), body))
            if status == 0:  # as if the process had died
                self.close_connection = True
                return
            content = json.dumps(said).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    state.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}/api/reward"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
