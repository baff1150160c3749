"""`state.json` and `events.jsonl`: current state and history of a stage, written by the launcher only."""

import json
import logging
import re
import time
from pathlib import Path
from typing import Any, Literal

from cosmos_core.environment import mask_error_message, mask_text
from cosmos_core.errors import EXIT_CRASH, EXIT_REFUSED, CosmosError, OverBudget, Preempted, ProgramError
from cosmos_core.run.files import JsonDocument, UnixSeconds, read_document, warn_if_disk_full, write_json
from cosmos_core.run.manifest import read_result
from cosmos_core.run.process import Launcher

FINISHED_STATES = frozenset({"done", "reused"})
_RANK_OR_ADDRESS_PATTERN = re.compile(r"\brank \d+: |\b0x[0-9a-fA-F]+\b")
"""Pattern of ranks and memory addresses, which may differ between two messages of the same error."""
RERUN_EVENT = "remade"
"""Name of the event for a finished stage that runs again; the detail of the event is the reason."""
ACTIVE_STATES = frozenset({"running", "retrying"})

logger = logging.getLogger(__name__)


class GpuInterval(JsonDocument):
    """Time interval in which an attempt of a stage held GPUs, to compute costs and budgets."""

    attempt: int
    gpus: int
    """Number of GPUs; on a machine without GPUs, the number of ranks and engines of the stage."""
    begin: UnixSeconds
    end: UnixSeconds | None = None
    """End of the interval; None if the attempt still holds the GPUs, or if its launcher was killed."""


class StageState(Launcher):
    """Content of `state.json`: the current state of a stage."""

    state: Literal["waiting", "running", "retrying", "reused", "done", "failed", "stopped"] = "waiting"
    attempt: int = 0
    spans: list[tuple[UnixSeconds, UnixSeconds | None]] = []
    """Start and end of each attempt; the end is None if the attempt is running or its launcher was killed."""
    holds: list[GpuInterval] = []
    """Intervals in which the attempts held GPUs; see `run.gpu_time`."""
    ended: UnixSeconds | None = None
    """Time at which the stage entered its current state; None while the stage is active."""
    failures: int = 0
    """Number of consecutive failed attempts without progress."""
    failed_at: int | None = None
    """Step of the newest checkpoint when the last attempt failed; None: no attempt failed, or there was no
    checkpoint."""
    failed_with: str = ""
    """Step and error message of the last attempt if its program failed with a permanent error; otherwise empty."""
    is_repeated: bool = False
    """Whether the two last attempts failed with the same error at the same step."""
    error: str = ""
    error_type: str = ""
    exit_code: int = EXIT_CRASH
    forced: bool = False
    """Whether the stage runs again although it has a result, because the flow run `forced_by` requested that."""
    forced_by: str = ""
    pid: int | None = None
    """Pid of the supervisor of the worker; with the start time it identifies the process uniquely."""
    pid_started: float | None = None
    mark: str = ""
    """Value of the environment variable that marks every process of the attempt."""
    renewed: UnixSeconds | None = None
    """Time at which the launcher last renewed its lease on the attempt, as it does every two seconds while it runs."""
    heartbeat: UnixSeconds | None = None
    """Time of the last heartbeat of the worker; this and the following fields are from its last progress report."""
    phase: str = ""
    step: int | None = None
    total: int | None = None
    checkpoint_step: int | None = None
    longest_step_seconds: float = 0.0
    """Longest step of all attempts in seconds: a worker that must stop gets this time to finish its current step."""

    @property
    def status(self) -> str:
        """Return the displayed state: `refused` for a gate that refused, otherwise `state`."""
        return "refused" if self.state == "failed" and self.exit_code == EXIT_REFUSED else self.state

    @property
    def is_over_budget(self) -> bool:
        """Return True if the stage has stopped because the budget of its run is spent."""
        return self.state == "stopped" and self.error_type == OverBudget.__name__

    @property
    def last_activity_time(self) -> float:
        """Return the time at which the worker or the launcher last recorded that it is alive; 0 if neither has."""
        return max(self.heartbeat or 0.0, self.renewed or 0.0)

    def total_seconds(self, current_time: float) -> float:
        """Return the total duration of all attempts in seconds, without the pauses between attempts."""
        return sum(max(0.0, end - begin) for begin, end in self.list_attempt_times(current_time))

    def list_attempt_times(self, current_time: float) -> list[tuple[float, float]]:
        """Return start and end of all attempts; for an attempt without an end, the end is `last_activity_time`."""
        last_activity_time = min(self.last_activity_time or current_time, current_time)
        return [(begin, max(begin, last_activity_time) if end is None else end) for begin, end in self.spans]


def read_state(stage_path: Path) -> StageState:
    """Return the state of a stage from `state.json`; if the file is missing, damaged or outdated, derive the state from
    the manifest."""
    # A new attempt removes the manifest when it begins, so a stage with a manifest is done.
    state = read_document(stage_path / "state.json", StageState)
    if (state is None or state.state == "running") and read_result(stage_path) is not None:
        return (state or StageState()).model_copy(update={"state": "done"})
    return state or StageState()


def update_state(stage_path: Path, **changed_fields: Any) -> StageState:
    """Replace some fields of `state.json` atomically, but without a sync to disk: only a power failure, which also ends
    the attempt that the state describes, can lose the change."""
    stage_path.mkdir(parents=True, exist_ok=True)
    state = read_state(stage_path).model_copy(update=changed_fields)
    write_json(stage_path / "state.json", state.model_dump(), fsync=False)
    return state


def record_event(stage_path: Path, event: str, detail: str = "") -> None:
    """Append an event to `events.jsonl`, the history of a stage."""
    stage_path.mkdir(parents=True, exist_ok=True)
    with open(stage_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "event": event, "detail": mask_text(detail)}) + "\n")


def record_failure(stage_path: Path, error: CosmosError) -> None:
    """Record the error that ended an attempt, with masked secrets. Count attempts that failed without progress; an
    attempt that was preempted does not count."""
    mask_error_message(error)
    state, is_preemption = read_state(stage_path), isinstance(error, Preempted)
    has_progressed = (state.checkpoint_step or 0) > (state.failed_at or 0)
    num_consecutive_failures = state.failures if is_preemption else 1 if has_progressed else state.failures + 1
    comparable_message = _RANK_OR_ADDRESS_PATTERN.sub("", str(error))
    failure_message = f"step {state.step}: {comparable_message}" if isinstance(error, ProgramError) else ""
    repeats_failure = bool(failure_message) and failure_message == state.failed_with
    if repeats_failure:
        logger.warning("stage %s: the same error at the same step twice; it is not tried again", stage_path.name)
    with warn_if_disk_full(f"the failure of stage {stage_path.name}"):
        update_state(
            stage_path, state="stopped" if is_preemption else "failed", failures=num_consecutive_failures,
            failed_at=state.checkpoint_step, failed_with=failure_message, is_repeated=repeats_failure, error=str(error),
            error_type=type(error).__name__, exit_code=error.exit_code, ended=time.time(),
        )  # fmt: skip
        record_event(stage_path, "preempted" if is_preemption else "crashed", str(error))
