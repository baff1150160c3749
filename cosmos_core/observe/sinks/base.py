"""Where metrics go beside the run directory: one file each in this folder, or a user's `file.py:Class`.

A sink is told what `metrics.jsonl` already has, in a thread of its own: one that is slow, unreachable or broken costs
the training a line in the log, nothing else.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, takewhile
from typing import Any, Protocol

from cosmos_core.config.schema.logging import CONSOLE, SINKS_FOLDER
from cosmos_core.errors import EXIT_CRASH, EXIT_OK
from cosmos_core.registry import load_named
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Longest wait for all sinks together at the end of a stage."""
STOP_SECONDS = 2.0
"""The same when the stage was asked to stop: its grace is for the checkpoint."""


class Sink(Protocol):
    """What `logging.logger` names: a class that is called with the stage and the first step that this attempt logs.

    Any call may take long or raise. One of ours is `SomeNameSink` in `some_name.py`; its `package` is what it needs.
    """

    starting_step: int
    """The first step that it lacks; earlier steps that it has not are in `metrics.jsonl` and are sent first."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of `metrics.jsonl`: `step`, `time` (seconds since 1970) and metrics by name."""

    def close(self, exit_code: int) -> None:
        """Send what is left; the stage ends with this code, 0 if it succeeded."""


class FunctionSink:
    """A function of the user's own, called with the metrics of a step and the step."""

    def __init__(self, function: Callable[[dict[str, Any], int], Any], stage: Stage, starting_step: int) -> None:
        self._function, self.starting_step = function, starting_step

    def log(self, line: dict[str, Any]) -> None:
        """See `Sink.log`."""
        self._function({name: value for name, value in line.items() if name != "step"}, line["step"])

    def close(self, exit_code: int) -> None:
        """See `Sink.close`."""


Opener = Callable[[Stage, int], Sink]


def find_sink(name: str) -> Opener:
    """Return the class of a sink, of ours or a user's.

    Raises:
        ConfigError: there is none, or the user's file cannot be imported.
    """
    found = load_named(name, SINKS_FOLDER, "Sink")
    return partial(FunctionSink, found) if inspect.isfunction(found) else found


@contextmanager
def attached(stage: Stage, find: Callable[[str], Opener] = find_sink) -> Iterator[None]:
    """Pass the metrics that the stage logs in the block on to the sinks that its recipe asks for.

    None is opened before there is a metric, so a stage without any leaves no empty run.
    """
    names = dict.fromkeys(name for name in stage.recipe.logging.logger if name != CONSOLE)
    couriers = [_Courier(name, find, stage) for name in names]
    stage.metrics.watchers += [courier.tell for courier in couriers]
    exit_code = EXIT_CRASH
    try:
        yield
        exit_code = EXIT_OK
    finally:
        seconds = STOP_SECONDS if stage.stop_requested else CLOSE_SECONDS
        deadline = time.monotonic() + seconds
        for courier in couriers:
            courier.end(exit_code)
        for courier in couriers:
            courier.wait(deadline, seconds)


class _Courier:
    """Carries lines to one sink; its first failure ends it for this attempt."""

    def __init__(self, name: str, find: Callable[[str], Opener], stage: Stage) -> None:
        self._name, self._find, self._stage = name, find, stage
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._exit_code = EXIT_CRASH
        self._thread: threading.Thread | None = None

    def tell(self, line: dict[str, Any]) -> None:
        """Take a line that `metrics.jsonl` has; never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(line,), name=f"sink-{self._name}", daemon=True)
            self._thread.start()
        elif self._thread.is_alive():
            self._lines.put(line)

    def end(self, exit_code: int) -> None:
        """Say that nothing follows."""
        self._exit_code = exit_code
        self._lines.put(None)

    def wait(self, deadline: float, seconds: float) -> None:
        """Wait until it is closed, or until the monotonic clock says `deadline`, which is `seconds` after the end."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"not done {seconds:g} s after the end; it may lack the last steps")

    def _work(self, first: dict[str, Any]) -> None:
        try:
            self._carry(first)
        except Exception as error:  # noqa: BLE001 - whatever a sink raises, it never stops a training
            self._warn(f"{type(error).__name__}: {error}")

    def _carry(self, first: dict[str, Any]) -> None:
        sink = self._find(self._name)(self._stage, first["step"])
        # What earlier attempts measured and the sink has not: it was unreachable then, or they were killed.
        earlier = takewhile(lambda line: line["time"] != first["time"], read_metrics(self._stage.metrics.path))
        missing = (line for line in earlier if line["step"] < first["step"])
        for line in chain(missing, [first], iter(self._lines.get, None)):
            if line["step"] >= sink.starting_step:
                sink.log(line)
        sink.close(self._exit_code)

    def _warn(self, trouble: str) -> None:
        reason = " ".join(trouble.split())
        logger.warning(
            "logging.logger %r: %s; training does not need it, metrics.jsonl is complete", self._name, reason
        )


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics of a line that are numbers."""
    return {
        name: float(value)
        for name, value in line.items()
        if name not in {"step", "time"} and isinstance(value, int | float)
    }
