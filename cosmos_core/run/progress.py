"""Progress that a worker reports while it runs: `progress.json` (current state) and `metrics.jsonl` (history).

Only the worker writes these files. The launcher uses them to distinguish a hung collective from a long compilation:
each phase has its own deadline, and the launcher checks that `progress.json` changes, not the times in it.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cosmos_core.run.files import JsonDocument, parse_json_objects, read_document, write_json, write_text
from cosmos_core.run.tail import FileTail

# Seconds without a heartbeat after which a phase counts as hung, by phase; all other phases have 600 seconds.
PHASE_TIMEOUT_SECONDS: dict[str, float] = {
    "start": 300, "load": 3600, "compile": 3600, "prepare": 3600, "generate": 1800,
    "score": 1800, "step": 1800, "save": 3600, "validate": 3600,
    "export": 6 * 3600,  # time to write and read 1 TB at 100 MB/s without a heartbeat
}  # fmt: skip
_MAX_WARNINGS = 5
_MIN_HEARTBEAT_SECONDS = 0.2
"""Minimum number of seconds between two heartbeats that are written to disk."""


class ProgressRecord(JsonDocument):
    """Content of `progress.json`: phase, step and heartbeat of a worker."""

    pid: int = 0
    phase: str = "start"
    deadline_seconds: float = PHASE_TIMEOUT_SECONDS["start"]
    step: int = 0
    total: int | None = None
    checkpoint_step: int | None = None
    metrics: dict[str, Any] = {}
    """Latest metrics that the program of the stage reported."""
    heartbeat: float = 0.0
    compile_seconds: float = 0.0
    """Seconds in the phase `compile` so far, which are not part of the step time."""
    done: int = 0
    """Number of items, out of `count`, that the current phase has processed; 0 if the phase reports no items."""
    count: int = 0
    longest_step_seconds: float = 0.0
    """Longest time from one step to the next in seconds, including validation and other work between steps."""
    beats: int = 0
    """Number of heartbeats so far, by which the launcher notices progress."""
    warnings: list[str] = []
    """First warnings that the attempt logged, each of them once; the log has all of them."""


class ProgressWriter:
    """Writer of `progress.json`: phase, step, latest metrics and a heartbeat. The heartbeats come from calls in the
    main loop, because a separate thread would continue while the loop hangs."""

    def __init__(self, path: Path) -> None:
        self._progress_file = path
        self._last_write_time = 0.0
        self._last_step_time: float | None = None
        self._phase_and_compile_start = ("start", 0.0)
        self._lock = threading.RLock()  # reentrant, because a write may log a warning, which calls `warn`
        self._progress_record = ProgressRecord(pid=os.getpid())
        self._write(should_write_now=True)

    @property
    def total(self) -> int | None:
        """Return the total number of steps of the stage, or None if it is unknown."""
        return self._progress_record.total

    def phase(self, name: str, deadline_seconds: float | None = None) -> None:
        """Enter a phase, which counts as hung after `deadline_seconds` (None: its default) without heartbeat."""
        is_new_phase = name != self._progress_record.phase
        self._progress_record.phase, self._progress_record.done, self._progress_record.count = name, 0, 0
        self._progress_record.deadline_seconds = deadline_seconds or PHASE_TIMEOUT_SECONDS.get(name, 600)
        self._write(should_write_now=is_new_phase)

    def step(self, step: int, total: int | None = None, **metrics: float) -> None:
        """Report that step `step` of `total` steps is done; the progress line shows `metrics`."""
        current_time, progress_record = time.monotonic(), self._progress_record
        if self._last_step_time is not None and step > progress_record.step:
            seconds_per_step = (current_time - self._last_step_time) / (step - progress_record.step)
            progress_record.longest_step_seconds = max(progress_record.longest_step_seconds, seconds_per_step)
        self._last_step_time = current_time
        progress_record.step, progress_record.total, progress_record.metrics = step, total, metrics
        self._write(should_write_now=step == total)

    def report_checkpoint(self, step: int) -> None:
        """Report that the checkpoint of `step` is complete, which counts as progress of the attempt."""
        self._progress_record.checkpoint_step = step
        self._write(should_write_now=True)

    def advance(self, num_done: int, count: int) -> None:
        """Report that `num_done` of `count` rows, prompts or pairs of the current phase are processed."""
        self._progress_record.done, self._progress_record.count = num_done, count
        self._write(should_write_now=False)

    @property
    def compile_seconds(self) -> float:
        """Return the seconds that torch has spent compiling so far."""
        return self._progress_record.compile_seconds

    def begin_compiling(self) -> None:
        """Enter the phase `compile`, which lasts until `end_compiling` is called."""
        self._phase_and_compile_start = (self._progress_record.phase, time.monotonic())
        self.phase("compile")

    def end_compiling(self) -> None:
        """Record that compilation has ended: the progress file shows the phase before `compile` again."""
        phase, start_time = self._phase_and_compile_start
        self._progress_record.compile_seconds += time.monotonic() - start_time
        self.phase(phase)

    def warn(self, message: str) -> None:
        """Report a warning, which the console and the report show; only the first few different ones are kept."""
        with self._lock:
            if message in self._progress_record.warnings or len(self._progress_record.warnings) >= _MAX_WARNINGS:
                return
            self._progress_record.warnings.append(message)
        self._write(should_write_now=True)

    def beat(self) -> None:
        """Report that the worker is alive."""
        self._write(should_write_now=False)

    def _write(self, *, should_write_now: bool) -> None:
        current_time = time.monotonic()
        with self._lock:
            self._progress_record.heartbeat = time.time()
            self._progress_record.beats += 1
            if should_write_now or current_time - self._last_write_time >= _MIN_HEARTBEAT_SECONDS:
                self._last_write_time = current_time
                write_json(self._progress_file, self._progress_record.model_dump(warnings=False), fsync=False)


def read_progress(stage_path: Path) -> ProgressRecord | None:
    """Return the progress of the worker of a stage; None if there is none yet or the file is damaged."""
    return read_document(stage_path / "progress.json", ProgressRecord)


class MetricsWriter:
    """Writer of `metrics.jsonl`, with a JSON object per line: `{"step": 12, "time": 1700000000.0, "loss": 0.5}`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.line_callbacks: list[Callable[[dict[str, Any]], None]] = []
        """Callbacks that receive each line of metrics after it was written; they must neither block nor raise."""
        self._lock = threading.Lock()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of one step to `metrics.jsonl`."""
        line = {"step": step, "time": time.time(), **metrics}
        with self._lock, open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for line_callback in self.line_callbacks:
            line_callback(line)

    def sync(self) -> None:
        """Wait until all lines of metrics are on the disk, so that a later checkpoint refers to no missing lines."""
        if self.path.exists():
            with open(self.path, "rb") as file:
                os.fsync(file.fileno())

    def remove_lines_after_step(self, step: int, prefix: str = "") -> None:
        """Remove the lines after `step` (0: all lines), because these steps run again, and the lines of `step` that
        have a metric whose name begins with `prefix`."""
        if not self.path.exists():
            return
        lines = [line for line in read_metrics(self.path) if step > 0 and line["step"] <= step]
        if prefix:
            lines = [line for line in lines if line["step"] < step or not any(name.startswith(prefix) for name in line)]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))


def has_step(line: dict[str, Any]) -> bool:
    """Return True if a line of metrics has a step number."""
    return isinstance(line.get("step"), int)


class MetricsReader:
    """Incremental reader of a growing `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._metrics_tail = FileTail(path)
        self.lines: list[dict[str, Any]] = []

    def update(self) -> list[dict[str, Any]]:
        """Return all lines of metrics that were written so far; skip truncated lines and lines without a step."""
        new_metric_lines = self._metrics_tail.read_lines()
        if self._metrics_tail.was_replaced:
            # When training resumes, `remove_lines_after_step` replaces the file, so all its lines are read again.
            self.lines = []
        self.lines += [line for line in parse_json_objects(new_metric_lines) if has_step(line)]
        return self.lines


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`; skip truncated lines and lines without a step."""
    return MetricsReader(path).update()
