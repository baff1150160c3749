"""The reward service under load, kills, a restart and ten thousand requests that it must refuse.

`python -m tests.acceptance rewards`; the suite has a short form of each.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import psutil

from benchmarks.reward_service import measure
from tests.acceptance.page import Proof, table
from tests.acceptance.reward_fuzz import fuzz
from tests.faults.reward_service import counted, running

IMAGES, CLIENTS, SIZE, KILL_SECONDS = 2000, 16, 512, 5.0
REQUESTS, SEED = 10_000, 1
_MOST_GROWTH = 64


def prove(folder: Path) -> Proof:
    """Return the proof that every request has its score exactly once, and that no attack leaves a trace."""
    began = time.monotonic()
    (folder / "load").mkdir()
    load = measure(folder / "load", IMAGES, CLIENTS, SIZE, KILL_SECONDS)
    p99 = float(np.percentile(load.latencies, 99))
    with running(folder / "fuzz", {"reward_args": [counted(folder / "fuzz")], "max_body_bytes": 2**20}) as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        statuses = fuzz(server.url, server.token, REQUESTS, random.Random(SEED))
        grown = (process.memory_info().rss - before) / 2**20
        is_alive = server.is_alive()
    reached = (folder / "fuzz" / "scored").exists()
    rows = [
        ["images with exactly one right score", f"{load.right} of {load.images}"],
        ["images per second", f"{load.images / load.seconds:.1f}"],
        ["latency p99, s", f"{p99:.2f}"],
        ["reward processes killed, restarts of the service", f"{load.kills}, {load.restarts}"],
        ["requests refused", ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))],
        ["of them scored", "some" if reached else "none"],
        ["growth of the service, MiB", f"{grown:.1f}"],
    ]
    return Proof(
        title="A reward service that is killed, restarted and attacked",
        is_met=load.right == load.images and is_alive and not reached and grown < _MOST_GROWTH,
        claim=(
            f"{IMAGES} images of {SIZE}x{SIZE} from {CLIENTS} clients, every reward process killed each "
            f"{KILL_SECONDS:.0f} s, the service restarted once: each image gets its score exactly once. {REQUESTS} "
            f"malformed, unauthenticated or oversized requests (seed {SEED}): none reaches a reward, and the service "
            f"neither ends nor grows."
        ),
        commands=["python -m tests.acceptance rewards"],
        body=table(["what", "found"], rows),
        seconds=time.monotonic() - began,
    )
