"""Identity and liveness of the processes that work on a run. Linux only."""

import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from cosmos_core.run.files import JsonDocument

ATTEMPT_VARIABLE = "COSMOS_ATTEMPT"
"""Environment variable that marks every process of one attempt of a stage."""


def locate_socket_folder(attempt_id: str) -> Path:
    """Return the folder for the sockets of Ray in an attempt whose TMPDIR has too long a path for sockets."""
    return Path("/tmp", f"cosmos-ray-{attempt_id[:12]}")


def read_start_time(pid: int) -> float | None:
    """Return the start time of a process in seconds after boot; None if the process has ended. Pid and start time
    identify a process, even if the clock of the machine is set, which would change a time since 1970."""
    try:
        process = psutil.Process(pid)
        return round(process.create_time() - psutil.boot_time(), 2) if is_running(process) else None
    except psutil.NoSuchProcess:
        return None


def identify_process() -> dict[str, Any]:
    """Return pid, start time, host and machine of this process, as the fields of `Launcher`."""
    pid = os.getpid()
    return {
        "launcher_pid": pid,
        "launcher_started": read_start_time(pid),
        "launcher_host": socket.gethostname(),
        "launcher_machine": identify_machine(),
        "launcher_machine_id": _read_machine_id(),
    }


@cache
def identify_machine() -> str:
    """Return an identifier of this machine since its last boot; it differs between containers of one host name."""
    boot_id_file, pid_namespace_link = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    boot_id = boot_id_file.read_text().strip() if boot_id_file.is_file() else ""
    pid_namespace = os.readlink(pid_namespace_link) if pid_namespace_link.is_symlink() else ""
    return f"{socket.gethostname()}/{boot_id}/{pid_namespace}"


def _read_machine_id() -> str:
    """Return the id of this machine, which it keeps when it restarts; empty if it has none, as a container may."""
    try:
        return Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


class Launcher(JsonDocument):
    """Process that runs stages: a base class of documents with the fields of `identify_process`."""

    launcher_pid: int | None = None
    launcher_started: float | None = None
    launcher_host: str = ""
    """Host name of the process; machines may share the folder of runs."""
    launcher_machine: str = ""
    """Machine and boot within which the pid is valid; see `identify_machine`."""
    launcher_machine_id: str = ""

    @property
    def is_local(self) -> bool:
        """Return True if the process ran on this machine; host names are compared if `launcher_machine` is empty."""
        if not self.launcher_machine:
            return self.launcher_host == socket.gethostname()
        return self.launcher_machine == identify_machine()

    @property
    def has_ended(self) -> bool:
        """Return True if the process ran on this machine and has ended, at the latest when the machine restarted."""
        if not self.is_local:
            # Compare host name and pid namespace, which a restart keeps, but which differ between containers.
            is_same_host = self.launcher_machine.split("/")[::2] == identify_machine().split("/")[::2]
            return is_same_host and self.launcher_machine_id == _read_machine_id() != ""
        return not is_alive(self.launcher_pid, self.launcher_started)


def is_alive(pid: int | None, start_time: float | None) -> bool:
    """Return True if the process with this pid and start time is running; a zombie is not."""
    return pid is not None and start_time is not None and read_start_time(pid) == start_time


def is_running(process: psutil.Process) -> bool:
    """Return True if a process has not ended; a zombie has ended."""
    try:
        return process.status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False
