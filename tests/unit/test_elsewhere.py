"""What a server does that is started again, or forgets, to what is followed on other work pools."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import Preempted, StageFailed
from cosmos_core.run.directory import Run, supersede
from flows import reward_service
from tasks import elsewhere, stage
from tasks.stored import Stored
from tests.unit.test_artifact_store import begun

STAGE = StageConfig(name="first", kind="custom", entry="x:y", work_pool="gpu")


class Server:
    """Raises what it is given for each request."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def read_flow_run(self, flow_run: uuid.UUID) -> Any:
        raise self.error

    def set_flow_run_state(self, flow_run: uuid.UUID, state: Any) -> Any:
        raise self.error


def test_a_flow_run_that_somebody_deleted_is_one_failed_attempt() -> None:
    server: Any = Server(ObjectNotFound(Exception()))
    with pytest.raises(StageFailed, match=r"stage 'first' on 'gpu': its flow run .* is gone from the server"):
        elsewhere._follow(server, STAGE, uuid.uuid4(), lambda: None)


@pytest.mark.parametrize("error", [ObjectNotFound(Exception()), httpx.ConnectError("away")])
def test_a_stage_that_is_stopped_is_stopped_whatever_the_server_says(error: Exception) -> None:
    server: Any = Server(error)
    elsewhere._cancel(server, elsewhere.Child(flow_run=str(uuid.uuid4()), attempt=1), 5.0)


class Deployments:
    """Begins one flow run for each idempotency key, as a server does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: dict[str, uuid.UUID] = {}
        self.loses_reply = False
        monkeypatch.setattr(elsewhere, "run_deployment", self.run_deployment)

    def run_deployment(self, name: str, *, idempotency_key: str, **parameters: Any) -> Any:
        found = self.begun.setdefault(idempotency_key, uuid.uuid4())
        if self.loses_reply:
            raise KeyboardInterrupt
        return SimpleNamespace(id=found)

    def begin(self, run: Run) -> str:
        return elsewhere._begin(run, STAGE, Stored(run, STAGE)).flow_run


def test_a_stage_that_is_made_again_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, server = begun(tmp_path, "", "here"), Deployments(monkeypatch)
    first = server.begin(run)
    supersede(run.stage_path("first"))
    second = server.begin(run)
    shutil.rmtree(run.path)
    third = server.begin(begun(tmp_path, "", "here"))
    assert len({first, second, third, server.begin(run)}) == 4, "a retry is begun again too"


def test_a_parent_that_dies_while_it_asks_follows_the_same_flow_run_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, server = begun(tmp_path, "", "here"), Deployments(monkeypatch)
    server.loses_reply = True
    with pytest.raises(KeyboardInterrupt):
        server.begin(run)
    nobody: Any = None
    assert elsewhere._going(nobody, run.stage_path("first")) is None
    server.loses_reply = False
    assert [server.begin(run)] == [str(found) for found in server.begun.values()]


def test_whatever_goes_wrong_while_it_is_followed_is_noted_as_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "", "here")

    def odd(*arguments: Any) -> Any:
        raise ValueError("odd")

    monkeypatch.setattr(stage, "perform_elsewhere", odd)
    with pytest.raises(StageFailed, match=r"^stage 'first': ValueError: odd$"):
        stage._run_elsewhere(run, "first")
    state = stage.read_state(run.stage_path("first"))
    assert (state.state, state.error_type, state.failures) == ("failed", "StageFailed", 1)


def test_a_stop_before_a_worker_takes_it_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path, "", "here")

    def stopped(*arguments: Any) -> Any:
        raise Preempted("stopped")

    monkeypatch.setattr(stage, "perform_elsewhere", stopped)
    for _ in range(4):
        with pytest.raises(Preempted):
            stage._run_elsewhere(run, "first")
    state = stage.read_state(run.stage_path("first"))
    assert (state.state, state.failures) == ("stopped", 0)


def test_a_reward_service_waits_for_a_server_that_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_service, "_POLL_SECONDS", 0.01)
    said: list[Any] = [True, httpx.ConnectError("away"), httpx.ReadTimeout("busy"), True, False, Preempted("too long")]

    def is_wanted() -> bool:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    reward_service._wait_while(is_wanted)
    assert len(said) == 1
    monkeypatch.setattr(reward_service, "_UNHEARD_SECONDS", 0.05)
    said[:] = [httpx.ConnectError("gone for good")] * 100
    reward_service._wait_while(is_wanted)
    assert said
