"""Whether what a run says of itself still holds: a flow that was killed could not write that it was.

On the machine of the flow its process says so. On another machine a lease does: the launcher renews `state.json` each
two seconds while it follows a worker. What runs in the flow itself, such as an upload, has no lease.
"""

from __future__ import annotations

from pathlib import Path

from cosmos_core.run.files import Document, Seconds, read_document, write_json
from cosmos_core.run.process import is_alive, is_here, this_process
from cosmos_core.run.state import ACTIVE, State

LEASE_SECONDS = 120.0
"""How long a launcher on another machine may be silent; more than clocks of machines differ and stores delay."""
_HOLDER = "holder.json"


class Holder(Document):
    """The process that claimed a run last."""

    launcher_pid: int | None = None
    launcher_started: float | None = None
    launcher_host: str = ""
    launcher_machine: str = ""
    since: Seconds = 0.0
    """When its command began."""


def note_holder(run_path: Path, since: float) -> None:
    """Note that this process has claimed a run, for a command that began at `since` (unix time); one that has claimed
    it before keeps that time."""
    before, me = read_holder(run_path), this_process()
    if before is not None and before.model_dump(exclude={"since"}) == me:
        since = min(since, before.since)
    write_json(run_path / "locks" / _HOLDER, {**me, "since": since}, durable=False)


def read_holder(run_path: Path) -> Holder | None:
    """Return the process that claimed a run last; None: none has, or it is not known."""
    return read_document(run_path / "locks" / _HOLDER, Holder)


def holder_died(run_path: Path) -> float | None:
    """Return when the command began whose process claimed a run last and is gone; None: it is alive, or of another
    machine."""
    holder = read_holder(run_path)
    if holder is None or not is_here(holder.launcher_machine, holder.launcher_host):
        return None
    return None if is_alive(holder.launcher_pid, holder.launcher_started) else holder.since


def is_dead(state: State, now: float) -> bool:
    """Return whether a stage that is said to run is known not to: nothing works on it any more."""
    if state.state not in ACTIVE:
        return False
    if state.launcher_pid is not None and is_here(state.launcher_machine, state.launcher_host):
        # Behind a launcher that is gone the worker may still save.
        launcher, worker = (state.launcher_pid, state.launcher_started), (state.pid, state.pid_started)
        return not is_alive(*launcher) and not is_alive(*worker)
    is_attempt_open = bool(state.spans) and state.spans[-1][1] is None
    return is_attempt_open and state.renewed is not None and now - state.renewed > LEASE_SECONDS
