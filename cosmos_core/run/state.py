"""`state.json` and `events.jsonl`: where a stage stands and what happened to it. Written by the launcher alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from cosmos_core.errors import EXIT_CRASH
from cosmos_core.run.files import Document, Seconds, read_document, write_json
from cosmos_core.run.manifest import read_result

FINISHED = frozenset({"done", "reused"})
ACTIVE = frozenset({"running", "retrying"})


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
    heartbeat: Seconds | None = None
    """This and what follows: what the worker said last."""
    phase: str = ""
    step: int | None = None
    total: int | None = None
    checkpoint_step: int | None = None

    def seconds(self, now: float) -> float:
        """Return the time of all attempts, without the pauses between them."""
        return sum(max(0.0, end - begin) for begin, end in self.closed_spans(now))

    def closed_spans(self, now: float) -> list[tuple[float, float]]:
        """Return the attempts; one without an end lasts until the last heartbeat that the launcher noted."""
        last = min(self.heartbeat or now, now)
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
