"""Find and kill the local processes of one attempt of a stage, and remove their temporary files. Linux only."""

import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cosmos_core.run.lock import create_locked_folder, is_folder_locked, make_locked_folder
from cosmos_core.run.process import ATTEMPT_VARIABLE, is_running, locate_socket_folder

logger = logging.getLogger(__name__)

MAX_HEARTBEAT_AGE_SECONDS = 600.0  # a stage on another machine counts as dead if its heartbeat is older
_KILL_TIMEOUT_SECONDS = 60.0  # a process that frees much memory, or waits for a device, ends late
CHECK_FOLDER_PREFIX = "cosmos-look-"  # prefix of the temporary folders of `cosmos check`
_SCRATCH_FOLDER_PREFIX = "cosmos-"
_ORPHAN_PATTERN = re.compile(rf"{_SCRATCH_FOLDER_PREFIX}(look-|ray-)?([0-9a-f]{{12}})")


def find_attempt_processes(attempt_id: str) -> list[psutil.Process]:
    """Return the live processes, except this one, whose COSMOS_ATTEMPT in the environment begins with `attempt_id`."""
    assert attempt_id, "any mark begins with nothing"
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # skip ended processes, zombies and processes of other users
            if process.pid != os.getpid() and process.environ().get(ATTEMPT_VARIABLE, "").startswith(attempt_id):
                processes.append(process)
    return processes


def kill_attempt(attempt_id: str) -> list[int]:
    """Send SIGKILL to every process of an attempt until none is left, for at most a minute; return the ids of the
    killed processes."""
    return _kill_repeatedly(lambda: find_attempt_processes(attempt_id))


def kill_descendants() -> list[int]:
    """Send SIGKILL to all descendants of this process until none is left, for at most a minute; return the ids of
    the killed processes."""
    return _kill_repeatedly(lambda: [each for each in psutil.Process().children(recursive=True) if is_running(each)])


def create_scratch_folder(attempt_id: str) -> int:
    """Create and lock the folder for the temporary files of an attempt; return the descriptor that holds the lock.
    Launcher and supervisor keep it open: once both have ended, `remove_orphans` may remove the folder."""
    return create_locked_folder(scratch_folder(attempt_id))


@contextmanager
def make_check_folder() -> Iterator[Path]:
    """Yield a temporary folder for the files of one check; a lock protects it from other commands' `remove_orphans`."""
    folder = Path(tempfile.gettempdir()) / f"{CHECK_FOLDER_PREFIX}{secrets.token_hex(6)}"
    with make_locked_folder(folder):
        yield folder


def remove_orphans() -> None:
    """Kill processes of attempts whose launcher and supervisor have ended, and remove folders of ended processes."""
    temporary_folders = Path(tempfile.gettempdir()).glob(f"{_SCRATCH_FOLDER_PREFIX}*")
    socket_folder_pattern = locate_socket_folder("?" * 12)
    for folder in (*temporary_folders, *socket_folder_pattern.parent.glob(socket_folder_pattern.name)):
        if (name_match := _ORPHAN_PATTERN.fullmatch(folder.name)) and not is_folder_locked(folder):
            if not name_match[1]:  # the folder has the temporary files of an attempt
                kill_attempt(name_match[2])
            shutil.rmtree(folder, ignore_errors=True)


def scratch_folder(attempt_id: str) -> Path:
    """Return the folder for the temporary files of an attempt; its name is short, as paths of sockets are limited."""
    return Path(tempfile.gettempdir()) / f"{_SCRATCH_FOLDER_PREFIX}{attempt_id[:12]}"


def remove_scratch_folder(attempt_id: str) -> None:
    """Remove the temporary files of an attempt that has ended."""
    if attempt_id:
        temporary_folder, folder = Path(os.environ.get("TMPDIR", "")), scratch_folder(attempt_id)
        shutil.rmtree(temporary_folder if temporary_folder.name == folder.name else folder, ignore_errors=True)
        shutil.rmtree(locate_socket_folder(attempt_id), ignore_errors=True)


def _kill_repeatedly(find_processes: Callable[[], list[psutil.Process]]) -> list[int]:
    killed_pids: set[int] = set()
    kill_deadline, pause_seconds = time.monotonic() + _KILL_TIMEOUT_SECONDS, 0.02
    while remaining_processes := find_processes():
        if time.monotonic() > kill_deadline:
            remaining_pids = sorted(process.pid for process in remaining_processes)
            warning_template = "processes %s did not end within %g s of SIGKILL; they may still hold GPUs and memory"
            logger.warning(warning_template, remaining_pids, _KILL_TIMEOUT_SECONDS)
            break
        for process in remaining_processes:
            killed_pids.add(process.pid)
            with suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, 1.0)
    return sorted(killed_pids)
