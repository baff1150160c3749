"""`cosmos plan --estimate`: how long each stage will take, its GPU hours, what they cost, and whether its memory fits.

What a stage took in an earlier run of the pipeline is the best guess; of a training that was never run it is counted:
floating-point operations of its tokens, at `pipeline.gpu_tflops`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.launch.estimate import Found
from cosmos_core.observe import wording
from cosmos_core.observe.record import RunRecord, StageRecord, read_run
from cosmos_core.run.directory import runs_in
from cosmos_core.run.plan import Decision

_GIB = 2**30
_TERA = 1e12
_MOST_RUNS = 20
_FORWARD, _FOR_INPUTS, _FOR_WEIGHTS = 2, 2, 2  # operations of a parameter and token, as in 6 N D


@dataclass(frozen=True)
class Cost:
    """One stage."""

    name: str
    seconds: float | None
    gpus: int
    fits: str
    """Whether the peak is below `pipeline.gpu_memory`; empty: nobody asked."""
    known_from: str

    @property
    def gpu_hours(self) -> float | None:
        """Return the time of all its GPUs."""
        return None if self.seconds is None else self.seconds * self.gpus / 3600


def costs(
    pipeline: Pipeline,
    decisions: Mapping[str, Decision],
    found: Mapping[str, Found],
    gpus: Mapping[str, int],
    output_dir: Path,
) -> list[Cost]:
    """Return what each stage will need; `found` are the estimates of the trainings, `gpus` those of each mesh."""
    ids = [facts.run_id for facts in runs_in(output_dir) if facts.pipeline == pipeline.config.name]
    earlier = [read_run(output_dir / run_id) for run_id in reversed(ids[-_MOST_RUNS:])]
    costs = []
    seconds: float | None
    for stage in pipeline.stages:
        sizes = found.get(stage.name)
        sizes = sizes if isinstance(sizes, dict) else None
        if decisions[stage.name].action in {"reuse", "adopt"}:
            seconds, known_from = 0.0, "reused"
        else:
            seconds, known_from = _measured(stage, sizes, earlier) or _counted(pipeline, stage, sizes, gpus)
        costs.append(Cost(stage.name, seconds, gpus.get(stage.name, 0), _fits(pipeline, sizes), known_from))
    return costs


def cost_table(pipeline: Pipeline, found: Sequence[Cost]) -> Table:
    """Return the costs as a table with their sum; the time of all is that of the longest chain."""
    price = pipeline.config.gpu_hour_price
    table = Table("stage", title="time and cost")
    for column in ("GPUs", "time", "GPU hours", *(["cost"] if price is not None else [])):
        table.add_column(column, justify="right")
    table.add_column(f"fits {pipeline.config.gpu_memory:g} GiB")
    table.add_column("known from")

    def cells(gpus: str, seconds: float | None, hours: float | None, *, is_bound: bool = False) -> list[str]:
        at_least = "> " if is_bound else ""
        shown = [gpus, "?" if seconds is None else at_least + wording.duration(seconds)]
        shown.append("?" if hours is None else f"{at_least}{hours:,.2f}")
        if price is not None:
            shown.append("?" if hours is None else f"{at_least}{hours * price:,.2f}")
        return shown

    for cost in found:
        row = cells(str(cost.gpus), cost.seconds, cost.gpu_hours)
        table.add_row(cost.name, *row, cost.fits, cost.known_from)
    is_bound = any(cost.seconds is None for cost in found)
    hours = sum(cost.gpu_hours or 0.0 for cost in found)
    table.add_section()
    table.add_row("all", *cells("", wall_seconds(pipeline, found), hours, is_bound=is_bound), "", "")
    return table


def wall_seconds(pipeline: Pipeline, found: Sequence[Cost]) -> float:
    """Return when the last stage ends, if each begins as soon as its inputs are there and a slot of its sweep is free;
    what is unknown counts as nothing."""
    seconds = {cost.name: cost.seconds or 0.0 for cost in found}
    ends: dict[str, float] = {}
    slots: dict[str, list[float]] = {}
    for stage in pipeline.stages:
        begin = max((ends[name] for name in stage.after), default=0.0)
        choice = pipeline.choice_among(stage.name)
        limit = choice.sweep.max_parallel if choice is not None and choice.sweep is not None else None
        if choice is not None and (limit or not stage.work_pool):
            free = slots.setdefault(choice.name, [0.0] * (limit or 1))
            begin = max(begin, free.pop(free.index(min(free))))
            free.append(begin + seconds[stage.name])
        ends[stage.name] = begin + seconds[stage.name]
    return max(ends.values(), default=0.0)


def _measured(
    stage: StageConfig, sizes: dict[str, Any] | None, earlier: Sequence[RunRecord]
) -> tuple[float, str] | None:
    """What the stage took in the newest run in which it came to its end, for as many steps as it has now."""
    for run in earlier:
        record = next((each for each in run.stages if each.name == stage.name and each.kind.name == stage.kind), None)
        if record is None or record.status != "done" or not record.seconds:
            continue
        old, new = _steps(record), sizes["steps"] if sizes else None
        if old and new and old != new:
            return record.seconds * new / old, f"run {run.path.name}: {record.seconds / old:.3g} s per step"
        return record.seconds, f"run {run.path.name}"
    return None


def _steps(record: StageRecord) -> int | None:
    step, total = record.position
    return total or step


def _counted(
    pipeline: Pipeline, stage: StageConfig, sizes: dict[str, Any] | None, gpus: Mapping[str, int]
) -> tuple[float | None, str]:
    kind = pipeline.kind_of(stage)
    if not kind.in_worker:
        return 0.0, ""
    if sizes is None or sizes["tokens"] is None:
        return None, "never run"
    per_token = _FORWARD * sizes["parameters"] + _FOR_INPUTS * sizes["parameters"] + _FOR_WEIGHTS * sizes["trainable"]
    if pipeline.recipes[stage.name].policy.model_gradient_checkpointing:
        per_token += _FORWARD * sizes["parameters"]
    rate = pipeline.config.gpu_tflops
    without = ", without generation" if kind.feed == "rollouts" else ""
    seconds = per_token * sizes["tokens"] / (rate * _TERA * max(1, gpus.get(stage.name, 1)))
    return seconds, f"never run; counted at {rate:g} TFLOP/s per GPU{without}"


def _fits(pipeline: Pipeline, sizes: dict[str, Any] | None) -> str:
    if sizes is None:
        return ""
    rollout = sizes["engine_weights"] + (sizes["kv_cache"] or 0)
    peak, limit = max(sizes["peak"], sizes["memory"]["weights"] + rollout) / _GIB, pipeline.config.gpu_memory
    if peak > limit:
        return f"no: {peak:,.1f} GiB"
    return "yes" if sizes["memory"]["activations"] is not None and sizes["kv_cache"] is not None else "?"
