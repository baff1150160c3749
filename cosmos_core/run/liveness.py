"""Detection of runs whose flow process was killed, and whose state on disk is therefore outdated.

On the machine of the flow, its process is checked. From another machine, a lease is checked: the launcher renews
`state.json` every two seconds while it follows a worker. A stage that runs in the flow itself, such as an upload, has
no lease.
"""

from __future__ import annotations

from pathlib import Path

from cosmos_core.run.files import Document, Seconds, read_document, write_json
from cosmos_core.run.process import is_alive, is_here, this_process
from cosmos_core.run.state import ACTIVE, State

LEASE_SECONDS = 120.0
"""Seconds without a renewal after which a launcher on another machine counts as dead; longer than clock skew and delays
of shared storage."""
_HOLDER = "holder.json"


class Holder(Document):
    """The process that last claimed a run."""

    launcher_pid: int | None = None
    launcher_started: float | None = None
    launcher_host: str = ""
    launcher_machine: str = ""
    since: Seconds = 0.0
    """Time at which the command of the process began."""


def note_holder(run_path: Path, since: float) -> None:
    """Record that this process has claimed a run for a command that began at `since` (unix time); a repeated claim by
    the same process keeps the earliest time."""
    previous, me = read_holder(run_path), this_process()
    if previous is not None and previous.model_dump(exclude={"since"}) == me:
        since = min(since, previous.since)
    write_json(run_path / "locks" / _HOLDER, {**me, "since": since}, durable=False)


def read_holder(run_path: Path) -> Holder | None:
    """Return the process that last claimed a run; None if there is none or it is unknown."""
    return read_document(run_path / "locks" / _HOLDER, Holder)


def holder_died(run_path: Path) -> float | None:
    """Return the start time of the command whose process last claimed a run, if that process has ended; None if it is
    alive or runs on another machine."""
    holder = read_holder(run_path)
    if holder is None or not is_here(holder.launcher_machine, holder.launcher_host):
        return None
    return None if is_alive(holder.launcher_pid, holder.launcher_started) else holder.since


def is_dead(state: State, now: float) -> bool:
    """Return True if a stage is marked as running although its launcher and its worker have ended."""
    if state.state not in ACTIVE:
        return False
    if state.launcher_pid is not None and is_here(state.launcher_machine, state.launcher_host):
        # The worker may still save a checkpoint after its launcher has ended.
        launcher, worker = (state.launcher_pid, state.launcher_started), (state.pid, state.pid_started)
        return not is_alive(*launcher) and not is_alive(*worker)
    is_attempt_open = bool(state.spans) and state.spans[-1][1] is None
    return is_attempt_open and state.renewed is not None and now - state.renewed > LEASE_SECONDS
