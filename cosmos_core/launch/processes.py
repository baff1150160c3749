"""Processes on this machine: who is alive, who belongs to an attempt, and how they are ended. Linux only."""

from __future__ import annotations

import os
import time

import psutil

ATTEMPT = "COSMOS_ATTEMPT"  # environment variable that marks every process of one attempt


def start_time(pid: int) -> float | None:
    """Return the seconds after boot at which a process started; with the pid they name it for good. None: it is gone.

    Not seconds since 1970: those of one process change when the clock of the machine is set.
    """
    try:
        process = psutil.Process(pid)
        if process.status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}:
            return None
        return round(process.create_time() - psutil.boot_time(), 2)
    except psutil.NoSuchProcess:
        return None


def is_alive(pid: int | None, started: float | None) -> bool:
    """Return whether the process with this pid and start time still runs; a zombie does not."""
    return pid is not None and started is not None and start_time(pid) == started


def marked(attempt: str) -> list[psutil.Process]:
    """Return the live processes, this one excepted, whose environment or ancestors' carries the mark of an attempt."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(ATTEMPT) == attempt:
                found.append(process)
        except psutil.Error:  # another user's, a zombie, or gone meanwhile
            continue
    return found


def kill_marked(attempt: str, *, seconds: float = 5.0) -> list[int]:
    """Send SIGKILL to every process of an attempt until none is left; return the pids that were found."""
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while (left := marked(attempt)) and time.monotonic() < deadline:
        for process in left:
            killed.add(process.pid)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return sorted(killed)
