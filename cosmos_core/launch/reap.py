"""Run `cosmos reap`: kill the remaining processes of flows that died on this machine, and correct the recorded
states."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from cosmos_core.launch import worker
from cosmos_core.launch.processes import SILENT_SECONDS, sweep
from cosmos_core.run.directory import PIPELINE, flow_run_notes
from cosmos_core.run.liveness import read_holder
from cosmos_core.run.lock import Lock
from cosmos_core.run.process import is_alive, ran_on_this_machine
from cosmos_core.run.state import ACTIVE, State, read_state, update_state

_CANCELLED = ("CANCELLING", "CANCELLED")


def reap(output_dir: Path) -> Iterator[str]:
    """Kill the processes of stages whose flow has ended, and correct the state of these stages in files and on the
    Prefect server; yield a line of text about each stage and flow run."""
    sweep()
    abandoned_runs = [
        file.parent for file in sorted(output_dir.glob(f"*/{PIPELINE}")) if _has_lost_launcher(file.parent)
    ]
    for run in abandoned_runs:
        for path in sorted((run / "stages").glob("*")):
            state = read_state(path)
            if state.state not in ACTIVE or is_alive(state.launcher_pid, state.launcher_started):
                continue
            is_recent = time.time() - (state.heartbeat or 0.0) < SILENT_SECONDS
            if is_recent and state.launcher_host and state.launcher_host != socket.gethostname():
                yield f"{run.name}/{path.name}: runs on {state.launcher_host}; reap there what is left of it"
                continue
            worker.reap(path)
            reason = "its flow is gone; resume the run"
            update_state(path, state="stopped", ended=time.time(), error_type="", error=reason)
            yield f"{run.name}/{path.name}: ended; it goes on with: cosmos resume {run}"
    if os.environ.get("PREFECT_API_URL"):
        yield from _correct_flow_runs(output_dir, {run.name for run in abandoned_runs})


def cancelled_flow_run(output_dir: Path, run_id: str) -> str:
    """Return the name of the newest flow run of a run if it was cancelled on the Prefect server. Return an empty string
    if it was not, or if no server responds."""
    import httpx

    newest = _newest(output_dir, run_id)
    try:
        flow_runs = [each for run, each in _flow_runs(output_dir) if run == run_id and each.id == newest]
    except httpx.HTTPError:
        return ""
    return next((str(each.name) for each in flow_runs if each.state_type in _CANCELLED), "")


def _has_lost_launcher(run: Path) -> bool:
    """Return True if no live process holds the lock of the run."""
    with Lock(run / "locks" / ".run") as lock:
        return lock.try_acquire()


def _correct_flow_runs(output_dir: Path, abandoned_run_names: set[str]) -> Iterator[str]:
    """Correct the state of flow runs whose process has ended, and stop the process of a cancelled flow run."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled, Crashed, State

    for run, flow_run in _flow_runs(output_dir):
        is_cancelling = flow_run.state_type == "CANCELLING"
        state: State[Any] | None = None
        if run in abandoned_run_names and (is_cancelling or flow_run.state_type == "RUNNING"):
            message = "its process is gone; resume the run"
            state = Cancelled(message=message) if is_cancelling else Crashed(message=message)
        elif (
            run not in abandoned_run_names
            and flow_run.state_type in _CANCELLED
            and flow_run.id == _newest(output_dir, run)
        ):
            yield from _stop(output_dir / run, flow_run.name)
        if isinstance(state, State):
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(flow_run.id, state, force=True)
            yield f"flow run {flow_run.name}: was {flow_run.state_name}, is {state.name}"


def _stop(run: Path, flow_run: str) -> Iterator[str]:
    """Send SIGTERM to the process of a run on this machine, so that it saves a checkpoint and ends."""
    holder = read_holder(run)
    if holder and ran_on_this_machine(holder.launcher_machine, holder.launcher_host):
        if not holder.launcher_pid or not is_alive(holder.launcher_pid, holder.launcher_started):
            return
        os.kill(holder.launcher_pid, signal.SIGTERM)
        yield f"flow run {flow_run}: it was cancelled; its process {holder.launcher_pid} is asked to save and end"
    elif holder:
        yield f"flow run {flow_run}: it was cancelled, but its process on {holder.launcher_host} goes on: reap there"


def _newest(output_dir: Path, run: str) -> UUID | None:
    """Return the id of the flow run that last worked on a run."""
    notes = [note for note in flow_run_notes(output_dir).glob("*") if note.read_text(encoding="utf-8") == run]
    newest = max(notes, key=lambda note: note.stat().st_mtime, default=None)
    with suppress(ValueError):
        return UUID(newest.name) if newest else None
    return None


def _flow_runs(output_dir: Path) -> Iterator[tuple[str, Any]]:
    """Yield (run id, flow run) for each flow run of this output folder that exists on the Prefect server."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    notes = flow_run_notes(output_dir)
    with get_client(sync_client=True) as client:
        for note in sorted(notes.glob("*")) if notes.is_dir() else []:
            with suppress(ObjectNotFound, ValueError):
                yield note.read_text(encoding="utf-8"), client.read_flow_run(UUID(note.name))
