"""Metric sink that writes TensorBoard event files to the stage's folder `tensorboard/`."""

from typing import Any

from cosmos_core.observe.sinks.base import select_numeric_metrics
from cosmos_core.run.stage import Stage


class TensorboardSink:
    """Metric sink for TensorBoard. The first event that it writes makes TensorBoard ignore the events of earlier
    attempts for step `first_step` and later steps."""

    package = "tensorboard"

    def __init__(self, stage: Stage, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.starting_step = first_step
        self._writer = EventFileWriter(str(stage.path / "tensorboard"))
        self._writer.add_event(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def log(self, line: dict[str, Any]) -> None:
        """Write one line of `metrics.jsonl`, and flush the file so that the line survives a kill of the process."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        metrics = select_numeric_metrics(line)
        summary_values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(step=line["step"], wall_time=line["time"], summary=Summary(value=summary_values)))
        self._writer.flush()

    def close(self, exit_code: int) -> None:
        self._writer.close()
