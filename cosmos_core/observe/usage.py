"""What a run used, and how its rewards are spread: small tables of the report."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cosmos_core.observe import wording
from cosmos_core.observe.record import RunRecord, StageRecord

_BINS = 10


@dataclass(frozen=True)
class Use:
    """What one stage used."""

    stage: StageRecord
    machines: str
    gpu_hours: float
    tokens_per_second: float | None
    size: int
    """Bytes of its outputs."""


def resources(run: RunRecord) -> list[Use]:
    """Return what each stage used that ran here."""
    return [
        Use(
            stage=stage,
            machines=wording.machines(stage.ranks),
            gpu_hours=stage.seconds * sum(bool(rank.gpus) for rank in stage.ranks) / 3600,
            tokens_per_second=_tokens_per_second(stage),
            size=sum(file["size"] for file in stage.result["outputs"]) if stage.result else 0,
        )
        for stage in run.stages
        if stage.seconds is not None and stage.kind.in_worker
    ]


def _tokens_per_second(stage: StageRecord) -> float | None:
    """The median over the steps, which the first ones do not move."""
    found = sorted(value for line in stage.curves if (value := wording.tokens_per_second(line)) is not None)
    return found[len(found) // 2] if found else None


@dataclass(frozen=True)
class Bin:
    """Rewards between two values."""

    low: float
    high: float
    first: float
    """Share of the rewards of the first half of the logged steps, as a percentage of the fullest bin of both."""
    last: float
    num_first: int
    num_last: int


def reward_bins(stage: StageRecord) -> list[Bin]:
    """Return how the logged rewards of a training are spread, in the first and in the last half of its logged steps;
    empty where fewer than two steps or two different rewards were logged."""
    found = [
        (line.step, value)
        for line in stage.samples
        for value in (line.rewards or [line.reward])
        if value is not None and math.isfinite(value)
    ]
    steps = sorted({step for step, _ in found})
    values = [value for _, value in found]
    if stage.kind.feed != "rollouts" or len(steps) < 2 or min(values) == max(values):
        return []
    middle, low = steps[len(steps) // 2], min(values)
    width = (max(values) - low) / _BINS
    halves = [[value for step, value in found if (step >= middle) == is_last] for is_last in (False, True)]
    counts = [[0] * _BINS for _ in halves]
    for half, counted in zip(halves, counts, strict=True):
        for value in half:
            counted[min(_BINS - 1, int((value - low) / width))] += 1
    shares = [[count / len(half) for count in counted] for half, counted in zip(halves, counts, strict=True)]
    most = max(map(max, shares))
    return [
        Bin(
            low + i * width, low + (i + 1) * width, 100 * shares[0][i] / most, 100 * shares[1][i] / most,
            counts[0][i], counts[1][i],
        )
        for i in range(_BINS)
    ]  # fmt: skip
