"""The server that a run starts for itself: its database comes from an empty one that is kept."""

from __future__ import annotations

import os
import resource
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from cosmos_core.errors import DiskFull
from cosmos_core.launch.server import prefect_server
from cosmos_core.observe.logs import add_log_silencing_variables
from tests.conftest import processes_below, wait_until


def expect_a_server_that_asks_who_is_there(home: Path) -> None:
    url = os.environ["PREFECT_API_URL"]
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    assert httpx.post(f"{url}/flow_runs/filter", json={}, timeout=30).status_code == 401
    secret = home / "auth"
    assert (secret.stat().st_mode & 0o777, home.stat().st_mode & 0o777) == (0o600, 0o700)
    name, password = secret.read_text().split(":")
    answer = httpx.post(f"{url}/flow_runs/filter", json={}, auth=(name, password), timeout=30)
    assert answer.status_code == 200 and os.environ["PREFECT_API_AUTH_STRING"] == secret.read_text()


def use_no_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT")]:
        monkeypatch.delenv(name)
    for name, value in add_log_silencing_variables({}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("COSMOS_WORKSPACE", str(folder))


def serving(folder: Path) -> set[int]:
    return {pid for pid, line in processes_below(folder).items() if " server start " in line and "superv" not in line}


@pytest.mark.full
def test_a_full_disk_is_named_before_a_server_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_no_server(tmp_path, monkeypatch)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, limits[1]))
    try:
        with pytest.raises(DiskFull, match=r"disk full: File too large: .*/runs/server-1; free space"):
            prefect_server(tmp_path / "runs").__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_database_of_a_server_is_made_once_and_a_server_asks_for_a_password_and_is_replaced_when_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each release of Prefect; killed while it starts, or later; and nothing of it is left."""
    use_no_server(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    template = tmp_path / "cache" / "cosmos-posttrain" / f"prefect-{version('prefect')}.db"
    mine = tmp_path / "first" / "server-1" / ":memory:" / "prefect.db"
    for file in (template, mine):  # what is damaged is made anew
        file.parent.mkdir(parents=True)
        file.write_bytes(b"damaged" * 1000)
    with prefect_server(tmp_path / "first") as wait:
        assert "PREFECT_API_URL" in os.environ, "for the import of Prefect, while the server starts"
        wait()
        assert httpx.get(f"{os.environ['PREFECT_API_URL']}/health", timeout=30).status_code == 200
    with closing(sqlite3.connect(template)) as database:
        assert database.execute("select count(*) from alembic_version").fetchone() == (1,)
        assert database.execute("select count(*) from flow_run").fetchone() == (0,)
        database.execute("create table marker (value)")
        database.commit()
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    before = dict(os.environ)
    with prefect_server(tmp_path / "second") as wait:
        killed = list(processes_below(tmp_path / "second"))
        assert killed, "it is starting"
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        wait()
        expect_a_server_that_asks_who_is_there(tmp_path / "second" / "server-1")
        [pid] = serving(tmp_path)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: serving(tmp_path) - {pid}, 30, "another in its place")
    assert not processes_below(tmp_path)
    assert dict(os.environ) == before, "a server that is started later would write no events"
    with closing(sqlite3.connect(tmp_path / "second" / "server-1" / ":memory:" / "prefect.db")) as database:
        assert database.execute("select count(*) from marker").fetchone() == (0,)


def _write(worker: int) -> set[int]:
    """Create flow runs with states and logs, as a worker and its flows do; the statuses of the responses."""
    statuses = set()
    auth = tuple(os.environ["PREFECT_API_AUTH_STRING"].split(":", 1))
    with httpx.Client(base_url=os.environ["PREFECT_API_URL"], auth=auth, timeout=120) as client:  # type: ignore[arg-type]

        def post(path: str, content: Any) -> Any:
            response = client.post(path, json=content)
            statuses.add(response.status_code)
            return response.json() if response.content else None

        flow = post("/flows/", {"name": f"flow-{worker}"})["id"]
        for step in range(100):
            run = post("/flow_runs/", {"flow_id": flow, "state": {"type": "PENDING"}})["id"]
            post(f"/flow_runs/{run}/set_state", {"state": {"type": "RUNNING"}})
            line = {"name": "prefect.flow_runs", "level": 20, "message": str(step), "flow_run_id": run}
            post("/logs/", [line | {"timestamp": "2025-10-09T20:14:00Z"}])
            post(f"/flow_runs/{run}/set_state", {"state": {"type": "COMPLETED"}})
            post("/flow_runs/filter", {"limit": 20})
    return statuses


@pytest.mark.full
def test_sqlite_with_one_connection_takes_three_writers_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_no_server(tmp_path, monkeypatch)
    with prefect_server(tmp_path / "runs") as wait, ThreadPoolExecutor(3) as workers:
        wait()
        assert set().union(*workers.map(_write, range(3))) <= {200, 201}
        assert "database is locked" not in (tmp_path / "runs" / "server-1" / "server.log").read_text()
