"""Save a checkpoint of 1 GB: how long training stands still, how long until it is on the disk, and what is read.

    python -m benchmarks.checkpoint [--gigabytes 1] [--saves 4] [--folder DIR]

Weights in float32 with both moments of AdamW. The two newest checkpoints are kept, so that later saves delete one.
Bytes are those that the process asked the kernel for, from /proc. A plain write of the same bytes, waiting for the
disk, and their sha256 in memory are measured beside it: the disk is shared, so compare within a run.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState

_BYTES_PER_WEIGHT = 3 * 4
_WIDTH = 4096


def main() -> None:
    """Measure both save modes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", default=None, help="where to write; default: the folder for temporary files")
    options = parser.parse_args()
    state = _state(options.gigabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = [_saves(Path(folder) / mode, state, mode == "async", options.saves) for mode in ("sync", "async")]
        plain = _seconds(lambda: _write(Path(folder) / "plain", int(options.gigabytes * 1e9)))
    block = bytes(1 << 28)
    hashing = _seconds(lambda: hashlib.sha256(block)) * options.gigabytes * 1e9 / len(block)
    table = Table("save mode", "training waits, s", "on the disk after, s", "CPU, s", "GB written", "GB read")
    for row in rows:
        table.add_row(*row)
    table.add_row("plain write and fsync", "", f"{plain:.2f}", "", f"{options.gigabytes:.2f}", "0.00")
    table.add_row("sha256 in memory", "", f"{hashing:.2f}", "", "", "")
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def _state(gigabytes: float) -> TrainState:
    """Return a training of so many bytes that has made a step."""
    rows = max(1, int(gigabytes * 1e9 / _BYTES_PER_WEIGHT / _WIDTH / 8))
    model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, rows, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return TrainState(model, optimizer)


def _saves(folder: Path, state: TrainState, asynchronous: bool, count: int) -> tuple[str, ...]:
    """Return a row of the table: medians of the saves after the first, which allocates."""
    saver = Checkpointer(folder, fingerprint="f", max_keep=2, is_async=asynchronous)
    found: list[tuple[float, float, float, int, int]] = []
    for step in range(1, count + 1):
        began, cpu, before = time.perf_counter(), time.process_time(), psutil.Process().io_counters()
        saver.save(step, state)
        waited = time.perf_counter() - began
        saver.wait()
        saver.latest_step()  # as at the end of a training
        after = psutil.Process().io_counters()
        seconds = time.perf_counter() - began
        moved = after.write_chars - before.write_chars, after.read_chars - before.read_chars
        found.append((waited, seconds, time.process_time() - cpu, *moved))
    saver.close()
    waits, seconds_, cpu, written, read = (statistics.median(column) for column in zip(*found[1:], strict=True))
    return (
        "async" if asynchronous else "sync", f"{waits:.2f}", f"{seconds_:.2f}", f"{cpu:.2f}",
        f"{written / 1e9:.2f}", f"{read / 1e9:.2f}",
    )  # fmt: skip


def _write(file: Path, size: int) -> None:
    block = os.urandom(1 << 24)
    with open(file, "wb") as out:
        for _ in range(size // len(block)):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())


def _seconds(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
