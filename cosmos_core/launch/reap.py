"""Run `cosmos reap`: kill remaining processes of flows that died on this machine, and correct recorded states."""

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
from cosmos_core.launch.processes import MAX_HEARTBEAT_AGE_SECONDS, remove_orphans
from cosmos_core.run.directory import PIPELINE_FILE, get_flow_runs_folder
from cosmos_core.run.liveness import is_flow_running, read_holder
from cosmos_core.run.lock import FileLock
from cosmos_core.run.process import is_alive
from cosmos_core.run.state import ACTIVE_STATES, read_state, update_state

_CANCELLED_STATES = ("CANCELLING", "CANCELLED")


def reap(output_dir: Path) -> Iterator[str]:
    """Kill the processes of stages whose flow has ended, and correct the state of these stages in files and on the
    Prefect server; yield a line of text about each stage and flow run."""
    remove_orphans()
    abandoned_run_paths = [
        file.parent for file in sorted(output_dir.glob(f"*/{PIPELINE_FILE}")) if _has_lost_launcher(file.parent)
    ]
    abandoned_run_ids = {run_path.name for run_path in abandoned_run_paths}
    for run_path in abandoned_run_paths:
        run_holder = read_holder(run_path)
        for stage_path in sorted((run_path / "stages").glob("*")):
            stage_state = read_state(stage_path)
            if stage_state.state not in ACTIVE_STATES or is_alive(
                stage_state.launcher_pid, stage_state.launcher_started
            ):
                continue
            is_heartbeat_recent = time.time() - stage_state.last_activity_time < MAX_HEARTBEAT_AGE_SECONDS
            launcher_host = stage_state.launcher_host
            if is_heartbeat_recent and launcher_host and launcher_host != socket.gethostname():
                yield f"{run_path.name}/{stage_path.name}: runs on {launcher_host}; reap there what is left of it"
                if run_holder is not None and run_holder.launcher_host == launcher_host:
                    # Keep the run's state: its flow may live on `launcher_host`, whose locks this machine may not see.
                    abandoned_run_ids.discard(run_path.name)
                continue
            worker.reap_attempt(stage_path)
            worker.mask_log_of_killed_launcher(stage_path)
            stop_reason = "its flow is gone; resume the run"
            update_state(stage_path, state="stopped", ended=time.time(), error_type="", error=stop_reason)
            resume_command = f"cosmos resume {shlex.quote(str(run_path))}"
            yield f"{run_path.name}/{stage_path.name}: ended; it goes on with: {resume_command}"
    if os.environ.get("PREFECT_API_URL"):
        yield from _correct_flow_run_states(output_dir, abandoned_run_ids)


def find_cancelled_flow_run(output_dir: Path, run_id: str) -> str:
    """Return the name of a run's newest flow run if this was cancelled on the Prefect server; else an empty string."""
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound

    if newest_flow_run_id := _find_newest_flow_run(output_dir, run_id):
        with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as prefect_client:
            flow_run = prefect_client.read_flow_run(newest_flow_run_id)
            return flow_run.name if flow_run.state_type in _CANCELLED_STATES else ""
    return ""


def _has_lost_launcher(run_path: Path) -> bool:
    """Return True if the launcher of a run has ended: no process holds the run's lock, and no Python flow runs it.
    Return False for a run of another user, whose files and processes this user cannot change."""
    with suppress(PermissionError), FileLock(run_path / "locks" / ".run") as lock:
        return lock.try_acquire() and not is_flow_running(run_path)
    return False


def _correct_flow_run_states(output_dir: Path, abandoned_run_ids: set[str]) -> Iterator[str]:
    """Correct the state of flow runs on the Prefect server if they belong to the runs `abandoned_run_ids`, whose
    processes have ended, and stop the process of each other flow run that was cancelled; yield a line for each."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Cancelled, Crashed

    state_classes: dict[str, Any] = {"CANCELLING": Cancelled, "RUNNING": Crashed}
    with get_client(sync_client=True) as prefect_client:
        for record_file in sorted(get_flow_runs_folder(output_dir).glob("*")):
            try:
                run_id = record_file.read_text(encoding="utf-8")
                flow_run = prefect_client.read_flow_run(UUID(record_file.name))
            except (ObjectNotFound, ValueError):
                continue
            if run_id in abandoned_run_ids:
                if flow_run.state_type in state_classes:
                    corrected_state = state_classes[flow_run.state_type](message="its process is gone; resume the run")
                    prefect_client.set_flow_run_state(flow_run.id, corrected_state, force=True)
                    yield f"flow run {flow_run.name}: was {flow_run.state_name}, is {corrected_state.name}"
            elif flow_run.state_type in _CANCELLED_STATES and flow_run.id == _find_newest_flow_run(output_dir, run_id):
                yield from _stop_flow_process(output_dir / run_id, flow_run.name)


def _stop_flow_process(run_path: Path, flow_run_name: str) -> Iterator[str]:
    """Send SIGTERM to the process of a run on this machine, so that it saves a checkpoint and ends."""
    run_holder, cancellation_text = read_holder(run_path), f"flow run {flow_run_name}: it was cancelled"
    if run_holder and not run_holder.is_local:
        yield f"{cancellation_text}, but its process on {run_holder.launcher_host} goes on: reap there"
    elif run_holder and run_holder.launcher_pid and is_alive(run_holder.launcher_pid, run_holder.launcher_started):
        os.kill(run_holder.launcher_pid, signal.SIGTERM)
        yield f"{cancellation_text}; its process {run_holder.launcher_pid} is asked to save and end"


def _find_newest_flow_run(output_dir: Path, run_id: str) -> UUID | None:
    flow_run_files = [
        file for file in get_flow_runs_folder(output_dir).glob("*") if file.read_text(encoding="utf-8") == run_id
    ]
    newest_flow_run_file = max(flow_run_files, key=lambda file: file.stat().st_mtime, default=None)
    with suppress(ValueError):
        return UUID(newest_flow_run_file.name) if newest_flow_run_file else None
    return None
