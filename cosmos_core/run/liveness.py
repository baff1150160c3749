"""Detection of runs whose flow process was killed, and whose state on disk is therefore outdated.

On the machine of the flow, its process is checked. From another machine, a lease is checked: the launcher renews
`state.json` every two seconds while it follows a worker. A stage that runs in the flow itself, such as an upload, has
no lease.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from cosmos_core.errors import ConfigError
from cosmos_core.run.files import JsonDocument, UnixSeconds, read_document, warn_if_disk_full, write_json
from cosmos_core.run.process import Launcher, identify_process, is_alive
from cosmos_core.run.state import ACTIVE_STATES, FINISHED_STATES, StageState, read_state

APPROVAL_TIMEOUT_SECONDS = 7 * 24 * 3600
"""Seconds that a flow run waits until a person approves or declines the publication of its models."""
LEASE_SECONDS = 120.0
"""Seconds without renewal after which a remote launcher counts as dead; longer than clock skew and storage delays."""
_HOLDER_FILE = "holder.json"
_APPROVAL_FILE = "approval.json"


class RunHolder(Launcher):
    """Content of `holder.json`: the process that last claimed a run."""

    since: UnixSeconds = 0.0
    """Time at which the command of the process began, in seconds since 1970."""
    flow_state: Literal["", "running", "completed", "failed", "stopped"] = ""
    """State of the Python flow that the process executes; for a TOML file, empty or `stopped` after a stop request."""

    @property
    def is_this_process(self) -> bool:
        """Return True if this process claimed the run."""
        return self.model_dump(exclude={"since", "flow_state"}) == identify_process()


class PublicationApproval(JsonDocument):
    """Content of `approval.json` of a run that publishes its models only after a person has approved them."""

    until: UnixSeconds = 0.0
    """Time at which the pending request expires, in seconds since 1970; 0: no request is pending."""
    flow_run: str = ""
    """Id of the flow run that is suspended until a person approves or declines."""
    is_declined: bool = False
    approved_models: str = ""
    """Digest of the models that a person has approved; empty: none."""


def save_approval(run_path: Path, approval: PublicationApproval | None) -> None:
    """Save the approval that the publication of a run needs; None removes the saved approval, because no approval is
    needed."""
    approval_file = run_path / "locks" / _APPROVAL_FILE
    if approval is None:
        approval_file.unlink(missing_ok=True)
    else:
        write_json(approval_file, approval.model_dump(), fsync=False)


def read_required_approval(run_path: Path) -> PublicationApproval | None:
    """Return the approval that the publication of a run needs; None if no approval is needed."""
    return read_document(run_path / "locks" / _APPROVAL_FILE, PublicationApproval)


def read_open_approval(run_path: Path) -> PublicationApproval | None:
    """Return the pending or declined request to approve the publication of a run; None if there is no such request."""
    approval = read_required_approval(run_path)
    return approval if approval and (approval.is_declined or time.time() < approval.until) else None


def check_approval(run_path: Path) -> None:
    """Raise ConfigError if the publication of a run needs the approval of a person and has none yet. `cosmos resume`
    and the flow `post-train` call this, because only the flow run that requested the approval can continue such a
    run."""
    approval = read_required_approval(run_path)
    if approval is not None and not approval.approved_models:
        raise ConfigError(
            f"run {run_path.name} publishes only what a person has approved in the UI of Prefect: approve or retry its "
            "flow run there; cosmos run with its config reuses what is done and publishes without an approval"
        )


def record_run_holder(run_path: Path, start_time: float) -> None:
    """Record that this process claimed a run; if it did so before, keep the earlier one of the two start times."""
    previous_holder = read_holder(run_path)
    if previous_holder is not None and previous_holder.is_this_process:
        start_time = min(start_time, previous_holder.since)
    write_json(run_path / "locks" / _HOLDER_FILE, {**identify_process(), "since": start_time}, fsync=False)
    if approval := read_required_approval(run_path):  # drop a pending request for approval; the flow run repeats it
        save_approval(run_path, PublicationApproval(approved_models=approval.approved_models))


def read_holder(run_path: Path) -> RunHolder | None:
    """Return the process that last claimed a run; None if no process did, or if the file that names it is damaged."""
    return read_document(run_path / "locks" / _HOLDER_FILE, RunHolder)


def record_flow_state(run_path: Path, flow_state: str) -> None:
    """Record the state of the flow that this process executes, unless another process has claimed the run."""
    run_holder = read_holder(run_path)
    if run_holder is not None and run_holder.is_this_process:
        holder_path = run_path / "locks" / _HOLDER_FILE
        with warn_if_disk_full(f"that the flow of run {run_path.name} is {flow_state or 'completed'}"):
            write_json(holder_path, {**run_holder.model_dump(), "flow_state": flow_state}, fsync=False)


def record_stop(run_path: Path, stage_names: Iterable[str]) -> None:
    """Record that the flow of a TOML file received a request to stop, unless all stages in `stage_names` are
    finished."""
    if not all(read_state(run_path / "stages" / name).state in FINISHED_STATES for name in stage_names):
        record_flow_state(run_path, "stopped")


def is_flow_running(run_path: Path) -> bool:
    """Return True if a Python flow executes a run, also between stages, and its process is not known to have ended."""
    return _read_flow_state(run_path) == "running" and find_dead_holder_start_time(run_path) is None


def has_flow_completed(run_path: Path) -> bool:
    """Return True if the last execution of a Python flow has completed, even if the flow caught the failure of a
    stage."""
    return _read_flow_state(run_path) == "completed"


def derive_flow_outcome(run_path: Path) -> Literal["done", "failed", "stopped", "running", "died"]:
    """Return the outcome of a run whose stages are finished: `done`, unless the code of its Python flow still runs
    (`running`), was killed (`died`), has failed or was stopped."""
    match _read_flow_state(run_path):
        case "failed" | "stopped" as flow_state:
            return flow_state
        case "running":
            return "running" if find_dead_holder_start_time(run_path) is None else "died"
    return "done"


def derive_inactive_run_outcome(run_path: Path) -> Literal["running", "stopped", "died"]:
    """Return the outcome of a run of which no stage is active and at least one is still to run: `stopped` after a stop
    request, `died` if its process on this machine has ended, otherwise `running`."""
    if _read_flow_state(run_path) == "stopped":
        return "stopped"
    return "running" if find_dead_holder_start_time(run_path) is None else "died"


def _read_flow_state(run_path: Path) -> Literal["", "running", "completed", "failed", "stopped"]:
    run_holder = read_holder(run_path)
    return run_holder.flow_state if run_holder else ""


def find_dead_holder_start_time(run_path: Path) -> float | None:
    """Return the start time of the command whose process claimed a run and has ended. Return None if no process claimed
    the run, or if the process is alive or on another machine."""
    run_holder = read_holder(run_path)
    return run_holder.since if run_holder is not None and run_holder.has_ended else None


def has_lost_launcher(stage_state: StageState) -> bool:
    """Return True if a stage's launcher ran on this machine and has ended; its worker may still save a checkpoint."""
    return stage_state.launcher_pid is not None and stage_state.has_ended


def is_stage_dead(stage_state: StageState, current_time: float) -> bool:
    """Return True if a stage is marked as running although its launcher and its worker have ended or, on another
    machine, its launcher has not renewed `state.json` for `LEASE_SECONDS`."""
    if stage_state.state not in ACTIVE_STATES:
        return False
    if stage_state.launcher_pid is not None and stage_state.is_local:
        return has_lost_launcher(stage_state) and not is_alive(stage_state.pid, stage_state.pid_started)
    is_attempt_running = bool(stage_state.spans) and stage_state.spans[-1][1] is None
    return is_attempt_running and stage_state.renewed is not None and current_time - stage_state.renewed > LEASE_SECONDS
