"""What the tests stand on: programs that are forked, runs that are killed, reports of failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import schedule
from tests.conftest import MOST_SECONDS, wait_until
from tests.warm import spawner
from tests.warm.programs import ADDRESS_VARIABLE, READ, read_on_import

ROOT = Path(__file__).parents[2]
LOOK = """
import json, os, signal, sys  # as cosmos_core does
print(json.dumps({
    "argv": sys.argv, "command line": open("/proc/self/cmdline").read(), "path": sys.path[0], "name": __name__,
    "environment": sorted(filter(None, open("/proc/self/environ").read().split(chr(0)))), "folder": os.getcwd(),
    "is child": os.getppid() == int(sys.argv[1]), "leads a session": os.getsid(0) == os.getpid(), "mask": os.umask(0),
    "signals": [int(signal.getsignal(n) or 0) if n != 2 else str(signal.getsignal(n)) for n in range(1, 32)],
    "kept": os.read(int(sys.argv[2]), 4).decode(), "is forked": "torch" in sys.modules,
}))
"""


OWN = {"LC_CTYPE", "COLUMNS", "LINES", ADDRESS_VARIABLE}


def look(folder: Path, **settings: Any) -> dict[str, Any]:
    """What a program sees of itself."""
    reader, writer = os.pipe()
    os.write(writer, b"kept")
    command = [sys.executable, "-c", LOOK, str(os.getpid()), str(reader)]
    done = subprocess.run(command, cwd=folder, pass_fds=[reader], capture_output=True, text=True, **settings)
    os.close(reader)
    os.close(writer)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "settings", [{}, {"start_new_session": True, "umask": 0o27}, {"env": {"A": "b=c", "D": "", **read_on_import(READ)}}]
)
def test_a_forked_program_sees_what_an_executed_one_sees(tmp_path: Path, settings: dict[str, Any]) -> None:
    forked = look(tmp_path, **settings)
    with spawner.off():
        executed = look(tmp_path, **settings)
    assert (forked.pop("is forked"), executed.pop("is forked")) == (True, False)
    for seen in (forked, executed):  # Python, readline and the first fork add some of their own
        seen["environment"] = [line for line in seen["environment"] if line.split("=")[0] not in OWN]
        seen.pop("argv")[2], seen["command line"] = "", seen["command line"].rpartition("\0")[0].rpartition("\0")[0]
    assert forked == executed


def test_a_program_that_starts_with_signals_blocked_is_forked() -> None:
    """Such are the processes of rewards and tools."""
    reader, writer = os.pipe()
    code = f"""
import signal, sys  # as cosmos_core does
print(sorted(map(int, signal.pthread_sigmask(0, ()))), "torch" in sys.modules, file=open({writer}, "w"))
"""
    command, kept = [sys.executable, "-B", "-c", code], [(os.POSIX_SPAWN_DUP2, writer, writer)]
    blocked = (signal.SIGUSR1, signal.SIGTERM)
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=kept, setsigmask=blocked)
    os.close(writer)
    with open(reader) as answer:
        assert answer.read() == "[10, 15] True\n"
    assert os.waitpid(pid, 0)[1] == 0


RAY_WORKER = """
import json, os, sys, time
print(json.dumps([os.getpid(), sys.argv[1:], "torch" in sys.modules]), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("is_worker_killed", [True, False])
def test_a_worker_of_ray_is_forked_and_ends_with_the_process_that_stands_for_it(
    tmp_path: Path, is_worker_killed: bool
) -> None:
    look(tmp_path)  # opens the fork server of this process
    file = tmp_path / "ray/_private/workers/default_worker.py"
    file.parent.mkdir(parents=True)
    file.write_text(RAY_WORKER)
    command = [sys.executable, str(Path(spawner.__file__).with_name("ray_worker.py")), str(file)]
    options = ["--language=PYTHON", "--serialized-runtime-env-context={}", "--node-id=7"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE) as stand_in:
        assert stand_in.stdout is not None
        pid, arguments, is_forked = json.loads(stand_in.stdout.readline())
        assert (arguments, is_forked) == (["--node-id=7"], True)
        worker = psutil.Process(pid)
        os.kill(pid if is_worker_killed else stand_in.pid, signal.SIGKILL)
        assert stand_in.wait(MOST_SECONDS) == (0 if is_worker_killed else -signal.SIGKILL)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 30, "the worker ends")


def test_a_variable_that_a_library_has_set_does_not_stop_the_forking_of_later_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_A_LIBRARY_SET_IT", "1")
    assert not look(tmp_path)["is forked"]
    spawner.restore_environment()
    assert look(tmp_path)["is forked"]


def test_a_fork_server_that_is_gone_is_replaced(tmp_path: Path) -> None:
    look(tmp_path)  # opens the fork server of this process
    used = subprocess._fork_exec  # type: ignore[attr-defined]
    gone, other = socket.socketpair()
    other.close()
    spawner.use(spawner.Spawner(iter([spawner.ForkServer(gone), used._fork_server]).__next__))
    try:
        assert look(tmp_path)["is forked"]
    finally:
        spawner.use(used)
        gone.close()


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no room')", 1, "no room\n"),
        ("sys.exit()", 0, ""),
        ("raise ValueError('odd')", 1, "ValueError: odd\n"),
        ("os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, ""),
        ("import atexit; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_a_forked_program_ends_as_an_executed_one(code: str, returned: int, said: str) -> None:
    command = [sys.executable, "-c", f"import os, sys  # cosmos_core\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == returned and done.stderr.endswith(said)


def ask_look(folder: Path, answers: Connection) -> None:
    """Send what a program sees that this process starts, and then one that a process starts which it has forked."""
    answers.send(look(folder))
    if not os.fork():
        answers.send(look(folder))
        os._exit(0)
    os.wait()


def test_a_process_that_is_forked_by_others_is_the_parent_of_what_it_starts(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    rank = context.Process(target=ask_look, args=(tmp_path, theirs))
    rank.start()
    seen = [ours.recv(), ours.recv()]
    rank.join()
    assert [(each["is child"], each["is forked"]) for each in seen] == [(True, True), (True, False)]


def inner(folder: Path, code: str, *arguments: str) -> list[str]:
    """The command that runs a test in a suite of its own."""
    (folder / "test_inner.py").write_text(code)
    options = ["-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--fast"]
    return [sys.executable, "-m", "pytest", *options, *arguments, str(folder / "test_inner.py")]


STAYS = """
import os, subprocess, sys, tempfile, time
from pathlib import Path

def test_it(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
    told = Path(TOLD)
    told.with_suffix(".new").write_text(f"{child.pid} {os.getpid()} {tempfile.gettempdir()} {tmp_path}")
    told.with_suffix(".new").rename(told)
    time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_run_that_is_killed_or_interrupted_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """One that is killed leaves no folder either."""
    told = tmp_path / "told"
    run = subprocess.Popen(
        inner(tmp_path, STAYS.replace("TOLD", repr(str(told))), "-n", "1"), cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(told.exists, 120, "the inner test runs")
    finally:
        run.send_signal(number)
        run.wait()
    child, worker, scratch, folder = told.read_text().split()
    left = [scratch, folder] if number == signal.SIGKILL else [scratch]
    wait_until(lambda: not any(psutil.pid_exists(int(pid)) for pid in (child, worker)), 30, "its processes are gone")
    wait_until(lambda: not any(Path(each).exists() for each in left), 30, "its folders are gone")


FAILS = """
def test_it(tmp_path):
    log = tmp_path / "outputs/1/stages/sft/logs/attempt_1.log"
    log.parent.mkdir(parents=True)
    log.write_text("the loss was nan\\n")
    (log.parents[1] / "state.json").write_text('{"state": "failed"}')
    assert False
"""


@pytest.mark.full
def test_a_failure_is_printed_before_the_run_ends_and_shows_what_the_stages_in_its_folder_said(tmp_path: Path) -> None:
    done = subprocess.run(inner(tmp_path, FAILS, "-n", "1"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    before, _, _ = done.stdout.partition("= FAILURES =")
    assert "::test_it: assert False" in before
    assert "outputs/1/stages/sft/logs/attempt_1.log" in done.stdout and "the loss was nan" in done.stdout
    assert '{"state": "failed"}' in done.stdout


def test_durations_name_files_and_folders_that_there_are() -> None:
    names = {group.partition("::")[0] for group in schedule.durations()} | {schedule.TOGETHER}
    names |= schedule.SPLIT | schedule.STARTS_PROGRAMS
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
