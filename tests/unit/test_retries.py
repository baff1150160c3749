"""Which failures of a stage are tried again."""

from __future__ import annotations

import json
import uuid
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import StateType

from cosmos_core.errors import ProgramError, StageFailed, UploadError
from cosmos_core.run.files import write_json
from cosmos_core.run.process import identify_process
from cosmos_core.run.state import read_state, record_failure, update_state
from cosmos_core.worker.program import _write_error_file
from tasks import remote_stage, stage
from tasks.remote_stage import compute_backoff_seconds
from tasks.stage import _record_launcher, should_retry
from tests.unit.run_folder import counting_run


@pytest.mark.parametrize(
    ("errors", "tried"),
    [
        ([(1, "rank 1: TypeError: <a at 0x7f01>"), (1, "rank 0: TypeError: <a at 0x7f02>")], [True, False]),
        # before the first step
        pytest.param([(None, "TypeError: no"), (None, "TypeError: no")], [True, False], marks=pytest.mark.full),
        ([(1, "TypeError: no"), (2, "TypeError: no"), (2, "TypeError: no")], [True, True, False]),
        ([(1, "TypeError: no"), (1, "ValueError: no"), (1, "TypeError: no")], [True, True, True]),
    ],
)
def test_the_same_error_at_the_same_step_twice_is_not_tried_again(
    tmp_path: Path, errors: list[tuple[int | None, str]], tried: list[bool]
) -> None:
    run = counting_run(tmp_path, "first.retries=9")
    path = run.stage_path("first")

    def retried(step: int | None, error: StageFailed) -> bool:
        update_state(path, step=step, error="")
        record_failure(path, error)
        return should_retry(run, "first", error)

    assert [retried(step, ProgramError(message)) for step, message in errors] == tried
    assert all(retried(1, StageFailed("stage 'first' crashed (signal 9)")) for _ in range(3)), "a kill may pass"


def test_a_new_process_with_the_pid_of_the_last_one_has_all_retries(tmp_path: Path) -> None:
    """As in a container, in which the flow is always the process 1."""
    path = counting_run(tmp_path).stage_path("first")
    update_state(path, **identify_process() | {"launcher_started": 0.5}, state="failed", failures=3, is_repeated=True)
    _record_launcher(path)
    assert (read_state(path).failures, read_state(path).is_repeated, read_state(path).state) == (0, False, "failed")


@pytest.mark.parametrize(
    ("error", "kind"),
    [(TypeError("no"), "ProgramError"), (ConnectionError("lost"), "StageFailed"), (MemoryError(), "StageFailed")],
)
def test_a_worker_says_whether_what_its_program_raised_may_pass(tmp_path: Path, error: Exception, kind: str) -> None:
    assert _write_error_file(tmp_path, error) == 1
    assert json.loads((tmp_path / "error.json").read_text())["type"] == kind


def test_the_pause_between_attempts_is_bounded_however_many_have_failed() -> None:
    assert [compute_backoff_seconds(number) for number in (1, 2, 6, 7, 5000)] == [1.0, 2.0, 32.0, 60.0, 60.0]


def test_attempts_that_begin_no_flow_run_on_their_pool_are_counted_and_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that lost its database, or refuses the password, says the same each time, and at once."""
    run = counting_run(tmp_path, 'first.work_pool="gpu"')
    pauses: list[float] = []

    def refuse(*_: object) -> Any:
        raise httpx.HTTPStatusError("401", request=Any, response=Any)  # type: ignore[arg-type]

    monkeypatch.setattr(remote_stage, "get_client", lambda sync_client: nullcontext(SimpleNamespace()))
    monkeypatch.setattr(remote_stage, "require_second_slot", refuse)
    monkeypatch.setattr(remote_stage, "sleep_unless_stopping", pauses.append)
    monkeypatch.setattr(stage.events, "emit_stage_failed", lambda *_: None)
    for _ in range(2):
        with pytest.raises(StageFailed, match=r"^stage 'first' on 'gpu': the Prefect server does not respond: 401$"):
            stage._run_on_work_pool(run, "first")
    assert stage._run_on_work_pool(run, "first").is_failed() and pauses == [1.0, 2.0]
    assert read_state(run.stage_path("first")).failures == 3
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", "1")
    with pytest.raises(StageFailed, match=r"401$"):
        stage._run_on_work_pool(run, "first")
    assert pauses == [1.0, 2.0] and read_state(run.stage_path("first")).failures == 1, "`cosmos resume` begins anew"


def test_attempts_whose_store_is_away_pause_and_begin_anew_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, pauses, failures = counting_run(tmp_path), list[float](), list[int]()

    def refuse(_: object) -> None:
        raise UploadError("s3://models: the store responds with 503")

    monkeypatch.setattr(stage.StageSync, "receive_inputs", refuse)
    monkeypatch.setattr(stage.worker, "sleep_unless_stopping", pauses.append)
    update_state(run.stage_path("first"), state="failed", failures=3)
    for _ in range(3):
        with pytest.raises(UploadError):
            stage.run_stage(run, "first")
        failures.append(read_state(run.stage_path("first")).failures)
    assert failures == [1, 2, 3] and pauses == [1.0, 2.0]


def test_a_run_that_is_resumed_has_all_retries_for_machines_that_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lost = counting_run(tmp_path, 'first.work_pool="gpu"'), SimpleNamespace(state_type=StateType.CRASHED)
    lost.state_name, lost.state = "Crashed", None
    path, server = run.stage_path("first"), SimpleNamespace(read_flow_run=lambda _: lost)
    update_state(path, state="failed", failures=3)
    write_json(path / "pool.json", {"flow_run": str(uuid.uuid4()), "attempt": 4, "failures": 3})
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__RUN_COUNT", "1")
    monkeypatch.setattr(remote_stage, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(remote_stage, "require_second_slot", lambda *_: None)
    monkeypatch.setattr(remote_stage, "run_deployment", lambda *_, **__: SimpleNamespace(id=uuid.uuid4()))
    monkeypatch.setattr(remote_stage, "_poll_child", lambda *_: lost)
    monkeypatch.setattr(remote_stage, "sleep_unless_stopping", lambda _: pytest.fail("it does not wait"))
    with pytest.raises(StageFailed, match="its flow run Crashed"):
        stage._run_on_work_pool(run, "first")
    assert read_state(path).failures == 1
