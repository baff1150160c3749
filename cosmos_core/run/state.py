"""`state.json` and `events.jsonl`: where a stage stands and what happened to it. Written by the launcher alone."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any, Literal

from cosmos_core.environment import mask_error
from cosmos_core.errors import EXIT_CRASH, CosmosError, Preempted, ProgramError
from cosmos_core.run.files import Document, Seconds, read_document, room_may_be_missing, write_json
from cosmos_core.run.manifest import read_result

FINISHED = frozenset({"done", "reused"})
_ADDRESS = re.compile(r"\brank \d+: |\b0x[0-9a-fA-F]+\b")
"""What differs between two messages of the same error."""
ACTIVE = frozenset({"running", "retrying"})


logger = logging.getLogger(__name__)


class State(Document):
    """Where a stage stands."""

    state: Literal["waiting", "running", "retrying", "reused", "done", "failed", "stopped"] = "waiting"
    attempt: int = 0
    spans: list[tuple[Seconds, Seconds | None]] = []
    """Begin and end of each attempt; the end of one that runs, or whose launcher was killed, is None."""
    ended: Seconds | None = None
    """When it came to its present state, if it does nothing now."""
    failures: int = 0
    """Attempts in a row without progress."""
    failed_at: int | None = None
    """Step of the newest checkpoint when the last attempt failed."""
    failed_with: str = ""
    """Error and step of the last attempt, if its program failed with one that may not pass by itself."""
    is_repeated: bool = False
    """The attempt before failed with the same."""
    error: str = ""
    error_type: str = ""
    exit_code: int = EXIT_CRASH
    forced: bool = False
    """It is made again although its result was there: the wish of `forced_by`, a flow run."""
    forced_by: str = ""
    pid: int | None = None
    """Of the supervisor of the worker; with the start time it names the process for good."""
    pid_started: float | None = None
    mark: str = ""
    """What every process of the attempt has in its environment."""
    launcher_pid: int | None = None
    launcher_started: float | None = None
    launcher_host: str = ""
    """Where that process is; folders of runs may be shared by machines."""
    launcher_machine: str = ""
    """The machine and its boot, within which pids mean something; see `run.process.this_machine`."""
    renewed: Seconds | None = None
    """When the launcher last noted that it follows the attempt, as each two seconds: a lease, for other machines."""
    heartbeat: Seconds | None = None
    """This and what follows: what the worker said last."""
    phase: str = ""
    step: int | None = None
    total: int | None = None
    checkpoint_step: int | None = None
    longest_step_seconds: float = 0.0
    """Of all attempts: a worker that is asked to stop gets as long for the step that it is in."""

    def seconds(self, now: float) -> float:
        """Return the time of all attempts, without the pauses between them."""
        return sum(max(0.0, end - begin) for begin, end in self.closed_spans(now))

    def closed_spans(self, now: float) -> list[tuple[float, float]]:
        """Return the attempts; one without an end lasts until the last sign of life that the launcher noted."""
        last = min(max(self.heartbeat or 0.0, self.renewed or 0.0) or now, now)
        return [(begin, max(begin, last) if end is None else end) for begin, end in self.spans]


def read_state(stage_path: Path) -> State:
    """Return the state of a stage; where it is missing, damaged or could not be written, what its manifest says.

    A new attempt begins with the removal of the manifest: whichever has one is done.
    """
    found = read_document(stage_path / "state.json", State)
    if (found is None or found.state == "running") and read_result(stage_path) is not None:
        return (found or State()).model_copy(update={"state": "done"})
    return found or State()


def update_state(stage_path: Path, **changes: Any) -> State:
    """Replace some values of the state in one rename.

    It does not wait for the disk, ten times per stage: a kill loses nothing, and a power cut ends what it speaks of.
    """
    stage_path.mkdir(parents=True, exist_ok=True)
    state = read_state(stage_path).model_copy(update=changes)
    write_json(stage_path / "state.json", state.model_dump(), durable=False)
    return state


def record_event(stage_path: Path, event: str, detail: str = "") -> None:
    """Append one line to the stage's history."""
    stage_path.mkdir(parents=True, exist_ok=True)
    with open(stage_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "event": event, "detail": detail}) + "\n")


def record_failure(stage_path: Path, error: CosmosError) -> None:
    """Note how an attempt ended, and count attempts without progress; a preemption is none. Mask secrets in `error`."""
    mask_error(error)
    state, is_preempted = read_state(stage_path), isinstance(error, Preempted)
    gained = (state.checkpoint_step or 0) > (state.failed_at or 0)
    failures = state.failures if is_preempted else 1 if gained else state.failures + 1
    failed_with = f"step {state.step}: {_ADDRESS.sub('', str(error))}" if isinstance(error, ProgramError) else ""
    is_repeated = bool(failed_with) and failed_with == state.failed_with
    if is_repeated:
        logger.warning("stage %s: the same error at the same step twice; it is not tried again", stage_path.name)
    with room_may_be_missing(f"the failure of stage {stage_path.name}"):
        update_state(
            stage_path, state="stopped" if is_preempted else "failed", failures=failures,
            failed_at=state.checkpoint_step, failed_with=failed_with, is_repeated=is_repeated, error=str(error),
            error_type=type(error).__name__, exit_code=error.exit_code, ended=time.time(),
        )  # fmt: skip
        record_event(stage_path, "preempted" if is_preempted else "crashed", str(error))
