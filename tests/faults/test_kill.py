"""`kill -9` of everything there is to kill, on a pipeline of trivial stages with real workers, server and flow."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess

import pytest

from cosmos_core.run.manifest import read_result
from cosmos_core.run.state import read_state
from tests.conftest import Workspace, processes_below, wait_until
from tests.faults.test_worker import working_in

PIPELINE = """
[pipeline]
name = "toy"
grace_seconds = 5

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { steps = 5 }

[[pipeline.stages]]
name = "left"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = { steps = 60 }

[[pipeline.stages]]
name = "right"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = { steps = 61 }
"""


def pids(workspace: Workspace, text: str) -> list[int]:
    return [pid for pid, command in processes_below(workspace.path).items() if text in command]


def targets(workspace: Workspace, flow: subprocess.Popen[str], what: str) -> list[int]:
    """Processes to kill by name."""
    supervisors = pids(workspace, "launch.supervisor")
    found = {
        "flow": [flow.pid],
        "worker": [pid for pid in pids(workspace, "cosmos_core.worker") if pid not in supervisors],
        "supervisor": [pid for pid in supervisors if pid in pids(workspace, "cosmos_core.worker")],
        "server": [pid for pid in pids(workspace, "prefect server start") if pid not in supervisors],
    }
    assert all(found.values()), found
    return [pid for group in found.values() for pid in group] if what == "all" else found[what]


def chain(seed: int, steps: int) -> str:
    text = str(seed)
    for _ in range(steps):
        text = hashlib.sha256(text.encode()).hexdigest()
    return text


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("flow", marks=pytest.mark.full),
        pytest.param("worker", marks=pytest.mark.full),
        pytest.param("supervisor", marks=pytest.mark.full),
        pytest.param("server", marks=pytest.mark.full),
        "all",
    ],
)
def test_after_a_kill_nothing_is_left_running_and_resume_ends_with_the_uninterrupted_result(
    own_server: None, workspace: Workspace, what: str
) -> None:
    stray = "steps = 60, stray = true" if what == "supervisor" else "steps = 60"
    workspace.write("toy.toml", PIPELINE.replace("steps = 60", stray))
    flow = workspace.start("run", "toy.toml")
    wait_until(lambda: workspace.is_past("left", 8) and workspace.is_past("right", 8), 90, "both branches at step 8")
    for pid in targets(workspace, flow, what):
        os.kill(pid, signal.SIGKILL)
    code = flow.wait()
    workspace.expect_quiet(15)
    assert not working_in(workspace.stage("left")), "what fell to the command when the supervisor was gone"
    if what in {"worker", "supervisor", "server"}:
        assert code == 0, "the flow retries a dead worker and restarts a dead server"
    else:
        assert code == -signal.SIGKILL
    workspace.cosmos("resume")
    for name, steps in (("first", 5), ("left", 60), ("right", 61)):
        assert (workspace.stage(name) / "out.txt").read_text() == chain(42, steps)
    assert (workspace.stage("first") / "visits.txt").read_text() == "start 0\n", "a finished stage is reused"
    if what != "server":
        visits = (workspace.stage("left") / "visits.txt").read_text().split()
        assert int(visits[-1]) >= 8, "the interrupted stage continues from its checkpoint"
    workspace.expect_quiet()


@pytest.mark.parametrize(
    ("stage", "step", "number"),
    [
        pytest.param("first", 1, signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("left", 5, signal.SIGTERM, marks=pytest.mark.full),
        ("left", 5, signal.SIGUSR1),
    ],
    ids=["SIGTERM, one branch", "SIGTERM, two branches", "a signal to handle, two branches"],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_exit_75(
    workspace: Workspace, stage: str, step: int, number: signal.Signals
) -> None:
    workspace.write("toy.toml", PIPELINE.replace("steps = 5 }", "steps = 40 }") if stage == "first" else PIPELINE)
    flow = workspace.start("run", "toy.toml")
    active = ["first"] if stage == "first" else ["left", "right"]
    wait_until(lambda: all(workspace.is_past(name, step) for name in active), 90, f"{active} at step {step}")
    flow.send_signal(number)
    assert flow.wait() == 75
    workspace.expect_quiet()
    for name in active:
        state = read_state(workspace.stage(name))
        assert state.state == "stopped"
        assert state.error.startswith("saved at step")
        assert state.failures == 0, "a preemption does not count as a failed attempt"
        assert read_result(workspace.stage(name)) is None  # `commands/test_deployments.py` resumes such a run
