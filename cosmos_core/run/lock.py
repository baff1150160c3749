"""One writer at a time, on one machine: `flock`, which the kernel releases however its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from cosmos_core.errors import StageFailed
from cosmos_core.run.files import disk_full

_POLL_SECONDS = 0.2


class Lock:
    """An exclusive lock on a file; its descriptor may be passed to a child, which then holds it too."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def try_acquire(self) -> bool:
        """Take the lock if nobody holds it."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def acquire(self, *, while_waiting: Callable[[], None] = lambda: None) -> None:
        """Wait for the lock; `while_waiting` is called between tries and may raise to give up."""
        while not self.try_acquire():
            while_waiting()
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let go; a child that was given the descriptor goes on holding the lock."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def stage_lock(run: Path, name: str) -> Lock:
    """Open the lock of a stage of the run in a folder.

    Raises:
        StageFailed: its file cannot be made.
    """
    path = run / "locks" / f"{name}.lock"
    try:
        return Lock(path)
    except OSError as error:
        raise disk_full(error, path) or StageFailed(f"stage {name!r}: {path}: {error.strerror}") from error
