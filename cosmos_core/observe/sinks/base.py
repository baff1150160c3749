"""Metric sinks, destinations of metrics in addition to the run directory, such as W&B: one module each in this folder,
or a user's `file.py:Class`.

A metric sink receives the lines of `metrics.jsonl` in a separate thread. If it is slow, unreachable or broken, a
warning is logged and the training continues.
"""

import inspect
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, takewhile
from typing import Any, Protocol

from cosmos_core.config.schema.logging import CONSOLE_SINK, SINKS_FOLDER
from cosmos_core.error_handling import log_errors
from cosmos_core.errors import EXIT_CRASH, EXIT_OK
from cosmos_core.registry import is_import_path, load_class
from cosmos_core.run.directory import RunStartInfo, read_start_info
from cosmos_core.run.files import write_text
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)

SINK_CLOSE_TIMEOUT_SECONDS = 5.0
"""Maximum number of seconds to wait for all metric sinks together when a stage ends."""
SINK_STOP_TIMEOUT_SECONDS = 2.0
"""Maximum number of seconds to wait for all metric sinks when a stage ends because it was requested to stop; the rest
of its grace period is reserved for the checkpoint."""


class MetricSink(Protocol):
    """Interface of metric sinks, the classes that `logging.logger` names. The constructor gets the stage and the first
    step that this attempt logs. All calls are allowed to be slow or to raise errors. A built-in metric sink is the
    class `SomeNameSink` in `some_name.py`, and its attribute `package` names the Python package that it needs."""

    starting_step: int
    """First step that the sink has not stored yet. When the sink is opened, it first gets the lines of `metrics.jsonl`
    that earlier attempts wrote from this step on. New lines of earlier steps are not sent, except validation metrics
    that are logged for the first time."""

    def log(self, line: dict[str, Any]) -> None:
        """Receive one line of `metrics.jsonl`: `step`, `time` (seconds since 1970) and metrics by name."""

    def close(self, exit_code: int) -> None:
        """Send remaining data at the end of the stage; `exit_code` is 0 if the stage succeeded."""


class FunctionSink:
    """Metric sink that calls a user's function with the metrics of a step and the step number."""

    def __init__(self, user_function: Callable[[dict[str, Any], int], Any], stage: Stage, starting_step: int) -> None:
        self._user_function, self.starting_step = user_function, starting_step

    def log(self, line: dict[str, Any]) -> None:
        self._user_function({name: value for name, value in line.items() if name != "step"}, line["step"])

    def close(self, exit_code: int) -> None:
        """Do nothing, because a user's function holds no resources."""


SinkOpener = Callable[[Stage, int], MetricSink]


def find_sink_class(sink_name: str) -> SinkOpener:
    """Return the class of a built-in or user-defined metric sink, or a function that makes a `FunctionSink` of a user's
    function. Raise ConfigError if it cannot be imported."""
    class_or_function = load_class(sink_name, SINKS_FOLDER, "Sink")
    return partial(FunctionSink, class_or_function) if inspect.isfunction(class_or_function) else class_or_function


def import_user_sinks(sink_names: Iterable[str]) -> None:
    """Import the user-defined metric sinks of `sink_names` now, to raise ConfigError for one that cannot be imported: a
    training would only log a warning."""
    for name in filter(is_import_path, sink_names):
        find_sink_class(name)


@contextmanager
def send_to_sinks(stage: Stage, find_sink_opener: Callable[[str], SinkOpener] = find_sink_class) -> Iterator[None]:
    """Send the metrics that a stage logs during a `with` block to the metric sinks of its recipe. Each sink is opened
    when the first metric is logged, so that a stage without metrics creates no empty run in a service."""
    sink_names = dict.fromkeys(name for name in stage.recipe.logging.logger if name != CONSOLE_SINK)
    sink_threads = [_SinkThread(name, find_sink_opener, stage) for name in sink_names]
    stage.metrics.line_callbacks += [sink_thread.enqueue for sink_thread in sink_threads]
    exit_code = EXIT_CRASH
    try:
        yield
        exit_code = EXIT_OK
    finally:
        timeout_seconds = SINK_STOP_TIMEOUT_SECONDS if stage.stop_requested else SINK_CLOSE_TIMEOUT_SECONDS
        deadline = time.monotonic() + timeout_seconds
        for sink_thread in sink_threads:
            sink_thread.signal_end_of_metrics(exit_code)
        for sink_thread in sink_threads:
            sink_thread.wait_until_closed(deadline, timeout_seconds)


class _SinkThread:
    """Thread that sends lines of `metrics.jsonl` from a queue to one metric sink. After an error of the sink the thread
    ends, and the sink gets no more lines in this attempt of the stage."""

    def __init__(self, name: str, find_sink_opener: Callable[[str], SinkOpener], stage: Stage) -> None:
        self._sink_name, self._find_sink_opener, self._stage = name, find_sink_opener, stage
        self._line_queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # Read `metrics.jsonl` now, because a resumed training removes lines of later steps from it.
        lines = read_metrics(stage.metrics.path)
        self._steps_with_validation = {line["step"] for line in lines if len(_pick_validation_metrics(line)) > 2}
        self._exit_code = EXIT_CRASH
        self._thread: threading.Thread | None = None

    def enqueue(self, line: dict[str, Any]) -> None:
        """Queue a line of `metrics.jsonl` without blocking."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(line,), name=f"sink-{self._sink_name}", daemon=True)
            self._thread.start()
        elif self._thread.is_alive():
            self._line_queue.put(line)

    def signal_end_of_metrics(self, exit_code: int) -> None:
        """Signal to the thread of the metric sink that no line of metrics follows; the thread then closes the sink with
        `exit_code`."""
        self._exit_code = exit_code
        self._line_queue.put(None)

    def wait_until_closed(self, deadline: float, timeout_seconds: float) -> None:
        """Wait until the metric sink is closed, but only until the monotonic time `deadline`; then log a warning that
        names `timeout_seconds`, the time that the sink had."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._log_warning(f"not done {timeout_seconds:g} s after the end; it may lack the last steps")

    def _run(self, first_line: dict[str, Any]) -> None:
        with log_errors(lambda error: self._log_warning(f"{type(error).__name__}: {error}")):
            self._send_lines(first_line)

    def _send_lines(self, first_line: dict[str, Any]) -> None:
        sink = self._find_sink_opener(self._sink_name)(self._stage, first_line["step"])
        # First send the lines of earlier attempts that the metric sink lacks. The line of a step that this attempt
        # repeats is not sent, unless the new line has only validation metrics and lacks the training metrics.
        for line in takewhile(lambda line: line["time"] != first_line["time"], read_metrics(self._stage.metrics.path)):
            is_repeated_step = line["step"] >= first_line["step"] and len(line.keys() & first_line.keys()) > 2
            if line["step"] >= sink.starting_step and not is_repeated_step:
                sink.log(line)
        for line in chain([first_line], iter(self._line_queue.get, None)):
            if line["step"] >= sink.starting_step:
                sink.log(line)
            elif line["step"] not in self._steps_with_validation and len(metrics := _pick_validation_metrics(line)) > 2:
                sink.log(metrics)
        sink.close(self._exit_code)

    def _log_warning(self, problem_text: str) -> None:
        warning_template = "logging.logger %r: %s; training does not need it, metrics.jsonl is complete"
        logger.warning(warning_template, self._sink_name, " ".join(problem_text.split()))


def _pick_validation_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of `metrics.jsonl` with only its step, its time and its validation metrics."""
    return {name: value for name, value in line.items() if name in {"step", "time"} or name.startswith("validation/")}


def select_numeric_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a line of `metrics.jsonl`."""
    metrics = {name: value for name, value in line.items() if name not in {"step", "time"}}
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def name_tracking_run(stage: Stage, sink_name: str) -> tuple[str, str, str, str]:
    """Return project, group, name and identifier of a stage's run in a tracking service (W&B, MLflow, trackio). All
    attempts share the identifier, which is saved in the subfolder `sink_name` of the stage directory."""
    logging_config, start_info = stage.recipe.logging, read_start_info(stage.run_path) or RunStartInfo()
    run_label = f"{logging_config.experiment_name or start_info.pipeline or 'cosmos'}-{stage.run_path.name}"
    identifier_file = stage.path / sink_name / "id"
    if not identifier_file.exists():
        identifier_file.parent.mkdir(exist_ok=True)
        write_text(identifier_file, uuid.uuid4().hex)
    tracking_id = identifier_file.read_text(encoding="utf-8")
    return logging_config.project_name, logging_config.group_name or run_label, f"{run_label}-{stage.name}", tracking_id
