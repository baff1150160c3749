"""Tables of the report about the resources that stages used, and about the distribution of rewards."""

from __future__ import annotations

import math
from typing import Any

from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, StageRecord
from cosmos_core.run.gpu_time import closed_intervals, gpu_seconds

_NUM_BINS = 10


def resources(run: RunRecord) -> list[dict[str, Any]]:
    """Return the resources of each stage that ran a worker process in this run: its machines, GPU hours, tokens per
    second and the size of its output files in bytes."""
    return [
        {
            "stage": stage, "machines": formatting.machines(stage.ranks), "gpu_hours": _compute_gpu_hours(stage),
            "tokens_per_second": _median_tokens_per_second(stage),
            "size": sum(file["size"] for file in stage.result["outputs"]) if stage.result else 0,
        }
        for stage in run.stages
        if stage.seconds is not None and stage.kind.in_worker
    ]  # fmt: skip


def _compute_gpu_hours(stage: StageRecord) -> float:
    """Return the GPU hours that a stage held. Earlier versions recorded no GPU intervals: for their runs, estimate the
    hours from run time and number of GPUs."""
    if stage.state.holds:
        return gpu_seconds(closed_intervals(stage.path)) / 3600
    return (stage.seconds or 0.0) * sum(bool(rank.gpus) for rank in stage.ranks) / 3600


def _median_tokens_per_second(stage: StageRecord) -> float | None:
    """Return the median tokens per second over the steps, which slow first steps do not affect; None: not measured."""
    speeds = sorted(value for line in stage.curves if (value := formatting.tokens_per_second(line)) is not None)
    return speeds[len(speeds) // 2] if speeds else None


def reward_bins(stage: StageRecord) -> list[dict[str, float]]:
    """Return the bins of two histograms of the logged rewards of a training, one for each half of its logged steps;
    empty if fewer than two steps or two different rewards were logged. `first` and `last` are the fractions of the
    rewards of each half that lie in a bin, in percent of the largest fraction of any bin."""
    logged_rewards = [(line.step, value) for line in stage.samples for value in (line.rewards or [line.reward])]
    rewards = [(step, value) for step, value in logged_rewards if value is not None and math.isfinite(value)]
    steps = sorted({step for step, _ in rewards})
    values = [value for _, value in rewards]
    if stage.kind.feed != "rollouts" or len(steps) < 2:
        return []
    middle_step, min_reward = steps[len(steps) // 2], min(values)
    bin_width = (max(values) - min_reward) / _NUM_BINS
    if not 0 < bin_width < math.inf:
        return []
    halves = [
        [value for step, value in rewards if (step >= middle_step) == is_second_half]
        for is_second_half in (False, True)
    ]
    counts = [[0] * _NUM_BINS for _ in halves]
    for half, bin_counts in zip(halves, counts, strict=True):
        for value in half:
            bin_counts[min(_NUM_BINS - 1, int((value - min_reward) / bin_width))] += 1
    fractions_by_half = [
        [count / len(half) for count in bin_counts] for half, bin_counts in zip(halves, counts, strict=True)
    ]
    max_fraction = max(map(max, fractions_by_half))
    return [
        {
            "low": min_reward + i * bin_width, "high": min_reward + (i + 1) * bin_width,
            "first": 100 * fractions_by_half[0][i] / max_fraction, "num_first_half": counts[0][i],
            "last": 100 * fractions_by_half[1][i] / max_fraction, "num_second_half": counts[1][i],
        }
        for i in range(_NUM_BINS)
    ]  # fmt: skip
