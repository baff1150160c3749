"""A disk that is full, for a worker that saves or for the launcher: one line, exit 1, and resume goes on."""

from __future__ import annotations

import errno
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cosmos_core.cluster.rank import RankMessages
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import DiskFull
from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.launch.server import _ServerProcess
from cosmos_core.run.directory import claim_run
from cosmos_core.run.files import make_disk_full_error, warn_if_disk_full
from cosmos_core.run.liveness import read_holder, record_stop
from cosmos_core.run.manifest import read_result
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.run.state import read_state, update_state
from cosmos_core.types import Outcome
from cosmos_core.worker import program
from tasks import stage as stage_tasks
from tasks.kinds import all_kinds
from tasks.stage import run_stage, should_retry
from tests.acceptance.storms.shim import Shim, has_compiler
from tests.conftest import DEMOS, Workspace, wait_until
from tests.faults.test_worker import make_run

pytestmark = pytest.mark.usefixtures("own_server")
PIPELINE = """
[pipeline]
threads = 1
python = "PYTHON"

[train]
param_dtype = "float32"
compile = false

[policy]
model_max_length = 32
model_gradient_checkpointing = false

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"
arguments = { train_rows = 256, heldout_rows = 16, hidden_size = 64, layers = 1 }

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"
retries = 0

[pipeline.stages.overrides.train]
max_num_steps = 600
epoch = 1000
train_batch_per_replica = 32
train_policy = { type = "sft", mini_batch = 32, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 50, max_keep = 2 }
""".replace("DEMOS", str(DEMOS))


def limited_python(workspace: Workspace) -> Path:
    """An interpreter that cannot write files above 50 kB while the file `full` exists."""
    script = workspace.write(
        "python", f'#!/bin/bash\n[ -e "$COSMOS_WORKSPACE/full" ] && ulimit -f 50\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


@pytest.mark.full
def test_the_run_fails_with_one_line_and_the_checkpoint_before_is_continued(workspace: Workspace) -> None:
    workspace.write("p.toml", PIPELINE.replace("PYTHON", str(limited_python(workspace))))
    flow = workspace.start("run", "p.toml")
    wait_until(lambda: workspace.is_past("sft", 120), 180, "training at step 120")
    flow.send_signal(signal.SIGTERM)
    assert flow.wait() == 75
    kept = sorted(path.name for path in (workspace.stage("sft") / "checkpoints").glob("step_*"))
    assert kept

    (workspace.path / "full").touch()
    done = workspace.cosmos("resume", code=1)
    lines = [line for line in done.stderr.splitlines() if "disk full while saving checkpoint" in line]
    assert lines, done.stderr
    assert "is intact" in lines[0]
    assert sorted(path.name for path in (workspace.stage("sft") / "checkpoints").iterdir()) == kept
    assert read_result(workspace.stage("sft")) is None

    (workspace.path / "full").unlink()
    workspace.cosmos("resume")
    assert read_metrics(workspace.stage("sft") / "metrics.jsonl")[-1]["step"] == 600
    workspace.expect_quiet()


COUNTING = """
[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { steps = 60 }

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = { steps = 3 }
"""


@pytest.mark.full
@pytest.mark.skipif(not has_compiler(), reason="the shim of the disk needs a C compiler")
def test_a_full_disk_under_the_server_alone_is_waited_for(workspace: Workspace) -> None:
    workspace.write("p.toml", COUNTING)
    shim = Shim(workspace.path / "control", workspace.path / "outputs/.cosmos/server-1")
    workspace.environment |= shim.environment
    flow = workspace.start("run", "p.toml")
    wait_until(lambda: workspace.is_past("first", 30), 120, "the first stage at step 30")
    shim.set("is_full", 1)
    wait_until(lambda: workspace.state("first") == "done", 60, "the end of the first stage")
    before = shim.get("num_refused")
    wait_until(lambda: shim.get("num_refused") > before, 60, "a write of the server that is refused")
    shim.set("is_full", 0)
    assert flow.wait() == 0
    assert workspace.state("second") == "done"
    assert "Traceback" not in (workspace.path / "command.log").read_text()


@contextmanager
def no_room_for_this_process() -> Iterator[None]:
    """Let nothing be written to files here, from the call on; processes that run already write on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_stage_that_ends_while_the_launcher_cannot_write_is_finished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(tmp_path, "count", "arguments = { steps = 30, seconds = 0.1 }")
    full = no_room_for_this_process()
    is_full = False

    def fill(_: object) -> None:
        nonlocal is_full
        if not is_full:
            is_full = True
            full.__enter__()

    try:
        result, _ = run_stage(run, "s", on_progress=fill)
    finally:
        full.__exit__(None, None, None)
    assert is_full and result["metrics"] == {"count": 30.0}
    assert read_state(run.stage_path("s")).state == "done", "its manifest says so, whatever the state could note"
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines and not any(record.exc_info for record in lines), "no traceback"
    assert any("the disk is full or read-only" in record.getMessage() for record in lines)
    assert run_stage(run, "s")[1] is True


def test_a_stage_that_cannot_begin_says_that_the_disk_is_full_and_is_not_tried_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count", "retries = 3")
    with no_room_for_this_process(), pytest.raises(DiskFull, match=r"^disk full: .*; free space and resume$") as caught:
        run_stage(run, "s")
    assert not should_retry(run, "s", caught.value)
    assert run_stage(run, "s")[1] is False


def test_a_stage_on_a_pool_says_that_the_disk_of_its_flow_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "count", 'work_pool = "gpu"')
    monkeypatch.setattr(stage_tasks.events, "emit_stage_failed", lambda *_: None)
    monkeypatch.setattr(stage_tasks, "run_remote_stage", lambda run, *_: update_state(run.stage_path("s"), error=""))
    with no_room_for_this_process():
        state = stage_tasks._run_on_work_pool(run, "s")
    assert state.is_failed() and state.message.startswith("disk full: ")


def test_a_stop_while_the_disk_is_full_is_a_stop(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count")
    with claim_run(run):
        with no_room_for_this_process():
            record_stop(run.path, ["s"])
        record_stop(run.path, ["s"])
    assert (holder := read_holder(run.path)) is not None and holder.flow_state == "stopped"


def test_a_rank_of_several_that_finds_the_disk_full_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "configure_logging", lambda level: None)  # this process has tests of logs too
    kind = all_kinds()["custom"]
    stage = Stage(
        tmp_path, StageConfig(name="s", kind="custom", entry="m:f"), Recipe(), "", None, {}, "f" * 64, kind=kind
    )
    stage.save()

    def fill(stage: Stage) -> Outcome:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskFull, match=f"^disk full: No space left on device: {stage.path}; free space and resume$"):
        program.run_rank(stage.path, fill, RankMessages())


def test_a_disk_that_is_read_only_is_one_line_too(tmp_path: Path) -> None:
    error = OSError(errno.EROFS, os.strerror(errno.EROFS), "/there/state.json")
    said = "read-only: Read-only file system: /there/state.json; make it writable and resume"
    assert str(make_disk_full_error(error, tmp_path)) == said
    with warn_if_disk_full("the end"):
        raise error


def test_a_disk_that_fills_up_under_the_server_of_a_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _ServerProcess(tmp_path)
    server._child = cast(SupervisedProcess, SimpleNamespace(poll=lambda: None, kill=lambda: None))
    with no_room_for_this_process():
        server._watcher_thread.start()
        wait_until(lambda: caplog.messages, 5, "a warning")
    server.close()
    [message] = caplog.messages
    assert re.fullmatch(r"the Prefect server .* the run waits .*: disk full: .*; free space and resume", message)
