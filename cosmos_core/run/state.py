"""`state.json` and `events.jsonl`: where a stage stands and what happened to it. Written by the launcher alone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from cosmos_core.run.files import read_object, write_json

State = dict[str, Any]
FINISHED = frozenset({"done", "reused"})
FRESH: State = {"state": "waiting", "attempt": 0, "failures": 0, "worker_seconds": 0.0, "checkpoint_step": None}


def read_state(stage_path: Path) -> State:
    """Return the state of a stage; one that nobody touched is waiting."""
    return FRESH | read_object(stage_path / "state.json")


def update_state(stage_path: Path, **changes: Any) -> State:
    """Replace some values of the state in one rename.

    It does not wait for the disk, ten times per stage: a kill loses nothing, and a power cut ends what it speaks of.
    """
    stage_path.mkdir(parents=True, exist_ok=True)
    state = {**read_state(stage_path), **changes}
    write_json(stage_path / "state.json", state, durable=False)
    return state


def record_event(stage_path: Path, event: str, detail: str = "") -> None:
    """Append one line to the stage's history."""
    stage_path.mkdir(parents=True, exist_ok=True)
    with open(stage_path / "events.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), "event": event, "detail": detail}) + "\n")
