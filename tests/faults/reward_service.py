"""A real reward service for tests: a process of its own, with its rewards in theirs."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import tomli_w
from fakeredis import TcpFakeServer

from cosmos_core.rewards.exchange import ServiceEndpoints
from tests.conftest import wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests/programs/served.py")
TRUST = httpx.create_ssl_context()
"""Made once: loading the certificates takes longer than a request."""


@dataclass
class Running:
    """A service that takes requests."""

    process: subprocess.Popen[bytes]
    url: str
    token: str
    log: Path

    @property
    def service(self) -> ServiceEndpoints:
        return ServiceEndpoints(((f"{self.url}/api/reward/enqueue", f"{self.url}/api/reward/pull"),), self.token)

    def post(self, path: str, **content: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}", **content.pop("headers", {})}
        return httpx.post(f"{self.url}/api/reward/{path}", headers=headers, timeout=None, verify=TRUST, **content)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)))

    def head(self, *headers: str) -> bytes:
        """The head of a request that enqueues a body."""
        lines = ("POST /api/reward/enqueue HTTP/1.1", "Host: x", f"Authorization: Bearer {self.token}", *headers)
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()

    def workers(self) -> list[psutil.Process]:
        return [p for p in psutil.Process(self.process.pid).children() if "worker" in " ".join(p.cmdline())]

    def stop(self, sig: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        return self.process.wait()

    def is_alive(self) -> bool:
        return (
            self.process.poll() is None
            and httpx.get(f"{self.url}/health", timeout=None, verify=TRUST).status_code == 200
        )


@contextmanager
def running(
    folder: Path,
    config: Mapping[str, Any],
    token: str = "a secret token",
    while_loading: Callable[[subprocess.Popen[bytes]], None] = lambda process: None,
) -> Iterator[Running]:
    """Start a service and end it, whatever happens."""
    folder.mkdir(parents=True, exist_ok=True)
    file, ready, log = folder / "rewards.toml", folder / "url", folder / "log"
    file.write_text(tomli_w.dumps({"port": 0, **config}))
    ready.unlink(missing_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REMOTE_REWARD_TOKEN": token}
    command = [sys.executable, "-m", "cosmos_core.rewards.service", "--config", str(file), "--ready", str(ready)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=output, stderr=output)
    try:
        while_loading(process)
        wait_until(lambda: ready.exists() or process.poll() is not None, 60, log.read_text, pause=0.02)
        assert process.poll() is None, log.read_text()
        yield Running(process, ready.read_text(), token, log)
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_server() -> Iterator[dict[str, Any]]:
    """Yield the settings of a service with a queue in a fake Redis."""
    redis = TcpFakeServer(("127.0.0.1", 0))
    threading.Thread(target=redis.serve_forever, daemon=True).start()
    try:
        yield {"queue": "redis", "redis_host": "127.0.0.1", "redis_port": redis.server_address[1]}
    finally:
        redis.shutdown()
        redis.server_close()


def counted(folder: Path, name: str = "counted", **settings: Any) -> dict[str, Any]:
    """The reward that counts what it scores."""
    options = {"file": str(folder / "scored"), **settings.pop("options", {})}
    return {"reward_type": name, "entry": f"{PROGRAM}:Counted", "device": "cpu", "options": options, **settings}
