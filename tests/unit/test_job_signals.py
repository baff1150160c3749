"""A signal that a scheduler sends to every process of a job: who lives on, and who still ends of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from cosmos_core.cluster import group
from cosmos_core.job_signals import JOB_SIGNALS

PARENT = """
import subprocess
with subprocess.Popen(["sleep", "600"]) as child: print(child.pid, flush=True); child.wait()
"""
PROGRAM = """
import os, signal, subprocess
from cosmos_core.job_signals import JOB_SIGNALS, block_job_signals, ignore_job_signals
with block_job_signals():
    os.kill(os.getpid(), signal.SIGTERM)  # before the handlers are set, as in a process that is started
    ignore_job_signals()
for number in JOB_SIGNALS:
    os.kill(os.getpid(), number)
print(subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode)
if (child := os.fork()) == 0:
    signal.raise_signal(signal.SIGTERM)
    os._exit(0)
print(-os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.usefixtures("executed")
def test_a_process_goes_on_after_the_signals_and_its_children_end_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-15", "15"], "user code may end what it starts with SIGTERM"


def signals(pid: int, field: str) -> set[int]:
    """Numbers of the signals in a field of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith(field)).split()[1], 16)
    return {number for number in JOB_SIGNALS if mask >> (number - 1) & 1}


def test_the_processes_of_an_embedded_cluster_live_until_it_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own handlers would end its processes, and with them the ranks, before a checkpoint is saved."""
    asked: list[int] = []
    children: list[subprocess.Popen[bytes]] = []

    def start(**settings: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as `ray.init` does
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)  # meanwhile the worker is asked to stop
        child = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE)
        children.append(child)
        node.all_processes["raylet"] = [SimpleNamespace(process=child)]

    kills: list[dict[str, bool]] = []
    node = SimpleNamespace(
        all_processes={}, kill_all_processes=lambda **settings: kills.append(settings) or children[0].kill()
    )
    worker = SimpleNamespace(worker=SimpleNamespace(_global_node=node))
    shutdown = lambda: node.kill_all_processes(check_alive=False, allow_graceful=True)  # noqa: E731
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=start, shutdown=shutdown, _private=worker))
    monkeypatch.setattr(group, "_restrict_ray_access", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    previous = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        with group._connect_to_cluster(2, None):
            assert asked == [signal.SIGTERM]
            assert children[0].stdout is not None
            agent = psutil.Process(int(children[0].stdout.readline()))
            for number in JOB_SIGNALS:
                children[0].send_signal(number)
            assert signals(children[0].pid, "ShdPnd:") == JOB_SIGNALS and children[0].poll() is None
            assert signals(os.getpid(), "SigBlk:") == set()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert children[0].wait() == -signal.SIGKILL
    agent.wait(60)  # it would outlive the raylet, of which Ray kills no children
    assert kills == [{"check_alive": False, "allow_graceful": False}], "SIGTERM is blocked: Ray would wait in vain"
