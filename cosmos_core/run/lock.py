"""Lock files and locked folders on one machine; the kernel releases an `flock` when its process ends."""

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.run.files import make_disk_full_error

_POLL_SECONDS = 0.2
_FOLDER_LOCK_FILE = ".lock"
_NO_LOCKS_ERRNOS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FileLock:
    """Exclusive lock on a file; a child process that inherits the descriptor also holds the lock."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def try_acquire(self) -> bool:
        """Try to acquire the lock, and return True on success; raise ConfigError if the file system has no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS_ERRNOS:
                error.filename = str(self.path)
                raise
            raise _make_missing_locks_error(self.path.parent, error) from error
        return True

    def acquire(self, *, on_poll: Callable[[], object] = lambda: None) -> None:
        """Wait for the lock; call `on_poll`, which can raise an error to stop waiting, after each failed attempt."""
        while not self.try_acquire():
            on_poll()
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Release the lock in this process; a child process that inherited the descriptor still holds it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def open_stage_lock(run_path: Path, name: str) -> FileLock:
    """Open the lock of the stage `name` in a run directory; raise StageFailed if the lock file cannot be created."""
    path = run_path / "locks" / f"{name}.lock"
    try:
        return FileLock(path)
    except OSError as error:
        raise make_disk_full_error(error, path) or StageFailed(f"stage {name!r}: {path}: {error.strerror}") from error


def create_locked_folder(folder: Path, parent_setting_text: str = "TMPDIR = ") -> int:
    """Create a private folder for temporary files, and return the descriptor that holds its shared lock: while a
    process has the descriptor open, no other process removes the folder. Raise ConfigError, which names the parent
    folder by `parent_setting_text`, if the file system has no locks."""
    # Until the folder is locked, its name begins with a dot, because no process removes a folder of such a name.
    hidden_folder = folder.with_name(f".{folder.name}")
    hidden_folder.mkdir(mode=0o700)
    with cleanup_on_error(partial(shutil.rmtree, hidden_folder)):
        # Lock a file, because other machines see a lock of a file on NFS, but not that of a folder.
        lock_descriptor = os.open(hidden_folder / _FOLDER_LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock_descriptor, fcntl.LOCK_SH)
        except OSError as error:
            os.close(lock_descriptor)
            if error.errno not in _NO_LOCKS_ERRNOS:
                raise
            raise _make_missing_locks_error(folder.parent, error, parent_setting_text) from error
    hidden_folder.rename(folder)
    return lock_descriptor


@contextmanager
def make_locked_folder(folder: Path, parent_setting_text: str = "TMPDIR = ") -> Iterator[None]:
    """Create a folder as `create_locked_folder` does, and remove it at the end of the `with` block."""
    lock_descriptor = create_locked_folder(folder, parent_setting_text)
    try:
        yield
    finally:
        os.close(lock_descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def is_folder_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of a folder, or if this user cannot lock the folder to find out."""
    try:
        lock_descriptor = os.open(folder / _FOLDER_LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(lock_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock_descriptor)
    return False


def _make_missing_locks_error(folder: Path, error: OSError, message_prefix: str = "") -> ConfigError:
    problem_text = f"{message_prefix}{folder}: its file system has no locks ({error.strerror})"
    return ConfigError(f"{problem_text}; take a folder on a local disk or NFS 4")
