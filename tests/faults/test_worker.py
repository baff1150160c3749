"""Workers that crash, hang, refuse or leave children behind, without Prefect: the launcher's contract alone."""

from __future__ import annotations

import fcntl
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
import uuid
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from cosmos_core.errors import ConfigError, DataError, Preempted, StageFailed
from cosmos_core.imports import make_python_command
from cosmos_core.launch import processes, worker
from cosmos_core.launch.check import check_first_rows
from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.launch.processes import (
    ATTEMPT_VARIABLE,
    create_scratch_folder,
    remove_orphans,
    remove_scratch_folder,
    scratch_folder,
)
from cosmos_core.run.directory import Run, claim_run, create_run
from cosmos_core.run.files import read_json
from cosmos_core.run.lock import create_locked_folder
from cosmos_core.run.state import read_state, update_state
from tasks.kinds import all_kinds
from tasks.stage import run_stage, should_retry
from tasks.store_sync import StageSync
from tests.conftest import PROGRAMS, processes_below, wait_until
from tests.unit.run_folder import load_recipe, make_inputs


def make_run(folder: Path, function: str, settings: str = "") -> Run:
    from cosmos_core.config.compose import load_pipeline

    folder.mkdir(exist_ok=True)
    file = folder / "p.toml"
    file.write_text(
        f'[pipeline]\noutput_dir = "{folder / "outputs"}"\ngrace_seconds = 2\n'
        f'[[pipeline.stages]]\nname = "s"\nkind = "custom"\nentry = "{PROGRAMS}/counting.py:{function}"\n{settings}\n'
    )
    return create_run(load_pipeline(file, (), all_kinds()))


def attempts_until_given_up(run: Run) -> int:
    """Apply the retry policy as the flow does."""
    attempts = 0
    while True:
        attempts += 1
        try:
            run_stage(run, "s")
        except StageFailed as error:
            if not should_retry(run, "s", error):
                return attempts
        else:
            return attempts


def test_a_refused_input_is_the_same_error_in_the_launcher_and_is_never_retried(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count", "arguments = { refuse = true }")
    with pytest.raises(DataError, match=r"^rows.jsonl:3: refused on purpose$") as caught:
        run_stage(run, "s")
    assert not should_retry(run, "s", caught.value)


def test_a_stage_that_hangs_past_the_deadline_of_its_phase_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "hang")
    with pytest.raises(StageFailed, match=r"no sign of life for .* in phase 'collective'"):
        run_stage(run, "s")
    assert not processes_below(tmp_path)


@pytest.mark.parametrize(
    "offset",
    [-3e8, pytest.param(3e8, marks=pytest.mark.full)],
    ids=["ten years behind", "ten years ahead"],
)
def test_a_worker_with_another_clock_is_neither_killed_nor_does_it_hide_a_hang(tmp_path: Path, offset: float) -> None:
    healthy = make_run(tmp_path / "healthy", "on_another_clock", f"arguments = {{ offset = {offset}, hangs = false }}")
    run_stage(healthy, "s")
    hung = make_run(tmp_path / "hung", "on_another_clock", f"arguments = {{ offset = {offset}, hangs = true }}")
    with pytest.raises(StageFailed, match=r"no sign of life for [23] s in phase 'collective'"):
        run_stage(hung, "s")
    assert read_state(hung.stage_path("s")).phase == "collective"


def test_a_run_after_a_cancelled_one_in_the_same_process_is_not_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count")
    with worker.register_active_run():
        worker.stop_all()
        with pytest.raises(Preempted):
            run_stage(run, "s")
    with worker.register_active_run():
        result, _ = run_stage(run, "s")
    assert result["metrics"] == {"count": 10.0}


def test_a_run_that_begins_beside_a_cancelled_one_leaves_it_stopped() -> None:
    with worker.register_active_run():
        worker.stop_all()
        with worker.register_active_run():
            assert worker.is_stopping()
    assert worker.is_stopping(), "a thread of it may still have to learn"
    with worker.register_active_run():
        assert not worker.is_stopping()


def test_a_stage_past_its_timeout_is_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count", 'timeout = "1s"\narguments = { steps = 1000 }')
    with pytest.raises(StageFailed, match="longer than timeout = 1 s"):
        run_stage(run, "s")
    assert not processes_below(tmp_path)


def test_a_stage_that_another_machine_has_taken_over_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, "count", "arguments = { steps = 1000 }")
    progress = run.stage_path("s") / "progress.json"
    monkeypatch.setattr(
        StageSync, "get_lease_loss_reason", lambda self: "taken over" if (read_json(progress) or {}).get("step") else ""
    )
    with pytest.raises(StageFailed, match="stage 's' was ended: taken over"):
        run_stage(run, "s")
    assert not processes_below(tmp_path)


def test_the_log_begins_with_the_device_and_has_the_steps_at_a_bounded_rate(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count", "arguments = { steps = 40, seconds = 0.05 }")
    run_stage(run, "s")
    lines = (run.stage_path("s") / "logs" / "attempt_1.log").read_text().splitlines()
    assert f"s (custom) on {platform.node()} (1 rank, cpu, " in lines[0]
    steps = [line for line in lines if "  step " in line]
    assert "  step 1  loss 1.000" in steps[0] and steps[-1].endswith("step 40/40  loss 0.025")
    assert 2 < len(steps) < 12, "one a second"


def test_attempts_without_progress_are_bounded_by_retries(tmp_path: Path) -> None:
    run = make_run(tmp_path, "never_progress", "retries = 1")
    assert attempts_until_given_up(run) == 2
    assert read_state(run.stage_path("s")).error.startswith("stage 's' crashed (exit code 3)")


@pytest.mark.full
def test_a_crash_after_progress_is_retried_and_continues_from_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count", "retries = 1\narguments = { steps = 6, crash_at = 4 }")
    assert attempts_until_given_up(run) == 2
    assert (run.stage_path("s") / "visits.txt").read_text() == "start 0\nstart 4\n"


def test_what_a_worker_leaves_behind_is_killed_even_in_a_session_of_its_own(tmp_path: Path) -> None:
    run = make_run(tmp_path, "leaves_a_child")
    os.environ["COSMOS_WORKSPACE"] = str(tmp_path)
    try:
        run_stage(run, "s")
    finally:
        del os.environ["COSMOS_WORKSPACE"]
    assert not processes_below(tmp_path)


def test_a_first_look_at_the_rows_that_crashes_stops_no_run(tmp_path: Path) -> None:
    make_inputs(tmp_path)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no conversation"):
        check_first_rows(load_recipe(tmp_path))
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\ncase "$*" in *cosmos_core.worker*) kill -9 $$;; esac\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    check_first_rows(load_recipe(tmp_path, f"pipeline.python={python}"))


def working_in(folder: Path) -> list[int]:
    """Live processes whose current folder is this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder) and process.pid != os.getpid():
                found.append(process.pid)
    return found


def test_what_drops_its_mark_and_its_parent_falls_to_the_supervisor_and_is_killed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "leaves_a_child_without_a_mark")
    run_stage(run, "s")
    assert working_in(run.stage_path("s")) == []


def test_a_stop_just_when_the_command_has_ended_leaves_its_exit_code(executed: None) -> None:
    program = """
import os
from cosmos_core.launch.supervisor import Supervisor
reader, writer = os.pipe()
os.dup2(reader, 0)
class Late(Supervisor):
    def _watch_pipe(self):
        os.write(writer, b"end now")
        os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)
        self.stop()  # as the handler of SIGTERM does, which may run between any two lines
raise SystemExit(Late(-1, 1.0).run(["sh", "-c", "head -c 7 && exit 7"], []))
"""
    done = subprocess.run([*make_python_command(), "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "end now", "")


def test_temporary_files_of_a_worker_are_gone_when_it_ends_and_those_of_a_killed_one_at_the_next_command(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path, "leaves_files")
    run_stage(run, "s")
    scratch = Path((run.stage_path("s") / "scratch").read_text())
    assert scratch.parent.name.startswith("cosmos-") and not scratch.parent.exists()
    mark = uuid.uuid4().hex
    scratch_folder(mark).mkdir()
    update_state(run.stage_path("s"), state="stopped", mark=mark)
    worker.reap_attempt(run.stage_path("s"))
    assert not scratch_folder(mark).exists()
    gone, mine = (run.stage_path("s") / f".state.json.{pid}-1.tmp" for pid in (2**22 + 1, os.getpid()))
    for file in (gone, mine):
        file.touch()
    claim_run(run).release()
    assert (gone.exists(), mine.exists()) == (False, True)


def test_an_attempt_that_just_begins_is_nobody_s_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    mark, lock = uuid.uuid4().hex, fcntl.flock

    def slow_lock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH:
            remove_orphans()  # of another run, which begins at the same moment
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow_lock)
    held = create_scratch_folder(mark)
    remove_orphans()
    assert scratch_folder(mark).is_dir()
    os.close(held)
    remove_orphans()
    assert not scratch_folder(mark).exists()


def test_a_process_that_survives_sigkill_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting_for_a_device = SimpleNamespace(pid=7, kill=lambda: None)
    monkeypatch.setattr(processes, "find_attempt_processes", lambda attempt: [waiting_for_a_device])
    monkeypatch.setattr(processes, "_KILL_TIMEOUT_SECONDS", 0.1)
    assert processes.kill_attempt("a") == [7]
    assert "processes [7] did not end within 0.1 s of SIGKILL" in caplog.text


def test_what_launcher_and_supervisor_leave_that_were_killed_together_is_ended_by_the_next_run() -> None:
    mark, look = uuid.uuid4().hex, Path(tempfile.gettempdir()) / f"cosmos-look-{uuid.uuid4().hex[:12]}"
    held, of_check = create_scratch_folder(mark), create_locked_folder(look)
    stray = subprocess.Popen(["sleep", "600"], env={ATTEMPT_VARIABLE: mark})
    try:
        remove_orphans()
        assert scratch_folder(mark).exists() and look.exists() and stray.poll() is None, "somebody holds it"
        for descriptor in (held, of_check):
            os.close(descriptor)
        remove_orphans()
        assert not scratch_folder(mark).exists() and not look.exists()
        assert stray.wait() == -signal.SIGKILL
    finally:
        stray.kill()
        stray.wait()


def test_a_program_of_ours_that_starts_in_the_folder_of_another_checkout_runs_no_code_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executed: None
) -> None:
    (tmp_path / "cosmos_core").mkdir()
    (tmp_path / "cosmos_core/__init__.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    ours = [*make_python_command(), "-m", "cosmos_core.imports"]
    child = SupervisedProcess(ours, log_path=tmp_path / "log", grace_seconds=1.0, environment={})
    try:
        assert wait_until(lambda: child.poll() is not None and [child.poll()], 5, "it runs") == [0]
    finally:
        child.kill()


def test_what_another_machine_uses_in_a_shared_folder_of_temporary_files_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark, lock = uuid.uuid4().hex, fcntl.flock

    def lock_as_on_nfs(descriptor: int, operation: int) -> None:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):  # no other machine sees the lock of a folder
            lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_as_on_nfs)
    held = create_scratch_folder(mark)
    try:
        remove_orphans()
        assert scratch_folder(mark).is_dir()
    finally:
        os.close(held)
        remove_scratch_folder(mark)


def test_a_log_whose_launcher_was_killed_shows_no_secret_once_the_stage_is_reaped_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE", "battery staple")
    log = tmp_path / "logs" / "attempt_3.log"
    log.parent.mkdir()
    log.write_text("password=correcthorse\nasks battery staple\n")  # of a program that a reward has started
    update_state(tmp_path, state="running", attempt=3, spans=[(1.0, 2.0), (3.0, None)])
    text = log.read_text()
    worker.reap_attempt(tmp_path)
    assert log.read_text() == text, "it is called at each poll for a lock"
    worker.mask_log_of_killed_launcher(tmp_path)
    assert log.read_text() == f"password={'*' * 12}\nasks battery staple\n", "nobody says yet that JUDGE is a secret"
    with pytest.raises(StageFailed):
        worker.run_attempt(worker.AttemptSettings(tmp_path, python_path="/bin/false", secret_vars=("JUDGE",)))
    assert log.read_text() == f"password={'*' * 12}\nasks {'*' * 14}\n"


def test_a_second_attempt_waits_for_nobody_when_the_first_launcher_is_dead(tmp_path: Path) -> None:
    run = make_run(tmp_path, "count")
    run_stage(run, "s")
    (facts,) = read_json(run.stage_path("s") / "facts.json")
    assert facts["host"] == platform.node() and facts["versions"]["torch"] == version("torch")
    result, was_reused = run_stage(run, "s")
    assert was_reused
    assert result["metrics"] == {"count": 10.0}


def test_a_function_that_returns_nothing_is_one_line_and_never_retried(tmp_path: Path) -> None:
    run = make_run(tmp_path, "returns_nothing")
    said = rf"^stage 's': {PROGRAMS}/counting.py:returns_nothing returned nothing; return a cosmos_core.types.Outcome$"
    with pytest.raises(ConfigError, match=said) as caught:
        run_stage(run, "s")
    assert not should_retry(run, "s", caught.value)


def test_what_a_users_function_raises_is_told_with_its_line_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "the secret of a service")
    monkeypatch.setenv("OTHER_TOKEN", "the secret of another")
    run = make_run(tmp_path, "raises", 'env = ["SERVICE_TOKEN"]\narguments = { secret = "SERVICE_TOKEN" }')
    with pytest.raises(
        ConfigError, match=r"counting.py:raises raised RuntimeError: broken on purpose: \*\*\* \("
    ) as caught:
        run_stage(run, "s")
    assert re.search(rf"\({PROGRAMS}/counting.py:\d+\); traceback in the log$", str(caught.value))
    log = (run.stage_path("s") / "logs/attempt_1.log").read_text()
    assert "told: *** nothing" in log and "shell told: ***" in log and "Traceback" in log and "in raises" in log
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"the secret of" in content for content in files)


def test_a_secret_that_no_variable_has_is_shown_nowhere_either(tmp_path: Path) -> None:
    keys = ["Zx81kQpL0vTn3RwYbE7mJc2HsA5uDf9G", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYzZ5nMqLwE9"]
    file = tmp_path / "keys"
    file.write_text(f"{keys[0]} {keys[1]} password=hunter2hunter2")
    run = make_run(tmp_path, "raises", f'arguments = {{ file = "{file}" }}')
    with pytest.raises(ConfigError, match=r"login failed with \*\*\* \*\*\* password=\*\*\* \(") as caught:
        run_stage(run, "s")
    file.unlink()
    found = {each: each.read_text(errors="replace") for each in run.path.rglob("*") if each.is_file()}
    shown = [each.name for each, text in found.items() if any(key in text for key in (*keys, "hunter2hunter2"))]
    assert not shown and "Traceback" in found[run.stage_path("s") / "logs/attempt_1.log"]
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_an_error_of_the_network_may_pass(tmp_path: Path) -> None:
    run = make_run(tmp_path, "raises", 'arguments = { error = "ConnectionError" }')
    with pytest.raises(StageFailed, match="ConnectionError: broken on purpose") as caught:
        run_stage(run, "s")
    assert should_retry(run, "s", caught.value)
