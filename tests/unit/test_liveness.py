"""What is said of a run whose flow was killed and could not write that it was."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from cosmos_core.launch import worker
from cosmos_core.launch.clean import _may_run_be_active
from cosmos_core.launch.reap import _has_lost_launcher
from cosmos_core.observe import formatting
from cosmos_core.observe.console import print_status
from cosmos_core.observe.record import compute_time_breakdown, read_run
from cosmos_core.observe.resuming import change_to_run_folder, make_resume_command, make_resume_instructions
from cosmos_core.observe.runs import is_run_inactive
from cosmos_core.run import process
from cosmos_core.run.directory import Run, claim_run, create_run
from cosmos_core.run.liveness import (
    LEASE_SECONDS,
    PublicationApproval,
    check_approval,
    derive_flow_outcome,
    read_required_approval,
    record_flow_state,
    record_stop,
    save_approval,
)
from cosmos_core.run.process import identify_process, read_start_time
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.run.state import update_state
from tasks import flow_run
from tasks.cancellation import stop_stages
from tests.unit.run_folder import counting_run, load_recipe, make_inputs

MOMENT = time.mktime((2025, 10, 9, 20, 14, 0, 0, 0, -1))


def training(folder: Path, *, saved: int | None = 10, **state: Any) -> Run:
    """A run whose training has taken 13 steps, with the given facts in its `state.json`."""
    make_inputs(folder)
    run = create_run(load_recipe(folder))
    path = run.stage_path("prepare")
    update_state(path, state="done", ended=MOMENT - 60)
    path = run.stage_path("sft")
    path.mkdir(parents=True, exist_ok=True)
    known = {"attempt": 1, "spans": [(MOMENT - 50, None)], "heartbeat": MOMENT, "step": 13, "total": 24}
    update_state(path, **{"state": "running", "checkpoint_step": saved, **known, **state})
    return run


def gone() -> dict[str, Any]:
    """What `state.json` says of a launcher of this machine that has been killed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = read_start_time(process.pid)
    process.kill()
    process.wait()
    return identify_process() | {"launcher_pid": process.pid, "launcher_started": started}


def elsewhere(**state: Any) -> dict[str, Any]:
    """What `state.json` says of a launcher of another machine."""
    return identify_process() | {"launcher_host": "node-3", "launcher_machine": "node-3/boot/pids"} | state


def status(run: Run) -> str:
    out = io.StringIO()
    print_status(run.path, stream=out)
    return out.getvalue()


@pytest.mark.parametrize("state", ["running", pytest.param("retrying", marks=pytest.mark.full)])
def test_a_run_whose_flow_was_killed_died_and_says_how_it_goes_on(tmp_path: Path, state: str) -> None:
    run = training(tmp_path, **gone(), state=state)
    said = (
        f"died at 2025-10-09 20:14 after step 13, resume with: cosmos resume {run.path} (sft begins again at step 11)"
    )
    assert said in status(run) and "running" not in status(run)
    listed = CliRunner().invoke(app, ["runs", "--output-dir", str(run.output_dir)]).output
    assert "".join(said.split()) in "".join(listed.split()) and "running" not in listed  # a table breaks long lines
    assert is_run_inactive(read_run(run.path))


def test_the_worker_may_still_save_when_its_launcher_is_gone(tmp_path: Path) -> None:
    mine = identify_process()
    run = training(tmp_path, **gone(), pid=mine["launcher_pid"], pid_started=mine["launcher_started"])
    assert "running" in status(run) and "died" not in status(run)
    said = f"the flow has ended; sft saves a checkpoint and ends; resume with: cosmos resume {run.path} "
    assert f"{said}(sft begins again at step 11)" in status(run)


def test_a_stage_of_another_flow_run_continues_when_the_flow_that_waits_for_it_was_killed(tmp_path: Path) -> None:
    run = training(tmp_path, **identify_process())
    assert "the flow has ended" not in status(run)
    (run.path / "locks").mkdir(exist_ok=True)
    (run.path / "locks" / "holder.json").write_text(json.dumps(gone()))
    assert f"the flow has ended; sft continues with a flow run of its own; resume with: cosmos resume {run.path}" in (
        status(run)
    )


@pytest.mark.parametrize("is_declined", [False, True])
def test_a_run_that_waits_for_a_person_or_was_declined_has_not_died(tmp_path: Path, is_declined: bool) -> None:
    run = training(tmp_path, state="done")
    (run.path / "locks").mkdir(exist_ok=True)
    (run.path / "locks" / "holder.json").write_text(json.dumps(gone()))
    save_approval(run.path, PublicationApproval(until=MOMENT, is_declined=is_declined))
    if is_declined:
        assert "declined" in status(run) and "the model is not published" in status(run)
    else:
        assert "died after" in status(run), "the request has expired"
        save_approval(run.path, PublicationApproval(until=time.time() + 3600))
        assert "waiting" in status(run) and "waits for approval in the UI of Prefect until" in status(run)
    with claim_run(run):
        assert "running" in status(run) and "person" not in status(run)


def test_an_approval_that_a_publication_needs_outlives_the_commands_that_claim_the_run(tmp_path: Path) -> None:
    run = training(tmp_path, state="done")
    check_approval(run.path)
    with claim_run(run):
        save_approval(run.path, PublicationApproval(until=time.time() + 3600, flow_run="id"))
    with claim_run(run), pytest.raises(ConfigError, match="publishes only what a person has approved"):
        check_approval(run.path)
    save_approval(run.path, PublicationApproval(approved_models="digest"))
    claim_run(run).release()
    check_approval(run.path)
    save_approval(run.path, None)
    assert read_required_approval(run.path) is None


def test_what_the_worker_said_last_counts(tmp_path: Path) -> None:
    run = training(tmp_path, **gone(), saved=None)
    progress = ProgressWriter(run.stage_path("sft") / "progress.json")
    progress.step(14, 24)
    progress.phase("save")
    assert "after step 14" in status(run) and "(sft begins again at step 1: nothing was saved)" in status(run)
    progress.report_checkpoint(14)
    assert "(sft begins again at step 15)" in status(run)


@pytest.mark.parametrize("state", [{"renewed": 1.0}, {"renewed": None}, identify_process()])
def test_a_stage_that_is_renewed_or_of_which_nothing_is_known_runs(tmp_path: Path, state: dict[str, Any]) -> None:
    renewed = {"renewed": time.time()} if state.get("renewed") else {}
    assert "running" in status(training(tmp_path, **(elsewhere() | state | renewed)))


def test_on_another_machine_a_lease_that_lapsed_says_that_it_died(tmp_path: Path) -> None:
    run = training(tmp_path, **elsewhere(renewed=time.time() - LEASE_SECONDS - 5, heartbeat=MOMENT))
    assert "✗ died" in status(run) and " on node-3 after step 13, resume with: cosmos resume " in status(run)
    update_state(run.stage_path("sft"), spans=[(MOMENT, MOMENT + 1)])  # its worker has ended, and its launcher sends
    assert "running" in status(run)
    update_state(run.stage_path("sft"), attempt=2, spans=[(MOMENT, MOMENT + 1), (MOMENT + 2, None)])
    assert "✗ died" in status(run)


def test_a_run_that_was_killed_before_its_first_stage_or_between_two_died(tmp_path: Path) -> None:
    program = "import sys; from cosmos_core.run.directory import *; from tasks.kinds import all_kinds; "
    program += "from pathlib import Path; lock = claim_run(open_run(Path(sys.argv[1]), all_kinds())); print(); input()"
    run = counting_run(tmp_path)
    assert read_run(run.path).outcome == "running"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(run.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as flow:
        assert flow.stdout is not None and flow.stdout.readline()
        holder = json.loads((file := run.path / "locks" / "holder.json").read_text())
        file.write_text(json.dumps(holder | {"since": holder["since"] - 600}))  # the command began before the run
        assert read_run(run.path).outcome == "running"
        flow.kill()
    began = formatting.format_time(read_run(run.path).start_info.started)
    assert f"died after {began}, resume with: cosmos resume {run.path}" in status(run)
    assert compute_time_breakdown(read_run(run.path))["wall"] == 0.0, "its time does not grow after its death"
    update_state(run.stage_path("first"), state="done", ended=MOMENT)
    assert "died after 2025-10-09 20:14, resume with: " in status(run)
    with claim_run(run):
        assert read_run(run.path).outcome == "running"
        with (
            worker.register_active_run(),
            ThreadPoolExecutor(1) as thread,
        ):  # outside of the main thread, whose signals it sets
            thread.submit(stop_stages, run, []).result()
        with worker.register_active_run():
            assert not worker.is_stopping(), "the next test begins without the request"
    assert read_run(run.path).outcome == "stopped" and is_run_inactive(read_run(run.path))
    claim_run(run).release()
    assert read_run(run.path).outcome == "running", "the next command for the run"


def test_a_flow_that_was_killed_in_its_own_code_died_and_one_that_lives_is_kept(
    tmp_path: Path,
) -> None:
    run = counting_run(tmp_path)
    for stage in run.pipeline.stages:
        update_state(run.stage_path(stage.name), state="done", ended=MOMENT)
    claim_run(run).release()
    assert read_run(run.path).outcome == "done", "the run of a TOML file ends with its last stage"
    record_flow_state(run.path, "running")
    assert (read_run(run.path).outcome, is_run_inactive(read_run(run.path))) == ("running", False)
    assert not _has_lost_launcher(run.path) and _may_run_be_active(run.path)
    file = run.path / "locks" / "holder.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | gone()))
    record_flow_state(run.path, "completed")  # the end of an execution that another one has replaced
    assert "died after 2025-10-09 20:14, resume with: " in status(run) and is_run_inactive(read_run(run.path))
    assert _has_lost_launcher(run.path) and not _may_run_be_active(run.path)
    claim_run(run).release()
    record_stop(run.path, [stage.name for stage in run.pipeline.stages])
    assert read_run(run.path).outcome == "done", "a command for a TOML file that was stopped after its last stage"
    record_flow_state(run.path, "stopped")
    assert read_run(run.path).outcome == "stopped", "a flow in Python that was stopped in its own code"


def test_a_flow_whose_machine_was_restarted_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another container, or of another machine, may be alive."""
    run = counting_run(tmp_path)
    claim_run(run).release()
    record_flow_state(run.path, "running")
    holder = json.loads((file := run.path / "locks" / "holder.json").read_text())
    host, boot, namespace = holder["launcher_machine"].split("/")
    for machine, machine_id, is_dead in (
        (f"{host}/{boot}/{namespace}", "here", False), (f"{host}/before/{namespace}", "here", True),
        (f"{host}/before/pid:[1]", "here", False), (f"node-3/before/{namespace}", "here", False),
        (f"{host}/before/{namespace}", "another of this name", False), (f"{host}/before/{namespace}", "", False),
    ):  # fmt: skip
        monkeypatch.setattr(process, "_read_machine_id", lambda machine_id=machine_id: machine_id and "here")
        file.write_text(json.dumps(holder | {"launcher_machine": machine, "launcher_machine_id": machine_id}))
        assert read_run(run.path).outcome == ("died" if is_dead else "running")
        assert _may_run_be_active(run.path) is not is_dead


def test_a_flow_in_python_that_has_completed_is_done_whatever_stage_has_failed_before(tmp_path: Path) -> None:
    """The stage may be one that the flow does not call any more, or a gate whose refusal the flow has caught."""
    run = counting_run(tmp_path)
    update_state(run.stage_path("first"), state="failed", ended=MOMENT)
    claim_run(run).release()
    for state, outcome in (("", "failed"), ("failed", "failed"), ("completed", "done")):
        record_flow_state(run.path, state)
        assert read_run(run.path).outcome == outcome
    update_state(run.stage_path("second"), state="running", **identify_process())
    assert read_run(run.path).outcome == "failed", "somebody runs a stage of it again"


def test_the_last_line_of_a_stopped_run_says_where_each_training_begins_again(tmp_path: Path) -> None:
    run = training(tmp_path, state="stopped", saved=None)
    assert make_resume_instructions(read_run(run.path)).endswith(" (sft begins again at step 1: nothing was saved)")
    update_state(run.stage_path("sft"), checkpoint_step=13)
    assert make_resume_instructions(read_run(run.path)) == f"cosmos resume {run.path} (sft begins again at step 14)"
    update_state(run.stage_path("sft"), total=13)
    (run.stage_path("sft") / "progress.json").unlink(missing_ok=True)
    assert make_resume_instructions(read_run(run.path)) == f"cosmos resume {run.path} (sft has saved its last step)"


def test_a_command_to_copy_names_the_run_from_the_folder_of_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = counting_run(tmp_path)
    assert make_resume_command(run.path) == f"cosmos resume outputs/{run.id}"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert change_to_run_folder(run.path) and Path.cwd() == tmp_path
    assert make_resume_command(run.path) == f"cosmos resume {run.path}"


def test_a_flow_in_python_that_was_asked_to_stop_between_two_stages_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_inputs(tmp_path)
    run = create_run(load_recipe(tmp_path))
    with claim_run(run):
        record_flow_state(run.path, "running")
    flow = flow_run.PythonFlowState("f", "id", "run", "f.py:f", {}, [], run=run)
    monkeypatch.setattr(flow_run, "_flows_by_attempt", {"id-1": flow})
    assert derive_flow_outcome(run.path) == "running"
    flow_run._record_flow_stops()
    assert derive_flow_outcome(run.path) == "stopped"
