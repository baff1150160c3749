"""Futures of stages that a flow in Python submits: cancelled with the flow, and reported if nothing waited for them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_flow_run
from prefect.settings import get_current_settings
from prefect.states import Cancelling

from cosmos_core.launch import worker
from cosmos_core.observe.record import read_run
from cosmos_core.observe.runs import is_run_inactive
from cosmos_core.run.files import write_json
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.state import read_state
from tasks import custom, flow_run
from tasks.flow_run import PythonFlowState, StageCall, describe_unfinished_stage
from tests.attempts import workers
from tests.conftest import PROGRAMS, wait_until
from tests.flows.test_flows_in_python import GROW, folder, grown, starts
from tests.flows.test_retrain import events_of

__all__ = ["folder", "workers"]


@pytest.mark.usefixtures("workers")
def test_a_cancelled_flow_stops_the_stage_for_whose_future_it_waits(folder: Path) -> None:
    @flow
    def patient(run_id: str = "patient") -> None:
        future = custom.submit(f"{PROGRAMS}/counting.py:count", name="count", arguments={"steps": 9000, "seconds": 0.1})
        path = folder / "outputs" / "patient" / "stages" / "count"
        wait_until(lambda: read_metrics(path / "metrics.jsonl"), 60, "a step")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(current_flow_run.id), Cancelling(), force=True)
        future.result()

    with pytest.raises(Exception, match="saved at step"):
        patient()
    assert read_state(folder / "outputs" / "patient" / "stages" / "count").state == "stopped"


LEAVER = f"""
import sys
from prefect import flow
from tasks import custom

@flow
def leaver(run_id="leaver"):
    custom("{PROGRAMS}/counting.py:count", name="count", arguments={{"steps": 1, "seconds": 0.01}})
    sys.exit(3)

leaver()
"""


def test_a_flow_whose_process_ends_before_its_end_has_stopped_and_not_died(folder: Path) -> None:
    """Prefect calls no hook of a flow that exits or is suspended."""
    (folder / "leaver.py").write_text(LEAVER)
    environment = os.environ | {"PREFECT_API_URL": str(get_current_settings().api.url)}
    program = f"import runpy, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})  # as cosmos_core does\n"
    command = [sys.executable, "-c", f"{program}runpy.run_path('leaver.py', run_name='__main__')"]
    assert subprocess.run(command, cwd=folder, env=environment).returncode == 3
    assert read_run(folder / "outputs" / "leaver").outcome == "stopped"


def test_a_stage_that_nothing_waited_for_is_reported(folder: Path) -> None:
    @flow
    def hasty(run_id: str = "hasty") -> None:
        custom.submit(GROW, arguments={"refuse": True})

    hasty()
    assert describe_unfinished_stage().startswith("stage 'custom' is not done, and the flow did not wait for it")
    assert read_run(folder / "outputs" / "hasty").outcome == "failed"


def test_two_executions_of_a_flow_both_end_and_share_its_stages(folder: Path) -> None:
    """A flow run that has lost contact with its server goes on beside its replacement."""
    began = threading.Event()
    second = folder / "outputs" / "both" / "stages" / "second"

    @flow
    def both(is_first: bool, run_id: str = "both") -> float:
        if not is_first:
            began.wait(60)
        first = grown("first")
        if is_first:
            began.set()
            wait_until(lambda: read_state(second).state == "running", 60, "the other execution")
        custom(f"{PROGRAMS}/counting.py:count", name="second", arguments={"steps": 12, "seconds": 0.05})
        return grown("third", model=first).metrics["size"]

    with ThreadPoolExecutor(2) as pool:
        executions = [pool.submit(copy_context().run, both, is_first) for is_first in (True, False)]
        assert [execution.result() for execution in executions] == [2.0, 2.0]
    assert starts(folder) == ["first", "second", "third"]


def test_two_first_executions_of_a_flow_at_once_make_one_run(folder: Path) -> None:
    begin = threading.Barrier(2)

    @flow
    def first(number: int, run_id: str = "one") -> float:
        begin.wait(60)
        return grown("model").metrics["size"]

    with ThreadPoolExecutor(2) as pool:
        executions = [pool.submit(copy_context().run, first, number, return_state=True) for number in range(2)]
        states = [execution.result() for execution in executions]
    assert [path.parent.name for path in folder.glob("outputs/*/run.json")] == ["one"]
    assert any(state.is_completed() for state in states)
    refusals = [str(state.message) for state in states if not state.is_completed()]
    assert all("another process" in message or "run_id = 'one' is taken" in message for message in refusals)


def test_the_end_of_a_flow_is_an_event_and_one_that_completes_without_the_stage_that_failed_is_done(
    folder: Path,
) -> None:
    @flow
    def mended(name: str, refuse: bool, run_id: str = "mended") -> None:
        custom(GROW, name=name, retries=0, arguments={"refuse": True} if refuse else {})

    for name, refuse, outcome in (("model", True, "failed"), ("other", False, "done")):
        mended(name, refuse, return_state=True)
        assert read_run(folder / "outputs" / "mended").outcome == outcome
    wait_until(lambda: len(events_of("mended")) == 4, 30, "the server has all events")
    assert [event["event"] for event in events_of("mended")] == [
        "cosmos.stage.failed", "cosmos.run.failed", "cosmos.stage.completed", "cosmos.run.completed",
    ]  # fmt: skip


@pytest.mark.parametrize("num_writes", [pytest.param(0, marks=pytest.mark.full), 1])
@pytest.mark.parametrize("by", [1, 2])
def test_a_kill_while_a_call_is_changed_leaves_no_stage_with_the_settings_of_another_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch, num_writes: int, by: int
) -> None:
    """The changed call of a stage removes the stages after it from the run, and their calls."""

    def execute(by: int) -> None:
        state = PythonFlowState("f", "id", "killed", f"{folder}/f.py:f", {}, [])
        for name, after in (("first", []), ("second", ["first"])):
            stage = {"name": name, "kind": "custom", "entry": GROW, "after": after, "arguments": {"by": by}}
            with state.add_stage(StageCall(stage=stage, tables={}), folder / "f.py") as (run, _):
                assert run.pipeline.stage(name).arguments == {"by": by}

    def kill_later(path: Path, content: Any, writes: list[Path] = []) -> None:  # noqa: B006 - shared by all calls
        writes.append(path)
        if len(writes) > num_writes:
            raise KeyboardInterrupt
        write_json(path, content)

    monkeypatch.setattr(flow_run, "publish_run_report", lambda path: None)
    execute(1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(flow_run, "write_json", kill_later)
        execute(2)
    execute(by)


def test_a_flow_is_running_until_its_own_code_has_ended(folder: Path) -> None:
    seen: list[object] = []

    @flow
    def thoughtful(fails: bool, run_id: str = "thoughtful") -> None:
        grown("model")
        run = read_run(folder / "outputs" / run_id)
        seen.extend([run.outcome, is_run_inactive(run)])
        if fails:
            raise ValueError("own code")

    for fails, outcome in ((True, "failed"), (False, "done")):
        thoughtful(fails, return_state=True)
        run = read_run(folder / "outputs" / "thoughtful")
        assert (run.outcome, is_run_inactive(run)) == (outcome, True)
        assert f">{outcome}" in (run.path / "report.html").read_text()
    assert seen == ["running", False] * 2


def test_a_stop_before_a_submitted_stage_begins_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun, stopped = PythonFlowState.add_stage, threading.Event(), threading.Event()

    def wait_for_the_stop(*arguments: Any) -> Any:
        begun.set()
        assert stopped.wait(30)
        return begin(*arguments)

    monkeypatch.setattr(PythonFlowState, "add_stage", wait_for_the_stop)

    @flow
    def stopping(run_id: str = "stopping") -> None:
        future = custom.submit(GROW, retries=0)
        wait_until(begun.is_set, 30, "the task of the stage runs")
        worker.stop_all()
        stopped.set()
        future.wait()
        assert future.state.is_failed()

    stopping()
    assert not starts(folder)
