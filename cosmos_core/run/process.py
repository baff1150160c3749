"""Identity and liveness of the processes that work on a run. Linux only."""

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import psutil


def start_time(pid: int) -> float | None:
    """Return the start time of a process in seconds after boot, which identifies it uniquely with its pid; None if the
    process has ended.

    Seconds since 1970 are not used: they change when the clock of the machine is set.
    """
    try:
        process = psutil.Process(pid)
        return round(process.create_time() - psutil.boot_time(), 2) if is_running(process) else None
    except psutil.NoSuchProcess:
        return None


def identify_process() -> dict[str, Any]:
    """Return pid, start time, host and machine of this process, as the launcher fields of `State`."""
    pid = os.getpid()
    return {
        "launcher_pid": pid,
        "launcher_started": start_time(pid),
        "launcher_host": socket.gethostname(),
        "launcher_machine": identify_machine(),
    }


@cache
def identify_machine() -> str:
    """Return an identifier of this machine since its last boot, which containers of the same host name do not share."""
    boot_id_file, pid_namespace_link = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    identifiers = (
        boot_id_file.read_text().strip() if boot_id_file.is_file() else "",
        os.readlink(pid_namespace_link) if pid_namespace_link.is_symlink() else "",
    )
    return "/".join((socket.gethostname(), *identifiers))


def ran_on_this_machine(machine: str, host: str) -> bool:
    """Return True if `machine`, the value of `identify_machine` that a process saved, is that of this machine. If it
    is empty, compare the host names instead."""
    return machine == identify_machine() if machine else host == socket.gethostname()


def is_alive(pid: int | None, started: float | None) -> bool:
    """Return True if the process with this pid and start time is running; a zombie is not."""
    return pid is not None and started is not None and start_time(pid) == started


def is_running(process: psutil.Process) -> bool:
    """Return True if a process has not ended; a zombie has ended."""
    try:
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
