"""The reward service under load, with its reward processes killed and itself restarted: is each image scored once?

    python -m benchmarks.reward_service [--images 2000] [--clients 16] [--size 512] [--kill-seconds 5]

Clients send one image each and wait for its score. All the while every reward process is killed with SIGKILL each few
seconds, and in the middle the service is stopped and started again; requests and scores are in Redis (a small server
in Python, that of fakeredis). An image is known by its prompt and by its pixels: both must come back as one score.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fakeredis import TcpFakeServer
from PIL import Image

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.rewards.remote import RemoteRewards
from tests.faults.reward_service import PROGRAM, Running, counted, running


@dataclass
class Outcome:
    """What became of the images."""

    images: int
    right: int
    wrong: int
    missing: int
    kills: int
    restarts: int
    scored: Counter[str]
    seconds: float
    latencies: list[float]

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.latencies, [50, 99])
        return (
            f"{self.images} images in {self.seconds:.1f} s, {self.images / self.seconds:.1f} images/s; latency p50 "
            f"{p50:.3f} s, p99 {p99:.3f} s; {self.kills} reward processes killed, the service restarted "
            f"{self.restarts} times\nexactly one score: {self.right} of {self.images} (wrong {self.wrong}, missing "
            f"{self.missing}); computed {sum(self.scored.values())} times in all"
        )


def measure(folder: Path, images: int, clients: int, size: int, kill_seconds: float) -> Outcome:
    """Send the images and return what became of them."""
    base = np.random.default_rng(0).integers(0, 200, (size, size, 3), np.uint8)
    config = RemoteRewardConfig.model_validate({
        "reward_fns": [{"name": name, "clip_max": 1e9} for name in ("counted", "mean")],
        "reward_clip_max": 1e9, "timeout_seconds": 600.0, "missing_score": "drop_group",
    })  # fmt: skip
    level = float(base.astype(np.float64).mean())
    with ExitStack() as stack:
        service = _Restarting(folder, stack.enter_context(_redis()))
        stack.callback(service.stop)
        killer = stack.enter_context(_killing(service, kill_seconds))
        done = [0]

        def client(first: int) -> list[tuple[float, float | None, float]]:
            remote, found = RemoteRewards(config, service.running.service), []
            for i in range(first, images, clients):
                item = {"prompt": str(i), "media": Image.fromarray(base + np.uint8(i % 50))}
                began = time.monotonic()
                [score] = remote.score([item])
                expected = i + level + i % 50
                found.append((time.monotonic() - began, score.value, expected))
                done[0] += 1
            return found

        began = time.monotonic()
        with ThreadPoolExecutor(clients) as executor:
            waiting = [executor.submit(client, first) for first in range(clients)]
            while done[0] < images // 2 and not all(each.done() for each in waiting):
                time.sleep(0.05)
            service.restart()
            found = [each for future in waiting for each in future.result()]
        seconds = time.monotonic() - began
    right = sum(value is not None and abs(value - expected) < 1e-6 for _, value, expected in found)
    missing = sum(value is None for _, value, _ in found)
    scored = Counter((folder / "scored").read_text().split())
    return Outcome(
        images,
        right,
        images - right - missing,
        missing,
        killer.kills,
        1,
        scored,
        seconds,
        [each for each, _, _ in found],
    )


class _Restarting:
    """A service that is stopped and started again at the same URL."""

    def __init__(self, folder: Path, redis_port: int) -> None:
        self._folder = folder
        self._config: dict[str, Any] = {
            "port": _free_port(), "queue": "redis", "redis_host": "127.0.0.1", "redis_port": redis_port,
            "replica_id": "benchmark", "drain_seconds": 5.0, "attempts": 50,
            "reward_args": [counted(folder), {"reward_type": "mean", "entry": f"{PROGRAM}:mean"}],
        }  # fmt: skip
        self._stack = ExitStack()
        self.running = self._start()

    def _start(self) -> Running:
        return self._stack.enter_context(running(self._folder, self._config))

    def restart(self) -> None:
        self.running.stop()
        self._stack.close()
        self.running = self._start()

    def stop(self) -> None:
        self.running.stop()
        self._stack.close()


class _Killer:
    kills = 0


@contextmanager
def _killing(service: _Restarting, seconds: float) -> Iterator[_Killer]:
    killer, is_done = _Killer(), threading.Event()

    def kill() -> None:
        while not is_done.wait(seconds):
            try:
                for process in service.running.workers():
                    process.kill()
                    killer.kills += 1
            except psutil.Error:  # it is being restarted
                continue

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killer
    finally:
        is_done.set()
        thread.join()


@contextmanager
def _redis() -> Iterator[int]:
    server = TcpFakeServer(("127.0.0.1", 0))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def main() -> None:
    """Measure, and say what came of it; exit 1 where an image has not exactly one right score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--kill-seconds", type=float, default=5.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        outcome = measure(Path(name), given.images, given.clients, given.size, given.kill_seconds)
    sys.stdout.write(f"{outcome}\non {os.cpu_count()} cores\n")
    sys.exit(outcome.right != outcome.images)


if __name__ == "__main__":
    main()
