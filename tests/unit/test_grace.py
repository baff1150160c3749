"""How long a worker that is asked to stop may take: what is configured, and the longest step that was seen."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_core.launch.child import SupervisedProcess
from cosmos_core.launch.worker import compute_grace_seconds
from cosmos_core.run.progress import ProgressWriter, read_progress
from cosmos_core.run.state import update_state
from tests.conftest import wait_until

# Finishes the step that it is in when it is asked to stop, which takes longer than the grace of its beginning.
PROGRAM = """
import pathlib, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
pathlib.Path(sys.argv[1], "ready").touch()
while not asked:
    time.sleep(0.02)
time.sleep(1.5)
pathlib.Path(sys.argv[1], "saved").touch()
"""


def test_the_grace_is_what_is_configured_and_the_longest_step_of_any_attempt(tmp_path: Path) -> None:
    assert compute_grace_seconds(tmp_path, 20) == 20
    progress = ProgressWriter(tmp_path / "progress.json")
    progress.step(3, 10)
    assert compute_grace_seconds(tmp_path, 20) == 20, "where an attempt begins is no step"
    progress.step(4, 10)
    progress.report_checkpoint(4)
    known = read_progress(tmp_path)
    assert known is not None and known.longest_step_seconds > 0
    assert compute_grace_seconds(tmp_path, 20) == 20 + known.longest_step_seconds
    update_state(tmp_path, longest_step_seconds=53.0)
    assert compute_grace_seconds(tmp_path, 20) == 73


def stop(child: SupervisedProcess) -> None:
    child.stop(60.0)


def stop_before_the_grace_is_read(child: SupervisedProcess) -> None:
    child.stop()
    child.stop(60.0)


@pytest.mark.parametrize("ask", [stop, stop_before_the_grace_is_read])
def test_a_step_longer_than_the_grace_of_the_beginning_is_waited_for(
    tmp_path: Path, ask: Callable[[SupervisedProcess], None]
) -> None:
    child = SupervisedProcess(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], log_path=tmp_path / "log", grace_seconds=0.5,
        environment=dict(os.environ),
    )  # fmt: skip
    wait_until((tmp_path / "ready").exists, 10, "the program has not begun")
    ask(child)
    wait_until(lambda: child.poll() is not None, 10, "the program has not ended")
    assert child.poll() == 0 and (tmp_path / "saved").exists()
