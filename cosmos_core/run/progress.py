"""What a worker says about itself while it runs: `progress.json` (now) and `metrics.jsonl` (the whole story).

Only the worker writes these. The launcher tells a hung collective from a long compilation by them: each phase has a
deadline of its own, and what counts is that `progress.json` changes, never what its clock says.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_core.run.files import Document, json_objects, read_document, write_json, write_text
from cosmos_core.run.tail import Tail

# Seconds without a heartbeat after which a phase counts as hung. A phase that is not named here has 600.
PHASE_SECONDS: dict[str, float] = {
    "start": 300, "load": 3600, "compile": 3600, "prepare": 3600, "generate": 1800,
    "score": 1800, "step": 1800, "save": 3600, "validate": 3600, "export": 3600,
}  # fmt: skip
_LEAST_SECONDS = 0.2
"""Between two heartbeats that are written."""


class Position(Document):
    """What `progress.json` holds: where a worker is."""

    pid: int = 0
    phase: str = "start"
    deadline_seconds: float = PHASE_SECONDS["start"]
    step: int = 0
    total: int | None = None
    checkpoint_step: int | None = None
    metrics: dict[str, Any] = {}
    """The newest ones, as a program reported them."""
    started: float = 0.0
    heartbeat: float = 0.0
    compile_seconds: float = 0.0
    """In `compile` so far: no part of a step's pace."""
    done: int = 0
    """Of the `count` of a phase that says how far it is; 0 of 0: it does not."""
    count: int = 0
    longest_step_seconds: float = 0.0
    """The longest time from one step to the next, with what lies between them such as validation."""
    beats: int = 0
    """Raised by each heartbeat."""


class Progress:
    """Writes `progress.json`: phase, step of total, rate, latest metrics, and a heartbeat.

    The heartbeat comes from the calls of the main loop, never from a thread of its own: a thread would go on
    beating while the loop hangs.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_write = 0.0
        self._stepped: float | None = None
        self._compiling = ("start", 0.0)
        self._lock = threading.Lock()  # `saved` comes from the thread that writes checkpoints
        self._position = Position(pid=os.getpid(), started=time.time())
        self._write(force=True)

    @property
    def total(self) -> int | None:
        """Return the number of steps, if it is known."""
        return self._position.total

    def phase(self, name: str, deadline_seconds: float | None = None) -> None:
        """Enter a phase; None takes the phase's usual deadline."""
        changed = name != self._position.phase
        self._position.phase, self._position.done, self._position.count = name, 0, 0
        self._position.deadline_seconds = deadline_seconds or PHASE_SECONDS.get(name, 600)
        self._write(force=changed)

    def step(self, step: int, total: int | None = None, **metrics: float) -> None:
        """Say that `step` of `total` is done; `metrics` are what a progress line shows."""
        now, position = time.monotonic(), self._position
        if self._stepped is not None and step > position.step:
            seconds = (now - self._stepped) / (step - position.step)
            position.longest_step_seconds = max(position.longest_step_seconds, seconds)
        self._stepped = now
        position.step, position.total, position.metrics = step, total, metrics
        self._write(force=step == total)

    def saved(self, step: int) -> None:
        """Say that the checkpoint of `step` is complete: what counts as progress between attempts."""
        self._position.checkpoint_step = step
        self._write(force=True)

    def advance(self, done: int, count: int) -> None:
        """Say how far the present phase is: `done` of `count` rows, prompts or pairs."""
        self._position.done, self._position.count = done, count
        self._write(force=False)

    @property
    def compile_seconds(self) -> float:
        """Return the seconds that torch has compiled so far."""
        return self._position.compile_seconds

    def begin_compiling(self) -> None:
        """Say that torch compiles, until `end_compiling`: the phase is another one meanwhile."""
        self._compiling = (self._position.phase, time.monotonic())
        self.phase("compile")

    def end_compiling(self) -> None:
        """Go back to the phase before `begin_compiling`."""
        phase, began = self._compiling
        self._position.compile_seconds += time.monotonic() - began
        self.phase(phase)

    def beat(self) -> None:
        """Say that the worker is alive and has nothing new."""
        self._write(force=False)

    def _write(self, *, force: bool) -> None:
        now = time.monotonic()
        with self._lock:
            self._position.heartbeat = time.time()
            self._position.beats += 1
            if force or now - self._last_write >= _LEAST_SECONDS:
                self._last_write = now
                write_json(self._path, self._position.model_dump(warnings=False), durable=False)


def read_progress(stage_path: Path) -> Position | None:
    """Return where the worker of a stage is; None: it has not said so, or its file was damaged."""
    return read_document(stage_path / "progress.json", Position)


class Metrics:
    """Appends one JSON object a line to `metrics.jsonl`: `{"step": 12, "time": 1700000000.0, "loss": 0.5, ...}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.watchers: list[Callable[[dict[str, Any]], None]] = []
        """Each is told every line once the file has it; it must neither wait nor raise."""
        self._lock = threading.Lock()

    def log(self, step: int, values: dict[str, float]) -> None:
        """Append the metrics of one step."""
        line = {"step": step, "time": time.time(), **values}
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for tell in self.watchers:
            tell(line)

    def sync(self) -> None:
        """Wait until the lines are on the disk; a checkpoint that follows does not promise more than there is."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def cut_back(self, step: int, again: str = "") -> None:
        """Forget what was logged after `step`, or all of it for step 0: it is about to be measured again. `again`: and
        lines of that step with a metric that begins so."""
        if not self.path.exists():
            return
        kept = [line for line in read_metrics(self.path) if step > 0 and line["step"] <= step]
        if again:
            kept = [e for e in kept if e["step"] < step or not any(name.startswith(again) for name in e)]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))


def has_step(line: dict[str, Any]) -> bool:
    """Return whether a line of a log says which step it is about."""
    return isinstance(line.get("step"), int)


class MetricsReader:
    """The lines of a `metrics.jsonl` that grows, each read once."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self.lines: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Return all lines there are by now; one that a kill has cut, or that is no such line, is passed over."""
        new = self._tail.lines()
        if self._tail.was_replaced:  # cut back when a checkpoint was resumed
            self.lines = []
        self.lines += [line for line in json_objects(new) if has_step(line)]
        return self.lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`; one that a kill has cut, or that is no such line, is passed over."""
    return MetricsReader(path).update()
