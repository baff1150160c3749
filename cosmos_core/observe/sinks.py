"""Where metrics go beside the run directory: Weights & Biases and TensorBoard, as `[logging] logger` asks.

A sink is told what `metrics.jsonl` already has, in a thread of its own: one that is slow, unreachable or broken costs
the training a line in the log, nothing else. Samples, code and statistics of the machine are not sent.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, Protocol

from cosmos_core.errors import EXIT_CRASH, EXIT_OK
from cosmos_core.run.files import read_json, write_text
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""Longest wait for all sinks together at the end of a stage."""
STOP_SECONDS = 2.0
"""The same when the stage was asked to stop: its grace is for the checkpoint."""
_INIT_SECONDS = 30.0


class Sink(Protocol):
    """Somewhere that metrics go; any call may take long or raise."""

    starting_step: int
    """The first step that it lacks."""

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of `metrics.jsonl`."""

    def close(self, exit_code: int) -> None:
        """Nothing follows; the stage ends with this code."""


Opener = Callable[[Stage, int], Sink]
"""Opens a sink for a stage; the number is the first step that this attempt logs."""


class WandB:
    """A run on Weights & Biases; `WANDB_API_KEY`, `WANDB_BASE_URL` and `WANDB_MODE` say whose, where and whether.

    A stage that is resumed goes on in its run, from the step that the server has. Without a server each attempt
    leaves a folder with all steps so far: `wandb sync` the newest.
    """

    def __init__(self, stage: Stage, first_step: int) -> None:
        import wandb

        config = stage.recipe.logging
        facts = read_json(stage.run_path / "run.json") or {}
        title = f"{config.experiment_name or facts.get('pipeline') or 'cosmos'}-{stage.run_path.name}"
        self._run = wandb.init(
            project=config.project_name,
            group=config.group_name or title,
            job_type=stage.kind.name,
            name=f"{title}-{stage.name}",
            id=_wandb_id(stage.path / "wandb" / "id"),
            resume="allow",
            config=stage.recipe.model_dump(),
            dir=str(stage.path),
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, save_code=False, x_disable_stats=True,
                x_disable_machine_info=True, x_save_requirements=False, init_timeout=_INIT_SECONDS,
            ),
        )  # fmt: skip
        self.starting_step = int(self._run.starting_step)

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of `metrics.jsonl`."""
        self._run.log(_figures(line), step=line["step"])

    def close(self, exit_code: int) -> None:
        """Wait until everything is sent."""
        self._run.finish(exit_code=exit_code)


class TensorBoard:
    """Event files in `tensorboard/`; readers drop what an earlier attempt wrote from `first_step` on."""

    def __init__(self, stage: Stage, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.starting_step = first_step
        self._writer = EventFileWriter(str(stage.path / "tensorboard"))
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, line: dict[str, Any]) -> None:
        """Take one line of `metrics.jsonl`; it is in the file at once, for a kill to leave it there."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _figures(line).items()]
        self._writer.add_event(Event(step=line["step"], wall_time=line["time"], summary=Summary(value=values)))
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        """Close the file."""
        self._writer.close()


OPENERS: dict[str, Opener] = {"wandb": WandB, "tensorboard": TensorBoard}
"""By name in `[logging] logger`; `console` is the launcher's."""


@contextmanager
def attached(stage: Stage, openers: Mapping[str, Opener] = OPENERS) -> Iterator[None]:
    """Meanwhile the sinks that the recipe asks for get the metrics of the stage.

    None is opened before there is a metric, so a stage without any leaves no empty run.
    """
    names = dict.fromkeys(name for name in stage.recipe.logging.logger if name in openers)
    couriers = [_Courier(name, openers[name], stage) for name in names]
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

    def __init__(self, name: str, opener: Opener, stage: Stage) -> None:
        self._name, self._opener, self._stage = name, opener, stage
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
        """Nothing follows."""
        self._exit_code = exit_code
        self._lines.put(None)

    def wait(self, deadline: float, seconds: float) -> None:
        """Until it is closed or the monotonic clock says `deadline`, which is `seconds` after the end."""
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
        sink = self._opener(self._stage, first["step"])
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


def _figures(line: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in {"step", "time"} and isinstance(value, int | float)
    }


def _wandb_id(path: Path) -> str:
    """The same for all attempts; another once the stage is made anew, because its folder is moved aside then."""
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        write_text(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8")
