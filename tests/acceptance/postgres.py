"""A PostgreSQL of our own, where one is installed: with SQLite Prefect's server holds its lock for minutes now and then
when several workers write to it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import wait_until


@contextmanager
def postgres() -> Iterator[str]:
    """Run one on a free port of loopback; yield its URL for Prefect, empty where none is installed."""
    if not shutil.which("initdb") or not shutil.which("postgres"):
        yield ""
        return
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    account: dict[str, Any] = {}
    if os.geteuid() == 0:  # which it refuses to run as
        account = {"user": "postgres", "group": pwd.getpwnam("postgres").pw_gid, "extra_groups": []}
        shutil.chown(folder, "postgres")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    data = folder / "data"
    log = (folder / "log").open("wb")
    making = ["initdb", "--auth", "trust", "--username", "cosmos", "--pgdata", str(data)]
    subprocess.run(making, check=True, cwd=folder, stdout=log, stderr=log, **account)
    command = ["postgres", "-D", str(data), "-p", port, "-h", "127.0.0.1", "-k", str(folder)]
    process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **account)
    try:
        ready = ["pg_isready", "--quiet", "--host", "127.0.0.1", "--port", port]
        wait_until(lambda: subprocess.run(ready).returncode == 0, 60, f"PostgreSQL is up; its log: {folder}/log")
        yield f"postgresql+asyncpg://cosmos@127.0.0.1:{port}/postgres"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        log.close()
        shutil.rmtree(folder)
