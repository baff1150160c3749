"""Run `cosmos reap`: kill the remaining processes of flows that died on this machine, and correct the recorded
states."""

from __future__ import annotations

import os
import shlex
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
from cosmos_core.run.liveness import is_flow_running, read_holder
from cosmos_core.run.lock import Lock
from cosmos_core.run.process import is_alive, ran_on_this_machine
from cosmos_core.run.state import ACTIVE, State, read_state, update_state

_CANCELLED_STATES = ("CANCELLING", "CANCELLED")


def reap(output_dir: Path) -> Iterator[str]:
    """Kill the processes of stages whose flow has ended, and correct the state of these stages in files and on the
    Prefect server; yield a line of text about each stage and flow run."""
    sweep()
    abandoned_runs = [
        file.parent for file in sorted(output_dir.glob(f"*/{PIPELINE}")) if _has_lost_launcher(file.parent)
    ]
    for run_path in abandoned_runs:
        for stage_path in sorted((run_path / "stages").glob("*")):
            state = read_state(stage_path)
            if state.state not in ACTIVE or is_alive(state.launcher_pid, state.launcher_started):
                continue
            is_recent = time.time() - (state.heartbeat or 0.0) < SILENT_SECONDS
            if is_recent and state.launcher_host and state.launcher_host != socket.gethostname():
                yield f"{run_path.name}/{stage_path.name}: runs on {state.launcher_host}; reap there what is left of it"
                continue
            worker.reap(stage_path)
            reason = "its flow is gone; resume the run"
            update_state(stage_path, state="stopped", ended=time.time(), error_type="", error=reason)
            command = f"cosmos resume {shlex.quote(str(run_path))}"
            yield f"{run_path.name}/{stage_path.name}: ended; it goes on with: {command}"
    if os.environ.get("PREFECT_API_URL"):
        yield from _correct_flow_runs(output_dir, {run_path.name for run_path in abandoned_runs})


def cancelled_flow_run(output_dir: Path, run_id: str) -> str:
    """Return the name of the newest flow run of a run if it was cancelled on the Prefect server. Return an empty string
    if it was not, or if no server responds."""
    import httpx

    newest_id = _find_newest_flow_run(output_dir, run_id)
    try:
        flow_runs = [
            flow_run for run, flow_run in _read_flow_runs(output_dir) if run == run_id and flow_run.id == newest_id
        ]
    except httpx.HTTPError:
        return ""
    return next((str(flow_run.name) for flow_run in flow_runs if flow_run.state_type in _CANCELLED_STATES), "")


def _has_lost_launcher(run_path: Path) -> bool:
    """Return True if no live process holds the lock of the run, and no Python flow is between two stages of it."""
    with Lock(run_path / "locks" / ".run") as lock:
        return lock.try_acquire() and not is_flow_running(run_path)


def _correct_flow_runs(output_dir: Path, abandoned_run_names: set[str]) -> Iterator[str]:
    """Correct the state of flow runs whose process has ended, and stop the process of a cancelled flow run."""
    from prefect.client.orchestration import get_client
    from prefect.states import Cancelled, Crashed, State

    for run_id, flow_run in _read_flow_runs(output_dir):
        is_cancelling = flow_run.state_type == "CANCELLING"
        state: State[Any] | None = None
        if run_id in abandoned_run_names and (is_cancelling or flow_run.state_type == "RUNNING"):
            message = "its process is gone; resume the run"
            state = Cancelled(message=message) if is_cancelling else Crashed(message=message)
        elif (
            run_id not in abandoned_run_names
            and flow_run.state_type in _CANCELLED_STATES
            and flow_run.id == _find_newest_flow_run(output_dir, run_id)
        ):
            yield from _stop_flow_process(output_dir / run_id, flow_run.name)
        if isinstance(state, State):
            with get_client(sync_client=True) as client:
                client.set_flow_run_state(flow_run.id, state, force=True)
            yield f"flow run {flow_run.name}: was {flow_run.state_name}, is {state.name}"


def _stop_flow_process(run_path: Path, flow_run_name: str) -> Iterator[str]:
    """Send SIGTERM to the process of a run on this machine, so that it saves a checkpoint and ends."""
    claiming_process = read_holder(run_path)
    if claiming_process and ran_on_this_machine(claiming_process.launcher_machine, claiming_process.launcher_host):
        if not claiming_process.launcher_pid or not is_alive(
            claiming_process.launcher_pid, claiming_process.launcher_started
        ):
            return
        os.kill(claiming_process.launcher_pid, signal.SIGTERM)
        yield (
            f"flow run {flow_run_name}: it was cancelled; its process {claiming_process.launcher_pid} is asked to "
            f"save and end"
        )
    elif claiming_process:
        yield (
            f"flow run {flow_run_name}: it was cancelled, but its process on {claiming_process.launcher_host} goes "
            f"on: reap there"
        )


def _find_newest_flow_run(output_dir: Path, run_id: str) -> UUID | None:
    """Return the id of the flow run that last worked on a run."""
    note_files = [
        note_file
        for note_file in flow_run_notes(output_dir).glob("*")
        if note_file.read_text(encoding="utf-8") == run_id
    ]
    newest_note = max(note_files, key=lambda note: note.stat().st_mtime, default=None)
    with suppress(ValueError):
        return UUID(newest_note.name) if newest_note else None
    return None


def _read_flow_runs(output_dir: Path) -> Iterator[tuple[str, Any]]:
    """Yield (run id, flow run) for each flow run of this output folder that exists on the Prefect server."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    notes_folder = flow_run_notes(output_dir)
    with get_client(sync_client=True) as client:
        for note_file in sorted(notes_folder.glob("*")) if notes_folder.is_dir() else []:
            with suppress(ObjectNotFound, ValueError):
                yield note_file.read_text(encoding="utf-8"), client.read_flow_run(UUID(note_file.name))
