"""`cosmos reap`: what is left of runs whose flow died on this machine is ended, and said to have ended."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

from cosmos_core.launch import worker
from cosmos_core.launch.processes import SILENT_SECONDS, sweep
from cosmos_core.run.directory import PIPELINE
from cosmos_core.run.files import SHARED
from cosmos_core.run.lock import Lock
from cosmos_core.run.process import is_alive
from cosmos_core.run.state import ACTIVE, State, read_state, update_state


def reap(output_dir: Path) -> Iterator[str]:
    """End the processes of stages whose flow is gone, and correct what files and the Prefect server say of them; yield
    a line about each."""
    sweep()
    abandoned = [file.parent for file in sorted(output_dir.glob(f"*/{PIPELINE}")) if _is_abandoned(file.parent)]
    for run in abandoned:
        for path in sorted((run / "stages").glob("*")):
            state = read_state(path)
            if state.state not in ACTIVE or is_alive(state.launcher_pid, state.launcher_started):
                continue
            if other := _elsewhere(state):
                yield f"{run.name}/{path.name}: runs on {other}; reap there what is left of it"
                continue
            worker.reap(path)
            update_state(path, state="stopped", ended=time.time(), error="its flow is gone; resume the run")
            yield f"{run.name}/{path.name}: ended; it goes on with: cosmos resume {run}"
    if os.environ.get("PREFECT_API_URL"):
        yield from _on_the_server(output_dir, {run.name for run in abandoned})


def _elsewhere(state: State) -> str:
    """The other machine that runs the stage, with which this one shares the folder, or an empty string; of one that is
    silent nothing is left."""
    is_heard = time.time() - (state.heartbeat or 0.0) < SILENT_SECONDS
    return state.launcher_host if is_heard and state.launcher_host != socket.gethostname() else ""


def _is_abandoned(run: Path) -> bool:
    """Whether no process has claimed the run."""
    with Lock(run / "locks" / ".run") as lock:
        return lock.try_acquire()


def _on_the_server(output_dir: Path, abandoned: set[str]) -> Iterator[str]:
    """Flow runs that the server takes for running, of runs that nobody runs."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.objects import StateType
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    notes = output_dir / SHARED / "flow_runs"
    with get_client(sync_client=True) as client:
        for note in sorted(notes.glob("*")) if notes.is_dir() else []:
            run = note.read_text(encoding="utf-8")
            if run not in abandoned:
                continue
            try:
                found: Any = client.read_flow_run(UUID(note.name))
            except (ObjectNotFound, ValueError):
                continue
            if found.state_type == StateType.RUNNING:
                client.set_flow_run_state(found.id, Crashed(message="its process is gone; resume the run"), force=True)
                yield f"flow run {found.name}: was {found.state_name}, is Crashed"
