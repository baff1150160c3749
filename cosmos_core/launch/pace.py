"""Compute the duration of a stage from earlier runs, scaled to another number of steps."""

from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, StageRecord


def estimate_from_history(
    stage: StageConfig, steps: int | None, earlier: Sequence[RunRecord], card: str
) -> tuple[float, str] | None:
    """Return the duration of a stage in seconds for `steps` steps, from the newest run that recorded it, with a
    description of the source; None if no earlier run recorded it.

    A stopped or killed training counts if it completed a step. `card`: type of GPU that a training must have used.
    """
    for run in earlier:
        record = next((each for each in run.stages if each.name == stage.name and each.kind.name == stage.kind), None)
        if (
            record is None
            or not record.seconds
            or (card and record.kind.trains_model and not _used_gpu_type(record, card))
        ):
            continue
        if pace := _measure_pace(record):
            return pace.total(steps or record.position[1] or pace.steps), f"run {run.path.name}: {pace}"
        if record.status == "done":
            return record.seconds, f"run {run.path.name}"
    return None


@dataclass(frozen=True)
class _TrainingPace:
    """Time per step, per validation and for the rest of an earlier training, in seconds."""

    steps: int
    step: float
    validations: int
    validation: float
    other_seconds: float
    """Seconds per attempt outside of steps and validations: loading, compiling, checkpoints and export."""

    def total(self, steps: int) -> float:
        """Return the duration in seconds of a training with this number of steps."""
        validations = -(-self.validations * steps // self.steps)
        return self.other_seconds + steps * self.step + validations * self.validation

    def __str__(self) -> str:
        return f"{self.step:.3g} s per step, {formatting.duration(self.other_seconds)} beside them"


def _measure_pace(record: StageRecord) -> _TrainingPace | None:
    """Return the time per step, per validation and for the rest of a recorded training; None if no step time was
    recorded."""
    steps, checks = _times(record, "time/step"), _times(record, "time/validate")
    if not steps:
        return None
    typical_steps = steps[1:] or steps  # the first step includes compilation
    step = sum(typical_steps) / len(typical_steps)
    other_seconds = max(0.0, (record.seconds or 0.0) - sum(checks) - step * len(steps))
    num_attempts = max(1, len(record.state.spans))
    return _TrainingPace(len(steps), step, len(checks), sum(checks) / max(1, len(checks)), other_seconds / num_attempts)


def _times(record: StageRecord, name: str) -> list[float]:
    return [float(line[name]) for line in record.curves if isinstance(line.get(name), int | float)]


def _used_gpu_type(record: StageRecord, card: str) -> bool:
    """Return True if every rank of a training used a GPU of the type `card`."""
    names = [name.lower().replace(" ", "").replace("-", "") for rank in record.ranks for name in rank.gpus]
    return bool(names) and all(card in name for name in names)
