"""What a Prefect server is given and shows: the automation, states of flow and task runs, tags, cards, leases, reports
of workers; and what a flow does when its server says that it was cancelled."""

from __future__ import annotations

import ast
import json
import logging
import math
import os
import socket
import subprocess
import threading
from collections.abc import Collection
from concurrent import futures
from contextvars import copy_context
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import prefect
import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate, WorkPoolCreate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterName,
    TaskRunFilter,
    TaskRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.flow_runs import resume_flow_run
from prefect.states import Cancelling, Pending, Running, Suspended

from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.errors import Cancelled
from cosmos_core.launch.bootstrap import CRASH_AUTOMATION_NAME, FLOW_STATE_NAMES, bootstrap_server
from cosmos_core.launch.worker_report import (
    WORKING_DIRECTORY_STEP,
    end_lost_flow_runs,
    get_max_pending_seconds,
    read_recent_reports,
    report_machine,
)
from cosmos_core.observe import gallery
from cosmos_core.run.directory import Run
from cosmos_core.run.state import read_state
from flows.post_train import open_run_to_execute, post_train
from flows.stage import stage
from tasks.artifacts import StageArtifacts
from tasks.final_states import REFUSED_STATE, make_failed_state
from tasks.naming import get_user_name
from tasks.retrain_lease import RetrainLease
from tests.conftest import PROGRAMS, wait_until
from tests.flows.test_retrain import PIPELINE
from tests.unit.observed_runs import write_lines

pytestmark = pytest.mark.usefixtures("harness")
ROOT = Path(__file__).parents[2]


def automations() -> list[dict[str, Any]]:
    with get_client(sync_client=True) as client:
        found = client.request("POST", "/automations/filter", json={}).json()
    return [each for each in found if each["name"] == CRASH_AUTOMATION_NAME]


def test_bootstrap_updates_the_automation_of_an_older_version_and_keeps_whether_it_is_enabled() -> None:
    first, *_ = bootstrap_server([])
    assert first in {f"automation {CRASH_AUTOMATION_NAME!r}: {state}" for state in ("made", "there")}
    assert f"automation {CRASH_AUTOMATION_NAME!r}: there" in list(bootstrap_server([]))
    [made] = automations()
    older = {key: made[key] for key in ("name", "description", "trigger", "actions")} | {"enabled": False}
    older["trigger"]["expect"] = ["prefect.flow-run.heartbeat", "prefect.flow-run.Completed"]
    with get_client(sync_client=True) as client:
        client.request("PUT", "/automations/{id}", path_params={"id": made["id"]}, json=older)
    assert f"automation {CRASH_AUTOMATION_NAME!r}: changed" in list(bootstrap_server([]))
    assert f"automation {CRASH_AUTOMATION_NAME!r}: there" in list(bootstrap_server([]))
    [changed] = automations()
    assert changed["trigger"]["expect"].sort() == made["trigger"]["expect"].sort() and not changed["enabled"]


def test_a_flow_run_that_has_no_process_is_not_taken_for_a_dead_one() -> None:
    list(bootstrap_server([]))
    [found] = automations()
    from prefect.server.events.schemas.automations import EventTrigger

    trigger = EventTrigger.model_validate(found["trigger"])
    quiet = (
        "Suspended",
        "Paused",
        "Resuming",
        "Scheduled",
        "AwaitingRetry",
        "Completed",
        "TimedOut",
        *FLOW_STATE_NAMES,
    )
    assert [name for name in quiet if not trigger.expects(f"prefect.flow-run.{name}")] == []
    assert not trigger.expects("prefect.flow-run.Running") and trigger.starts_after("prefect.flow-run.heartbeat")
    others = "any other flow run sends its heartbeats every 180 s, and is not dead after 90"
    assert found["trigger"]["match_related"] == {"prefect.resource.id": "prefect.tag.cosmos"}, others
    trees = [ast.parse(file.read_text()) for file in (ROOT / "flows").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    endings = [call for call in calls if getattr(call.func, "id", "") in {"Completed", "Failed"}]
    names = [word.value for call in endings for word in call.keywords if word.arg == "name"]
    assert {name.value for name in names if isinstance(name, ast.Constant)} | {REFUSED_STATE} == set(FLOW_STATE_NAMES)


GATED = PIPELINE.replace(
    'require = ["validation/accuracy > published"]\nconfidence = 0.9',
    'require = ["validation/accuracy >= 0.6", "validation/prompts >= 1"]',
).replace("[[pipeline.stages]]", "grace_seconds = 10\n\n[[pipeline.stages]]", 1)
REPORTED = f"""{GATED}
[[pipeline.stages]]
name = "report"
kind = "report"
after = "publish"
"""
ONE_STAGE = GATED.partition('[[pipeline.stages]]\nname = "gate"')[0]
COUNTING = (
    f'entry = "{PROGRAMS}/learning.py:learn"',
    f'entry = "{PROGRAMS}/released.py:count"\narguments = {{ release = "FOLDER/go" }}',
)
"""Replacement by which the first stage counts until the file `go` exists."""


def run(folder: Path, text: str, run_id: str, rows: str = "") -> tuple[State[Any], FlowRun]:
    """Run a pipeline; its final state and the flow run."""
    (folder / "p.toml").write_text(text.replace("FOLDER", str(folder)))
    (folder / "rows.jsonl").write_text(rows)
    state = post_train(str(folder / "p.toml"), [], run_id, return_state=True)
    with get_client(sync_client=True) as client:
        return state, client.read_flow_run(state.state_details.flow_run_id)  # type: ignore[arg-type]


def task_runs(flow_run: FlowRun) -> dict[str, tuple[str, str, bool]]:
    """Name, message and whether it has ended, of the state of each task run; the server hears of them from a queue."""

    def found() -> dict[str, tuple[str, str, bool]]:
        with get_client(sync_client=True) as client:
            this = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
            states = {each.name: each.state for each in client.read_task_runs(flow_run_filter=this)}
        assert all(states.values())
        return {name: (str(s.name), str(s.message), s.is_final()) for name, s in states.items() if s}

    wait_until(lambda: all(is_final for _, _, is_final in found().values()), 5, lambda: f"all have ended: {found()}")
    return found()


def artifacts_of(flow_run: UUID | None) -> dict[str, dict[str, Any]]:
    with get_client(sync_client=True) as client:
        wanted = {"artifacts": {"flow_run_id": {"any_": [str(flow_run)]}}}
        found = client.request("POST", "/artifacts/filter", json=wanted).json()
    return {each["key"]: each for each in sorted(found, key=lambda each: each["created"])}


def test_why_a_gate_refused_is_said_by_the_flow_run_and_what_it_stopped_is_named_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = [logging.getLogger(name) for name in ("prefect.flow_runs", "prefect.task_runs")]
    for logger in loggers:
        logger.addHandler(caplog.handler)
    state, flow_run = run(tmp_path, REPORTED, "Refused_1", '{"accuracy": 0.4}\n')
    for logger in loggers:
        logger.removeHandler(caplog.handler)
    why = "validation/accuracy >= 0.6 does not hold: validation/accuracy = 0.4, bound 0.6"
    assert (state.name, state.message) == ("Refused", f"run Refused_1: gate 'gate': {why}")
    assert (flow_run.state_name, flow_run.state and flow_run.state.message) == (state.name, state.message)
    tags = {"cosmos-pipeline:nightly", "cosmos-run:Refused_1", f"cosmos-user:{get_user_name()}"}
    assert tags <= set(flow_run.tags) and flow_run.name == "nightly Refused_1"
    found = task_runs(flow_run)
    with get_client(sync_client=True) as client:
        tagged = TaskRunFilter(tags=TaskRunFilterTags(all_=sorted(tags)))
        assert {each.name for each in client.read_task_runs(task_run_filter=tagged)} == set(found)
    assert {name: said[0] for name, said in found.items()} == {
        "learn": "Completed", "gate": "Refused", "publish": "Skipped", "report": "Skipped",
    }  # fmt: skip
    assert found["gate"][1] == f"gate 'gate': {why}"
    assert (found["publish"][1], found["report"][1]) == ("it starts from gate", "it starts from publish")
    assert "gate 'gate'" in caplog.text and "Traceback" not in caplog.text
    shown = {key: str(each["data"]) for key, each in artifacts_of(flow_run.id).items()}
    assert "| validation/accuracy >= 0.6 | 0.4 | 0.6 | **no** |" in shown["nightly-gate-card"]
    assert "| validation/prompts >= 1 | 100 | 1 | yes |" in shown["nightly-gate-card"]
    assert "| 0.4 | 0.6 | **no** |" in shown["nightly-run"] and "model.safetensors" not in shown["nightly-run"]
    assert "python" not in shown["nightly-run"], "a refused model is not offered"


def test_a_stage_on_a_pool_needs_no_second_slot_of_a_tag_whose_slot_its_pipeline_holds(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(ONE_STAGE.replace("FOLDER", str(tmp_path)))
    (tmp_path / "rows.jsonl").write_text("")
    path, states = open_run_to_execute(str(tmp_path / "p.toml"), [], "Pool_1").path, []

    @flow
    def parent() -> None:
        states.append(stage(str(path), "learn", return_state=True))

    parent()
    states.append(stage(str(path), "learn", return_state=True))
    for state, tags in zip(states, (set(), {"cosmos-run:Pool_1", "cosmos-pipeline:nightly"}), strict=True):
        with get_client(sync_client=True) as client:
            flow_run = client.read_flow_run(state.state_details.flow_run_id)
            assert set(task_runs(flow_run)) == {"learn"} and "cosmos-run:Pool_1" in flow_run.tags
            this = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
            [task_run] = client.read_task_runs(flow_run_filter=this)
        assert {tag for tag in task_run.tags if not tag.startswith("cosmos-user")} == tags


@pytest.mark.parametrize("private", [False, True])
def test_samples_are_artifacts_unless_the_run_is_private(tmp_path: Path, private: bool) -> None:
    stage = tmp_path / "run-7" / "stages" / "grpo"
    gallery.save_step_samples(stage, 3, [[gallery.GeneratedSample("a cat", np.zeros((8, 8, 3), np.uint8), 0.5)]])
    write_lines(stage / "samples.jsonl", [
        {"step": 2, "prompt": "old", "completion": "older", "reward": 0.0},
        {"step": 3, "prompt": "1 + 1", "completion": "2" * 5000, "reward": 1.0},
        {"step": 3, "prompt": "a cat", "media": ["visual_output/step_3/0-0.png"], "rewards": [0.5]},
    ])  # fmt: skip
    result: Any = {"name": "grpo", "kind": "rl", "metrics": {}, "outputs": [], "info": {}, "fingerprint": "f" * 64}

    @flow
    def show() -> None:
        config = PipelineConfig(name=f"private-{private}".lower(), private=private)
        StageArtifacts(config, stage).finish(result)

    shown = artifacts_of(show(return_state=True).state_details.flow_run_id)
    keys = {key.removeprefix(f"private-{private}-grpo-".lower()): each for key, each in shown.items()}
    assert set(keys) == {"progress", "card"} | (set() if private else {"samples", "drawings"})
    assert all(f"run run-7 of {get_user_name()}" in each["description"] for each in keys.values())
    if not private:
        [row] = json.loads(keys["samples"]["data"])
        assert (row["step"], row["prompt"], row["reward"]) == (3, "1 + 1", 1.0) and len(row["completion"]) == 1001
        assert keys["drawings"]["data"].startswith("data:image/png;base64,")


def test_the_table_of_a_long_training_is_json_and_its_curves_fill_no_memory(tmp_path: Path) -> None:
    stage = tmp_path / "run-8" / "stages" / "sft"
    lines = [{"step": step, "time": 1.0, "loss": 1 / step} for step in range(1, 25_001)]
    write_lines(stage / "metrics.jsonl", [*lines, {"step": 25_001, "time": 1.0, "loss": math.inf}])
    result: Any = {"name": "sft", "kind": "sft", "metrics": {}, "outputs": [], "info": {}, "fingerprint": "f" * 64}
    shown_artifacts = StageArtifacts(PipelineConfig(name="long"), stage)

    @flow
    def show() -> None:
        shown_artifacts.finish(result)

    shown = artifacts_of(show(return_state=True).state_details.flow_run_id)
    rows = json.loads(shown["long-sft-metrics"]["data"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert rows[-1] == {"step": 25_001, "loss": "inf"} and [row["step"] for row in rows] == [*range(24_982, 25_002)]
    kept = [line["step"] for line in shown_artifacts._metrics_reader.lines]
    assert len(kept) <= 10_000 and kept == sorted(kept) and kept[0] < 20


def test_a_flow_run_that_is_cancelled_and_not_told_so_saves_and_ends_and_publishes_nothing(tmp_path: Path) -> None:
    stage = tmp_path / "outputs" / "Cancelled_1" / "stages" / "learn"

    def cancel() -> None:
        wait_until(lambda: (read_state(stage).step or 0) >= 3, 60, "step 3")  # an end before it fails the test
        with get_client(sync_client=True) as client:
            wanted = FlowRunFilter(name=FlowRunFilterName(any_=["nightly Cancelled_1"]))
            [found] = client.read_flow_runs(flow_run_filter=wanted)
            client.set_flow_run_state(found.id, Cancelling())

    canceller = threading.Thread(target=copy_context().run, args=[cancel], daemon=True)  # with the server of `harness`
    canceller.start()
    state, flow_run = run(tmp_path, REPORTED.replace(*COUNTING), "Cancelled_1")
    assert state.is_cancelled() and flow_run.state_type == "CANCELLED"
    assert "it goes on with: cosmos resume" in str(state.message)
    assert {name: said[0] for name, said in task_runs(flow_run).items()} == {
        "learn": "Stopped", "gate": "Skipped", "publish": "Skipped", "report": "Skipped",
    }  # fmt: skip
    stopped = read_state(stage)
    assert (stopped.state, stopped.failures) == ("stopped", 0) and (stopped.checkpoint_step or 0) >= 3
    assert not (tmp_path / "published").exists()


@pytest.mark.parametrize("is_done", [False, True])
def test_a_cancelled_flow_run_ends_as_cancelled_though_a_stage_noticed_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    def wait_for_stages(pending: Collection[futures.Future[Any]]) -> bool:
        futures.wait(pending)
        return False

    def cancel_and_end(run: Run, name: str, **_: Any) -> Any:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(prefect.runtime.flow_run.id), Cancelling())
        return {} if is_done else make_failed_state(Cancelled("its flow run was cancelled"))

    monkeypatch.setattr("tasks.stage.wait_unless_cancelled", wait_for_stages)
    monkeypatch.setattr("tasks.stage.produce_result", cancel_and_end)
    state, flow_run = run(tmp_path, ONE_STAGE, "Cancelled_2")
    assert (state.type, flow_run.state_type) == ("CANCELLED", "CANCELLED")


def test_a_flow_run_that_is_paused_in_the_ui_saves_and_ends_until_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(ONE_STAGE.replace(*COUNTING).replace("FOLDER", str(tmp_path)))
    (tmp_path / "rows.jsonl").write_text("")
    stage = tmp_path / "outputs" / "Paused_1" / "stages" / "learn"
    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(post_train), tmp_path.name)
        parameters = {"config": str(tmp_path / "p.toml"), "run_id": "Paused_1"}
        flow_run = client.create_flow_run_from_deployment(deployment, parameters=parameters)

        def pause() -> None:
            wait_until(lambda: (read_state(stage).step or 0) >= 3, 60, "step 3")
            with get_client(sync_client=True) as other:
                other.set_flow_run_state(flow_run.id, Suspended(timeout_seconds=300), force=True)

        threading.Thread(target=copy_context().run, args=[pause], daemon=True).start()
        with pytest.raises(Pause):
            run_flow(post_train, flow_run)
        stopped = read_state(stage)
        assert (stopped.state, stopped.failures) == ("stopped", 0) and (stopped.checkpoint_step or 0) >= 3
        assert client.read_flow_run(flow_run.id).state_name == "Suspended"
        (tmp_path / "go").touch()
        resume_flow_run(flow_run.id)
        run_flow(post_train, client.read_flow_run(flow_run.id), return_type="state")
        assert client.read_flow_run(flow_run.id).state_name == "Completed"
    assert (read_state(stage).state, read_state(stage).attempt) == ("done", 2)


def test_a_worker_reports_its_machine_to_the_server(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "search.py").touch()
    pools = (("reported", "process", {"clone": "flows/a", "own": "search"}), ("images", "docker", {"x": "flows/a"}))
    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(post_train)
        for pool, type_, folders in pools:
            client.create_work_pool(WorkPoolCreate(name=pool, type=type_))
            for name, file in folders.items():
                step, code = {WORKING_DIRECTORY_STEP: {"directory": str(tmp_path / name)}}, f"{file}.py:f"
                client.create_deployment(flow_id, name, work_pool_name=pool, pull_steps=[step], entrypoint=code)
        for missing in ([str(tmp_path / "clone")], []):
            report_machine(client, "reported")
            report_machine(client, "images")
            found = {each["pool"]: (each, seconds) for each, seconds in read_recent_reports(client)}
            worker, seconds = found["reported"]
            assert (worker["missing_folders"], found["images"][0]["missing_folders"]) == (missing, [])
            assert abs(seconds) < 60 and worker["free_bytes"] > 0 and worker["prefect"] == prefect.__version__
            (tmp_path / "clone" / "flows").mkdir(parents=True, exist_ok=True)
            (tmp_path / "clone" / "flows" / "a.py").touch()


def test_a_flow_run_whose_process_died_while_it_started_or_was_cancelled_gets_its_final_state() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    here = {socket.gethostname()}
    limits = [get_max_pending_seconds(pid, here) for pid in ("", str(dead.pid), str(os.getpid()))]
    assert limits == [60, 10, math.inf]
    assert get_max_pending_seconds(str(dead.pid), here | {"other"}) == 600, "it may be a process of the other"
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="lost", type="process"))
        deployment = client.create_deployment(client.create_flow(post_train), "lost", work_pool_name="lost")
        ids = [client.create_flow_run_from_deployment(deployment, state=Pending()).id for _ in range(2)]
        client.set_flow_run_state(ids[1], Cancelling())
        seen_since: dict[UUID, float] = {UUID(int=1): 0.0}
        end_lost_flow_runs(client, "lost", seen_since)
        states = [client.read_flow_run(each).state_type for each in ids]
        assert set(seen_since) == {*ids} and states == [StateType.PENDING, StateType.CANCELLING]
        for each in ids:
            seen_since[each] -= 120
        end_lost_flow_runs(client, "lost", seen_since)
        states = [client.read_flow_run(each).state_type for each in ids]
        assert states == [StateType.CRASHED, StateType.CANCELLED]


def test_a_flow_run_that_is_tried_again_on_another_machine_has_its_own_lease(tmp_path: Path) -> None:
    with get_client(sync_client=True) as client:
        flow_run = str(client.create_flow_run(post_train, parameters={"config": ""}, state=Running()).id)
        held = {"flow_run": flow_run, "machine": "node-3/boot/pids"}
        client.create_variable(VariableCreate(name="cosmos-retraining-0a1b", value=held))
        with RetrainLease(tmp_path / "0a1b.json", flow_run) as firing:
            assert firing.try_acquire()
        assert client.read_variable_by_name("cosmos-retraining-0a1b") is None


@pytest.mark.parametrize("is_same_folder", [False, True])
def test_two_workers_on_one_machine_respect_each_other_whatever_folders_they_have(
    tmp_path: Path, is_same_folder: bool
) -> None:
    """Of one folder the lock is free, so the earlier firing was killed; in another folder it may still work."""
    with get_client(sync_client=True) as client:
        ids = [str(client.create_flow_run(post_train, parameters={"config": ""}, state=Running()).id) for _ in range(2)]
    folders = [tmp_path / "a", tmp_path / ("a" if is_same_folder else "b")]
    first = RetrainLease(folders[0] / "0a1c.json", ids[0], "both")
    assert first.try_acquire()
    first._lock.release()  # as the kernel does for a process that was killed
    with RetrainLease(folders[1] / "0a1c.json", ids[1], "both") as second:
        assert second.try_acquire() is is_same_folder
    first.__exit__()
