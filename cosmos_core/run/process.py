"""Which process of which machine works on a run, and whether it is alive. Linux only."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import psutil


def start_time(pid: int) -> float | None:
    """Return the seconds after boot at which a process started; with the pid they name it for good. None: it is gone.

    Not seconds since 1970: those of one process change when the clock of the machine is set.
    """
    try:
        process = psutil.Process(pid)
        return round(process.create_time() - psutil.boot_time(), 2) if is_running(process) else None
    except psutil.NoSuchProcess:
        return None


def this_process() -> dict[str, Any]:
    """Return what `State` says of the launcher, if it is this process."""
    pid = os.getpid()
    return {
        "launcher_pid": pid,
        "launcher_started": start_time(pid),
        "launcher_host": socket.gethostname(),
        "launcher_machine": this_machine(),
    }


@cache
def this_machine() -> str:
    """Return what names this machine between two starts of it; containers that share a name differ, for the pids of
    each are its own."""
    boot, pids = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    known = (boot.read_text().strip() if boot.is_file() else "", os.readlink(pids) if pids.is_symlink() else "")
    return "/".join((socket.gethostname(), *known))


def is_here(machine: str, host: str) -> bool:
    """Return whether a process was one of this machine, as it runs now; `machine` is empty where it is unknown."""
    return machine == this_machine() if machine else host == socket.gethostname()


def is_alive(pid: int | None, started: float | None) -> bool:
    """Return whether the process with this pid and start time still runs; a zombie does not."""
    return pid is not None and started is not None and start_time(pid) == started


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended; a zombie has."""
    try:
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
