"""An S3-compatible store on loopback, and a proxy before it that does to chosen requests what networks and disks do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from moto.server import ThreadedMotoServer

KEY, SECRET = "AKIA-of-the-tests", "a-secret-that-no-file-may-have"


@dataclass
class Request:
    """One request that reached the proxy."""

    method: str
    path: str
    body: bytes
    fault: str = ""

    @property
    def key(self) -> str:
        return urlsplit(self.path).path.partition("/")[2].partition("/")[2]

    @property
    def part(self) -> int:
        """Number of a part that is sent; 0: it is none."""
        return int(parse_qs(urlsplit(self.path).query).get("partNumber", ["0"])[0]) if self.method == "PUT" else 0


Choice = Callable[[Request], str]
"""Of a request to what is done with it: "", "400", "403", "500", "501", "503", "reset", "truncate", "flip", "stall",
"slow", or "lost": it is carried out, and the response is not sent."""


@dataclass
class Proxy:
    """Forwards requests to a server, and chooses what goes wrong."""

    port_behind: int
    stall_seconds: float = 2.0
    choose: Choice = lambda request: ""
    requests: list[Request] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    rewrite_header: Callable[[str, str], tuple[str, str]] = lambda name, value: (name, value)
    """What is done to each header of a response."""
    server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        assert self.server is not None
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def start(self) -> None:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        assert self.server is not None
        self.server.shutdown()
        self.server.server_close()

    def reset(self, choose: Choice = lambda request: "") -> None:
        self.requests.clear()
        self.choose = choose

    def once(self, fault: str, wanted: Callable[[Request], bool], times: int = 1) -> None:
        """Do it to the first so many requests that are wanted."""
        left = [times]
        lock = threading.Lock()

        def choose(request: Request) -> str:
            with lock:
                if left[0] and wanted(request):
                    left[0] -= 1
                    return fault
            return ""

        self.reset(choose)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def setup(self) -> None:
        super().setup()
        self.owner.connections.add(self)

    def finish(self) -> None:
        super().finish()
        self.owner.connections.discard(self)

    def log_message(self, *arguments: object) -> None:
        pass

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = Request(self.command, self.path, b"")
        request.fault = self.owner.choose(request)
        if request.fault == "reset":
            self.rfile.read(length // 2)
            self._reset()
            return
        request.body = self.rfile.read(length)
        if len(request.body) < length:  # whoever sent it is gone: a store takes no part of a request
            self.close_connection = True
            return
        self.owner.requests.append(request)
        if request.fault == "stall":
            time.sleep(self.owner.stall_seconds)
            self._reset()
            return
        if request.fault == "slow":
            time.sleep(0.2)
        if request.fault.isdigit():
            self._refuse(int(request.fault))
            return
        self._forward(request, _flipped(request.body) if request.fault == "flip" else request.body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _any

    def _forward(self, request: Request, body: bytes) -> None:
        behind = http.client.HTTPConnection("127.0.0.1", self.owner.port_behind, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        behind.request(self.command, self.path, body=body, headers=headers)
        response = behind.getresponse()
        content = response.read()
        if request.fault == "flip" and self.command == "GET":
            content = _flipped(content)
        if request.fault == "lost":
            self._reset()
            return
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in {"connection", "transfer-encoding", "content-length"}:
                self.send_header(*self.owner.rewrite_header(name, value))
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if request.fault == "truncate" and content:
            self.wfile.write(content[: len(content) // 2])
            self._reset()
            return
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int) -> None:
        codes = {400: "ExpiredToken", 403: "InvalidAccessKeyId", 501: "NotImplemented", 503: "SlowDown"}
        code = codes.get(status, "InternalError")
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        if status == 501 and self.command == "GET":
            content = b""  # as a gateway that lists no parts may respond
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wfile.flush()
        self.connection.close()


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :] if content else content


def use(proxy_url: str, patch: pytest.MonkeyPatch) -> None:
    """Let this process and those that it starts talk to the store; this one tries again at once."""
    patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "PROD_S3_CHECKPOINT_ACCESS_KEY_ID"):
        patch.delenv(name, raising=False)
    values = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_ENDPOINT_URL_S3": proxy_url}
    for name, value in (values | {"AWS_REGION": "us-east-1", "NO_PROXY": "127.0.0.1"}).items():
        patch.setenv(name, value)


@contextmanager
def store() -> Iterator[Proxy]:
    """A store with the bucket `models`, behind a proxy."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    _, port = moto.get_host_and_port()
    proxy = Proxy(port)
    proxy.start()
    session = boto3.session.Session(aws_access_key_id=KEY, aws_secret_access_key=SECRET, region_name="us-east-1")
    session.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="models")
    try:
        yield proxy
    finally:
        proxy.stop()
        moto.stop()
