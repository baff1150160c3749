"""A run that died before it had a directory: `cosmos resume` lets its flow run begin again."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect import states
from prefect.client import orchestration
from typer.testing import CliRunner, Result

from cosmos_core.cli import app
from cosmos_core.errors import CosmosError
from cosmos_core.launch import flow_run


class Server:
    """Has flow runs, the newest first, and ends with `end` what is scheduled."""

    def __init__(self) -> None:
        self.flow_runs: list[Any] = []
        self.end: Any = states.Completed()
        self.task_runs: list[str] = []
        self.away = 0
        """Requests to which it does not respond, from the first that asks for a flow run that was scheduled."""
        self.scheduled: list[uuid.UUID] = []

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def add(self, run_id: str, state: Any) -> None:
        name = f"flow-run-{len(self.flow_runs)}"
        self.flow_runs.insert(0, flow_run_in(state, name=name, id=uuid.uuid4(), parameters={"run_id": run_id}))

    def read_flow_runs(self, **filters: Any) -> list[Any]:
        return self.flow_runs

    def read_task_runs(self, **filters: Any) -> list[str]:
        return self.task_runs

    def set_flow_run_state(self, found: uuid.UUID, state: Any, force: bool) -> None:
        assert state.is_scheduled() and force
        self.scheduled.append(found)

    def read_flow_run(self, found: uuid.UUID) -> Any:
        assert found in self.scheduled
        self.away -= 1
        if self.away >= 0:
            raise httpx.ConnectError("away")
        [known] = [each for each in self.flow_runs if each.id == found]
        return flow_run_in(self.end, name=known.name)


def flow_run_in(state: Any, **values: Any) -> Any:
    return SimpleNamespace(
        state=state, state_type=state.type, state_name=state.name, work_pool_name="gpu", **values
    )  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr(orchestration, "get_client", lambda sync_client: found)
    monkeypatch.setattr(flow_run, "_POLL_SECONDS", 0.0)
    return found


def resume(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["resume", *arguments, "--output-dir", str(folder)])


def test_a_run_that_died_before_it_began_begins_again_on_its_pool(server: Server, tmp_path: Path) -> None:
    server.add("night", states.Crashed())
    server.add("night", states.Failed())
    server.add("day", states.Crashed())
    server.away = 2
    done = resume(tmp_path, "night")
    assert (done.exit_code, done.exception) == (0, None)
    assert done.output == "run night has not begun: its flow run flow-run-1 is scheduled again on work pool gpu\n"
    assert server.scheduled == [server.flow_runs[1].id], "the newest of that name"


def test_one_that_fails_again_ends_with_its_message(server: Server, tmp_path: Path) -> None:
    server.add("night", states.Crashed())
    server.end = states.Failed(message="no such file")
    done = resume(tmp_path, "night")
    assert isinstance(done.exception, CosmosError) and done.exception.exit_code == 1
    assert str(done.exception) == "run night: its flow run flow-run-0 Failed: no such file"


@pytest.mark.parametrize("why", ["began", "running", "another", "forced", "newest", "no server"])
def test_what_the_server_cannot_begin_again_is_no_run(
    why: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.add("" if why == "newest" else "night", states.Running() if why == "running" else states.Crashed())
    server.task_runs = ["train"] if why == "began" else []
    if why == "no server":
        monkeypatch.delenv("PREFECT_API_URL")
    name = {"another": "day", "newest": ""}.get(why, "night")
    done = resume(tmp_path, name, *["--from-stage", "x"] * (why == "forced"))
    assert isinstance(done.exception, CosmosError) and done.exception.exit_code == 64
    assert str(done.exception).startswith("no run ")
    assert server.scheduled == []
