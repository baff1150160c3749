"""What a storm may not leave: other results, processes, locks, temporary files, a traceback that a user was shown."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from cosmos_core.run.files import sha256
from tests.acceptance.storms.commands import Commands
from tests.acceptance.storms.pipelines import SEED, StormPipeline
from tests.conftest import Workspace, processes_below
from tests.programs.misbehaving import chain

QUIET_SECONDS = 15.0
Digests = dict[str, str]


def weights(run: Path) -> Digests:
    """Return the sha256 of every file of safetensors that stages of a run have made, by its path below the run."""
    return {
        str(file.relative_to(run)): sha256(file) for file in sorted(run.glob("stages/*/safetensors/**/*.safetensors"))
    }


def other_results(pipeline: StormPipeline, run: Path, expected: Digests) -> list[str]:
    """Return in what a run differs from an undisturbed one."""
    found = weights(run)
    different = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
    for name in pipeline.ways:
        file = run / "stages" / name / "out.txt"
        if not file.is_file() or file.read_text() != chain(SEED, pipeline.steps[name]):
            different.append(f"{name}/out.txt")
    return [f"{run.name}/{name} differs" for name in different]


def tracebacks(commands: Commands) -> list[str]:
    """Return the commands that showed one."""
    return [f"traceback of cosmos {' '.join(each.words)}" for each in commands.all if "Traceback" in each.said]


def leftovers(workspace: Workspace, temporary: Path) -> list[str]:
    """Return what is still there some seconds after the last command: processes, held locks, temporary files."""
    end = time.monotonic() + QUIET_SECONDS
    while processes_below(workspace.path) and time.monotonic() < end:
        time.sleep(0.1)
    found = [f"process {pid}: {command[:200]}" for pid, command in processes_below(workspace.path).items()]
    for path in sorted(workspace.path.rglob("*")):
        if path.name.endswith((".tmp", ".old")) or temporary in path.parents:
            found.append(f"temporary file {path.relative_to(workspace.path)}")
        elif "lock" in path.name and path.is_file() and _is_held(path):
            found.append(f"lock {path.relative_to(workspace.path)}")
    return found


def end_all(workspace: Workspace) -> None:
    """End every process of a workspace, also those that are stopped."""
    for pid in processes_below(workspace.path):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_held(path: Path) -> bool:
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
