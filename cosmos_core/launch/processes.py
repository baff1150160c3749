"""Processes on this machine: who belongs to an attempt, and how they are ended. Linux only."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from cosmos_core.run.process import is_running

SILENT_SECONDS = 600.0  # what another machine runs may go on while it was heard of since then
_KILL_SECONDS = 5.0
ATTEMPT = "COSMOS_ATTEMPT"  # environment variable that marks every process of one attempt
LOOK = "cosmos-look-"  # and the pid: beginning of the name of a folder of temporary files
_SCRATCH = "cosmos-"
_SCRATCH_NAME = re.compile(rf"{_SCRATCH}[0-9a-f]{{12}}")


def marked(attempt: str) -> list[psutil.Process]:
    """Return the live processes, this one excepted, whose environment or ancestors' carries the mark of an attempt, or
    one that begins so."""
    assert attempt, "any mark begins with nothing"
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(ATTEMPT, "").startswith(attempt):
                found.append(process)
        except psutil.Error:  # another user's, a zombie, or gone meanwhile
            continue
    return found


def kill_marked(attempt: str) -> list[int]:
    """Send SIGKILL to every process of an attempt until none is left; return the pids that were found."""
    return _kill(lambda: marked(attempt))


def kill_below() -> list[int]:
    """Send SIGKILL to all descendants of this process until none is left; return the pids that were found."""
    return _kill(lambda: [each for each in psutil.Process().children(recursive=True) if is_running(each)])


def make_scratch(attempt: str) -> int:
    """Make the folder of an attempt's temporary files and lock it; return the descriptor that holds the lock.

    Launcher and supervisor hold it: once both are gone, however they died, `sweep` may have the folder.
    """
    folder = scratch_of(attempt)
    unlocked = folder.with_name(f".{folder.name}")  # a name that no `sweep` looks at
    unlocked.mkdir(mode=0o700)
    descriptor = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    unlocked.rename(folder)
    return descriptor


def sweep() -> None:
    """End what is left of attempts whose launcher and supervisor were killed; remove temporary files of the dead."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        if _SCRATCH_NAME.fullmatch(folder.name) and not _is_held(folder):
            kill_marked(folder.name.removeprefix(_SCRATCH))
            shutil.rmtree(folder, ignore_errors=True)
    for folder in Path(tempfile.gettempdir()).glob(f"{LOOK}*"):
        pid = folder.name.removeprefix(LOOK).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Return whether somebody holds the lock of a folder; one that we may not look into is somebody's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def scratch_of(attempt: str) -> Path:
    """Return the folder of an attempt's temporary files: its name is short, for the sockets in it have short ones."""
    return Path(tempfile.gettempdir()) / f"{_SCRATCH}{attempt[:12]}"


def remove_scratch(attempt: str) -> None:
    """Remove the temporary files of an attempt that has ended."""
    if attempt:
        own = os.environ.get("TMPDIR", "")
        folder = Path(own) if Path(own).name == scratch_of(attempt).name else scratch_of(attempt)
        shutil.rmtree(folder, ignore_errors=True)


def _kill(find: Callable[[], list[psutil.Process]]) -> list[int]:
    killed: set[int] = set()
    deadline = time.monotonic() + _KILL_SECONDS
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            killed.add(process.pid)
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.02)
    return sorted(killed)
