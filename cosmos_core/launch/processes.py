"""Processes on this machine: who is alive, who belongs to an attempt, and how they are ended. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

ATTEMPT = "COSMOS_ATTEMPT"  # environment variable that marks every process of one attempt
_PR_SET_PDEATHSIG = 1


def start_time(pid: int) -> int | None:
    """Kernel ticks at which a process started; with the pid it names a process for good. None: it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def is_alive(pid: int | None, started: int | None) -> bool:
    """Whether the process with this pid and start time still runs; a zombie does not."""
    return pid is not None and started is not None and start_time(pid) == started


def marked(attempt: str) -> list[int]:
    """Live processes, this one excepted, whose environment or ancestors' carries the mark of an attempt."""
    wanted = f"{ATTEMPT}={attempt}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                environment = Path(f"/proc/{entry}/environ").read_bytes()
            except (OSError, ProcessLookupError):
                continue  # another user's, or gone meanwhile
            if wanted in environment.split(b"\0") and start_time(int(entry)) is not None:
                found.append(int(entry))
    return found


def kill_marked(attempt: str, *, seconds: float = 5.0) -> list[int]:
    """SIGKILL every process of an attempt until none is left; returns the pids that were found."""
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while (left := marked(attempt)) and time.monotonic() < deadline:
        for pid in left:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    return sorted(killed)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends. Call in a fresh child whose parent's only thread started it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)
