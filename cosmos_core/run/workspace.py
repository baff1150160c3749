"""`Workspace`: the directory of a stage, in which the program of the stage writes its progress, metrics and outputs."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cosmos_core.run.progress import MetricsWriter, ProgressWriter


@dataclass
class Workspace:
    """Directory of a stage, with the writers of its progress and metrics and the flag that requests a stop."""

    path: Path
    """Directory of the stage, `<run>/stages/<name>`, for all its files."""
    stop_requested: bool = field(default=False, init=False)
    """True after a request to stop: the program saves a checkpoint at the next safe point and raises `Preempted`."""

    @property
    def run_path(self) -> Path:
        """Return the directory of the run, `<output_dir>/<run_id>`."""
        return self.path.parent.parent

    @cached_property
    def progress(self) -> ProgressWriter:
        """Return the writer of `progress.json`, with heartbeat and progress."""
        return ProgressWriter(self.path / "progress.json")

    @cached_property
    def metrics(self) -> MetricsWriter:
        """Return the writer of `metrics.jsonl`, with the metrics of each step."""
        return MetricsWriter(self.path / "metrics.jsonl")
