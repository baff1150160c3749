"""Lock files for one writer at a time on one machine; the kernel releases an `flock` when its process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.run.files import make_disk_full_error

_POLL_SECONDS = 0.2


class FileLock:
    """Exclusive lock on a file; a child process that inherits the descriptor also holds the lock."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_acquire(self) -> bool:
        """Acquire the lock and return True, or return False if another descriptor holds it. Raise ConfigError if the
        file system has no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                error.filename = str(self.path)
                raise
            reason = f"its file system has no locks ({error.strerror})"
            raise ConfigError(f"{self.path.parent}: {reason}; take a folder on a local disk or NFS 4") from error
        return True

    def acquire(self, *, on_poll: Callable[[], object] = lambda: None) -> None:
        """Wait for the lock; call `on_poll` between attempts, which may raise an error to stop waiting."""
        while not self.try_acquire():
            on_poll()
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Release the lock in this process; a child process that inherited the descriptor still holds it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def open_stage_lock(run_path: Path, stage: str) -> FileLock:
    """Open the lock of a stage in a run directory; raise StageFailed if the lock file cannot be created."""
    path = run_path / "locks" / f"{stage}.lock"
    try:
        return FileLock(path)
    except OSError as error:
        raise make_disk_full_error(error, path) or StageFailed(f"stage {stage!r}: {path}: {error.strerror}") from error
