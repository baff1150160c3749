"""Prefect server for a run that has none: a child process that ends with this process and is restarted if it dies.

This server replaces Prefect's ephemeral server, which can outlive its flow and hold its standard output open.
"""

import logging
import os
import secrets
import socket
import sqlite3
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPException
from importlib.metadata import version
from pathlib import Path
from urllib.parse import quote

from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.imports import make_python_command
from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.run.files import find_disk_error, replace_file, user_cache_folder
from cosmos_core.run.lock import FileLock

logger = logging.getLogger(__name__)

_SERVER_GRACE_SECONDS = 3.0
_SERVER_START_TIMEOUT_SECONDS = 90.0
_MAX_SERVER_STARTS = 3  # maximum number of starts of a server that ends before it responds
_RESPONSE_TIMEOUT_SECONDS = 10.0
_BUSY_TIMEOUT_SECONDS = 60.0
_SERVER_CHECK_INTERVAL_SECONDS = 0.5
_MAX_RESTART_INTERVAL_SECONDS = 30.0
_DISK_CHECK_INTERVAL_SECONDS = 10.0
# Services of Prefect that this server does not start: it has no schedules, and its history of events has no readers.
_DISABLED_SERVICES = ("SCHEDULER", "LATE_RUNS", "FOREMAN", "TRIGGERS", "TASK_RUN_RECORDER", "EVENT_PERSISTER")


@contextmanager
def prefect_server(folder: Path) -> Iterator[Callable[[], None]]:
    """Set `PREFECT_API_URL` during the `with` block; if it is unset, start a server below `folder`. Yield a function
    that waits until the server responds, so that the caller can do other work first. Enter the block before the first
    import of Prefect, which reads the environment once. Raises `ConfigError` if no server responds at
    `PREFECT_API_URL`, `DiskFull` if the folder cannot be written, and `StageFailed` if the server did not start."""
    if url := os.environ.get("PREFECT_API_URL"):
        _wait_for_server(url)
        yield lambda: None
        return
    prefect_home, prefect_home_lock = _claim_prefect_home(folder)
    server = _ServerProcess(prefect_home)
    previous_environment = dict(os.environ)
    os.environ.update(server.environment, PREFECT_API_URL=server.url)
    try:
        server.start()
        yield server.wait_until_ready
    finally:
        for name in (*server.environment, "PREFECT_API_URL"):
            os.environ.pop(name, None)
            if name in previous_environment:
                os.environ[name] = previous_environment[name]
        server.close()
        prefect_home_lock.release()


def _wait_for_server(api_url: str) -> None:
    """Wait until the Prefect server at `api_url` responds: ten seconds or, while requests time out because the server
    is busy, a minute. Raises `ConfigError` if it does not respond."""
    start_time = time.monotonic()
    while True:
        try:
            urllib.request.urlopen(f"{api_url}/health", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # an error response shows that a server runs; Prefect reports wrong credentials later
        except (OSError, ValueError, HTTPException) as error:
            root_cause = getattr(error, "reason", error)
            if isinstance(root_cause, ssl.SSLError):
                return  # the server responds; Prefect verifies its certificate later, with other settings
            retry_seconds = _BUSY_TIMEOUT_SECONDS if isinstance(root_cause, TimeoutError) else _RESPONSE_TIMEOUT_SECONDS
            if time.monotonic() > start_time + retry_seconds or not isinstance(error, OSError):
                raise ConfigError(
                    f"PREFECT_API_URL = {api_url!r}: no server answers there ({error}); "
                    "start it, or unset the variable to run with a server of our own"
                ) from error
            time.sleep(0.5)


def _claim_prefect_home(folder: Path) -> tuple[Path, FileLock]:
    """Return a `PREFECT_HOME` that no other server uses, and its lock, because SQLite allows one writer. Take the first
    free numbered folder, which is likely to have a database already."""
    prefect_home_number = 0
    while True:
        prefect_home_number += 1
        prefect_home = folder / f"server-{prefect_home_number}"
        try:
            prefect_home_lock = FileLock(prefect_home / "lock")
        except PermissionError:
            if not prefect_home.is_dir():
                raise
            continue  # skip the folder of another user, in which this process may not open the lock
        if prefect_home_lock.try_acquire():
            return prefect_home, prefect_home_lock
        prefect_home_lock.release()


def _locate_empty_database() -> Path:
    """Return the path of the cached empty database for this release of Prefect; creating one takes five seconds."""
    return user_cache_folder() / f"prefect-{version('prefect')}.db"


def _copy_database(source_path: Path, target_path: Path) -> bool:
    """Copy a database atomically, even while a server uses it; return False if the database is missing or damaged, or
    the disk is full."""
    try:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(target_path) as temporary_path:
            with (
                closing(sqlite3.connect(f"file:{quote(str(source_path))}?mode=ro", uri=True)) as source_connection,
                closing(sqlite3.connect(temporary_path)) as target_connection,
            ):
                source_connection.backup(target_connection)
            if not _is_database_intact(temporary_path):
                raise sqlite3.DatabaseError("the copy is damaged")
        return True
    except (OSError, sqlite3.Error):
        return False


def make_database_url(database_path: Path) -> str:
    """Return the URL with which SQLAlchemy opens a database. In a plain path, a question mark would end the path."""
    database_uri = f"file:{quote(str(database_path), safe='/:')}?uri=true"
    return f"sqlite+aiosqlite:///{database_uri if '?' in str(database_path) else database_path}"


def _is_database_intact(database_path: Path) -> bool:
    try:
        with closing(sqlite3.connect(database_path)) as connection:
            return bool(connection.execute("PRAGMA quick_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


class _ServerProcess:
    def __init__(self, prefect_home: Path) -> None:
        if disk_error := find_disk_error(prefect_home):
            raise disk_error  # without disk space the server would not start, and its log would have no error
        prefect_home.chmod(0o700)  # the folder is private, because its database holds the parameters of flows
        self._log_path = prefect_home / "server.log"
        # The folder name `:memory:` makes Prefect use one connection; two writers on two connections would deadlock.
        self._database_path = prefect_home.absolute() / ":memory:" / "prefect.db"
        auth_string = f"cosmos:{secrets.token_urlsafe(24)}"
        (prefect_home / "auth").unlink(missing_ok=True)
        auth_file_descriptor = os.open(prefect_home / "auth", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(auth_file_descriptor, "w", encoding="utf-8") as file:
            file.write(auth_string)
        with socket.create_server(("127.0.0.1", 0)) as probe_socket:
            self._port = probe_socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}/api"
        # The list of hosts without a proxy must have no empty entry, which httpx would apply to all hosts.
        no_proxy_hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "localhost"
        no_proxy_hosts = no_proxy_hosts if no_proxy_hosts.strip() == "*" else f"{no_proxy_hosts},127.0.0.1"
        self.environment = {
            "PREFECT_HOME": str(prefect_home.absolute()),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), no_proxy_hosts),  # a proxy cannot reach the loopback address
            # Any user of this machine can reach the port, so requests need a password.
            "PREFECT_SERVER_API_AUTH_STRING": auth_string,
            "PREFECT_API_AUTH_STRING": auth_string,
            "PREFECT_PROFILES_PATH": str(prefect_home.absolute() / "profiles.toml"),
            "PREFECT_SERVER_API_BASE_PATH": "",  # a file of settings in the working directory may name another path
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_SERVER_LOGGING_LEVEL": "WARNING",
            # Let clients retry after HTTP status 500, with which a server without disk space responds.
            "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
            **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _DISABLED_SERVICES},
        }
        self._has_created_database = False
        self._close_event = threading.Event()
        self._child: SupervisedProcess | None = None
        self._watcher_thread = threading.Thread(target=self._watch_server, name="prefect-server", daemon=True)

    def start(self) -> None:
        database_path, empty_database = self._database_path, _locate_empty_database()
        # Replace a damaged database, because the run directory has the same information.
        if database_path.exists() and not _is_database_intact(database_path):
            logger.warning("%s is damaged and is made anew", database_path)
            for file in database_path.parent.glob("prefect.db*"):
                file.unlink()
        self._has_created_database = not database_path.exists() and not _copy_database(empty_database, database_path)
        self._start_child()

    def wait_until_ready(self) -> None:
        server_child = self._child
        assert server_child is not None
        deadline, num_starts = time.monotonic() + _SERVER_START_TIMEOUT_SECONDS, 1
        # Check first whether the server has ended: another process may use the port and respond in its place.
        while (has_child_ended := server_child.poll() is not None) or not self._is_responding():
            if time.monotonic() > deadline or (has_child_ended and num_starts == _MAX_SERVER_STARTS):
                server_child.kill()
                start_error = StageFailed(f"the Prefect server did not start; its log: {self._log_path}")
                raise find_disk_error(self._log_path.parent) or start_error
            if has_child_ended:
                num_starts += 1
                server_child = self._start_child()
            time.sleep(0.1)
        self._watcher_thread.start()
        if self._has_created_database:
            _copy_database(self._database_path, _locate_empty_database())

    def close(self) -> None:
        self._close_event.set()
        if self._watcher_thread.is_alive():
            self._watcher_thread.join()
        if self._child is not None:
            self._child.kill()  # kill it without a grace period, because the run directory has the same information

    def _start_child(self) -> SupervisedProcess:
        server_command = [*make_python_command(), "-m", "cosmos_core.launch.prefect", "server", "start"]
        server_command += ["--host", "127.0.0.1", "--port", str(self._port)]
        database_url = make_database_url(self._database_path)
        self._child = SupervisedProcess(
            server_command, log_path=self._log_path, grace_seconds=_SERVER_GRACE_SECONDS,
            environment=self.environment | {"PREFECT_SERVER_DATABASE_CONNECTION_URL": database_url},
        )  # fmt: skip
        return self._child

    def _watch_server(self) -> None:
        """Restart the server if it ends. Warn once if its disk is full: Prefect's clients would retry for minutes."""
        check_delay_seconds, next_disk_check_time, is_disk_full = _SERVER_CHECK_INTERVAL_SECONDS, 0.0, False
        while not self._close_event.wait(check_delay_seconds):
            if time.monotonic() >= next_disk_check_time:
                next_disk_check_time = time.monotonic() + _DISK_CHECK_INTERVAL_SECONDS
                if (disk_error := find_disk_error(self._log_path.parent)) and not is_disk_full:
                    logger.warning("the Prefect server cannot write, the run waits for minutes: %s", disk_error)
                is_disk_full = disk_error is not None
            assert self._child is not None
            if self._child.poll() is None:
                check_delay_seconds = _SERVER_CHECK_INTERVAL_SECONDS
            else:  # the server has ended: restart it, with exponential backoff
                with suppress(OSError):  # try again: a full disk or a process limit may be transient
                    self._start_child()
                check_delay_seconds = min(2 * check_delay_seconds, _MAX_RESTART_INTERVAL_SECONDS)

    def _is_responding(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as response:
                return bool(response.status == 200)
        except (OSError, HTTPException):  # an HTTPException shows that another program uses the port
            return False
