"""Estimate duration, GPU hours, price and memory of each stage for `cosmos plan --estimate`.

The duration of a stage comes from an earlier run of the pipeline. Without one, the duration of a training is computed
from the floating-point operations of its tokens and the rate of this or another machine (`launch.machine`).
"""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.launch.estimate import StageEstimate
from cosmos_core.launch.machine import BYTES_PER_GIB, FLOPS_PER_TFLOP, MachineSpec
from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, StageRecord, read_run
from cosmos_core.run.directory import list_runs
from cosmos_core.run.plan import StageDecision

_MAX_HISTORY_RUNS = 20
_FORWARD_FLOPS, _INPUT_GRAD_FLOPS, _WEIGHT_GRAD_FLOPS = 2, 2, 2  # FLOPs per parameter and token; their sum is 6


@dataclass(frozen=True)
class StageCost:
    """Estimated cost of one stage."""

    name: str
    seconds: float | None
    num_gpus: int
    memory_fit: str
    """Whether the peak memory fits into the GPU or host: `yes`, `no: N GiB` with the peak memory N, or `?` if a part of
    the peak is unknown; empty: the peak or the memory of the machine is unknown."""
    time_source: str
    disk_bytes: int | None = None
    """Bytes that the stage leaves on disk; None: unknown."""

    @property
    def gpu_hours(self) -> float | None:
        """Return the GPU hours: duration times number of GPUs; None if the duration is unknown."""
        return None if self.seconds is None else self.seconds * self.num_gpus / 3600

    @property
    def gpu_seconds(self) -> float | None:
        """Return the GPU seconds; None if a stage with GPUs has an unknown duration."""
        if not self.num_gpus:
            return 0.0
        return None if self.seconds is None else self.seconds * self.num_gpus


def estimate_costs(
    pipeline: Pipeline,
    decision_by_stage: Mapping[str, StageDecision],
    estimate_by_stage: Mapping[str, StageEstimate],
    gpu_count_by_stage: Mapping[str, int],
    output_dir: Path,
    machine_spec: MachineSpec | None,
) -> list[StageCost]:
    """Return the estimated cost of each stage (duration 0 if its result is reused): from earlier runs in `output_dir`
    or, for a training without runs, from its estimate in `estimate_by_stage` and the rate of `machine_spec`."""
    run_ids = [info.run_id for info in list_runs(output_dir) if info.pipeline == pipeline.config.name]
    earlier_runs = [read_run(output_dir / run_id) for run_id in reversed(run_ids[-_MAX_HISTORY_RUNS:])]
    stage_costs, gpu_type = [], machine_spec.gpu_type if machine_spec else ""
    for stage in pipeline.stages:
        stage_estimate = estimate_by_stage.get(stage.name)
        size_estimate = stage_estimate if isinstance(stage_estimate, dict) else None
        time_estimate: tuple[float | None, str] = 0.0, "reused"
        if decision_by_stage[stage.name].action not in {"reuse", "adopt"}:
            num_steps = size_estimate["steps"] if size_estimate else None
            history_estimate = _estimate_from_history(stage, num_steps, earlier_runs, gpu_type)
            time_estimate = history_estimate or _estimate_from_flops(
                pipeline, stage, size_estimate, gpu_count_by_stage, machine_spec
            )
        memory_verdict = _describe_memory_fit(size_estimate, machine_spec, pipeline.recipes[stage.name].mode)
        disk_bytes = _estimate_disk_bytes(stage, size_estimate, earlier_runs)
        seconds, time_source = time_estimate
        num_gpus = gpu_count_by_stage.get(stage.name, 0)
        stage_costs.append(StageCost(stage.name, seconds, num_gpus, memory_verdict, time_source, disk_bytes))
    return stage_costs


def render_cost_table(pipeline: Pipeline, stage_costs: Sequence[StageCost], machine_spec: MachineSpec | None) -> Table:
    """Return the costs of all stages as a table with totals; the total time is that of the longest chain of stages."""
    hourly_price = pipeline.config.price_per_gpu_hour
    table = Table("stage", title="time and cost")
    for column in ("GPUs", "time", "GPU hours", *(["cost"] if hourly_price is not None else [])):
        table.add_column(column, justify="right")
    table.add_column("disk", justify="right")
    table.add_column(f"fits {machine_spec.memory_gib:.3g} GiB" if machine_spec and machine_spec.memory_gib else "fits")
    table.add_column("known from")

    def make_cells(gpus: str, seconds: float | None, gpu_hours: float | None, *, is_minimum: bool = False) -> list[str]:
        minimum_prefix = "> " if is_minimum else ""
        cost_cells = [gpus, "?" if seconds is None else minimum_prefix + formatting.format_duration(seconds)]
        cost_cells.append("?" if gpu_hours is None else f"{minimum_prefix}{gpu_hours:,.2f}")
        if hourly_price is not None:
            cost_cells.append("?" if gpu_hours is None else f"{minimum_prefix}{gpu_hours * hourly_price:,.2f}")
        return cost_cells

    for cost in stage_costs:
        row_cells = make_cells(str(cost.num_gpus), cost.seconds, cost.gpu_hours)
        disk_text = "" if cost.disk_bytes is None else formatting.format_bytes(cost.disk_bytes)
        table.add_row(cost.name, *row_cells, disk_text, cost.memory_fit, cost.time_source)
    is_minimum = any(cost.seconds is None for cost in stage_costs)
    gpu_hours = sum(cost.gpu_hours or 0.0 for cost in stage_costs)
    table.add_section()
    row_cells = make_cells("", estimate_wall_seconds(pipeline, stage_costs), gpu_hours, is_minimum=is_minimum)
    table.add_row("all", *row_cells, formatting.format_bytes(sum(cost.disk_bytes or 0 for cost in stage_costs)), "", "")
    if machine_spec is not None and machine_spec.name and not machine_spec.gpu_type:
        table.caption = f"counted for {machine_spec.name}; for another: --on h100"
    return table


def estimate_wall_seconds(pipeline: Pipeline, stage_costs: Sequence[StageCost]) -> float:
    """Return the seconds of a run in which each stage starts when its input stages have ended and the limit of parallel
    branches of its sweep allows; unknown durations count as 0."""
    seconds_by_stage = {cost.name: cost.seconds or 0.0 for cost in stage_costs}
    end_time_by_stage: dict[str, float] = {}
    slot_free_times_by_sweep: dict[str, list[float]] = {}
    for stage in pipeline.stages:
        start_time = max((end_time_by_stage[name] for name in stage.after), default=0.0)
        select_stage = pipeline.find_branch_selector(stage.name)
        branch_sweep = select_stage.sweep if select_stage is not None else None
        max_branches = branch_sweep.max_parallel if branch_sweep is not None else None
        if select_stage is not None and (max_branches or not stage.work_pool):
            slot_free_times = slot_free_times_by_sweep.setdefault(select_stage.name, [0.0] * (max_branches or 1))
            start_time = max(start_time, heapq.heappop(slot_free_times))
            heapq.heappush(slot_free_times, start_time + seconds_by_stage[stage.name])
        end_time_by_stage[stage.name] = start_time + seconds_by_stage[stage.name]
    return max(end_time_by_stage.values(), default=0.0)


def _estimate_disk_bytes(
    stage: StageConfig, size_estimate: dict[str, Any] | None, earlier_runs: Sequence[RunRecord]
) -> int | None:
    if size_estimate is not None:
        return int(size_estimate["disk"])
    for stage_record in (each for run in earlier_runs for each in run.stages if each.name == stage.name):
        if stage_record.result:
            return sum(int(output["size"]) for output in stage_record.result["outputs"])
    return None


def _estimate_from_history(
    stage: StageConfig, num_steps: int | None, earlier_runs: Sequence[RunRecord], gpu_type: str
) -> tuple[float, str] | None:
    """Return the seconds of a stage with `num_steps` steps, estimated from the newest earlier run that recorded the
    stage, and a description of that run. A training counts only if it completed a step, on GPUs of the type `gpu_type`
    (empty: any type). Return None if no earlier run counts."""
    for run in earlier_runs:
        same_stage_records = (each for each in run.stages if each.name == stage.name and each.kind.name == stage.kind)
        if (stage_record := next(same_stage_records, None)) is None or not stage_record.seconds:
            continue
        if gpu_type and stage_record.kind.trains_model and not _has_used_gpu_type(stage_record, gpu_type):
            continue
        if pace_estimate := _estimate_from_pace(stage_record, num_steps):
            seconds, pace_description = pace_estimate
            return seconds, f"run {run.path.name}: {pace_description}"
        if stage_record.status == "done":
            return stage_record.seconds, f"run {run.path.name}"
    return None


def _estimate_from_pace(stage_record: StageRecord, num_steps: int | None) -> tuple[float, str] | None:
    """Return the seconds of a training with `num_steps` steps (None: as many as the earlier training `stage_record`),
    and a text about the pace of the earlier training. The estimate uses the durations of steps, validations and other
    work in `stage_record`. Return None if the earlier training completed no step."""
    step_times, validation_times = (
        [float(line[name]) for line in stage_record.metric_lines if isinstance(line.get(name), int | float)]
        for name in ("time/step", "time/validate")
    )
    if not step_times:
        return None
    step_times_after_first = step_times[1:] or step_times  # leave out the first step, which includes compilation
    seconds_per_step = sum(step_times_after_first) / len(step_times_after_first)
    # Each attempt also loads the model, compiles, saves checkpoints and exports.
    fixed_seconds = max(0.0, (stage_record.seconds or 0.0) - sum(validation_times) - seconds_per_step * len(step_times))
    fixed_seconds /= max(1, len(stage_record.state.spans))
    num_steps = num_steps or stage_record.step_and_total[1] or len(step_times)
    num_validations = -(-len(validation_times) * num_steps // len(step_times))
    seconds_per_validation = sum(validation_times) / max(1, len(validation_times))
    seconds = fixed_seconds + num_steps * seconds_per_step + num_validations * seconds_per_validation
    return seconds, f"{seconds_per_step:.3g} s per step, {formatting.format_duration(fixed_seconds)} beside them"


def _has_used_gpu_type(stage_record: StageRecord, gpu_type: str) -> bool:
    gpu_names = [gpu_name.lower() for rank in stage_record.ranks for gpu_name in rank.gpus]
    # Match whole words, as `NVIDIA H200` contains `h20`. Allow a space before digits, as in `RTX 4090`.
    gpu_type_pattern = re.compile(rf"\b{re.sub('(?<=[a-z])(?=[0-9])', '[ -]?', gpu_type)}\b")
    return bool(gpu_names) and all(map(gpu_type_pattern.search, gpu_names))


def _estimate_from_flops(
    pipeline: Pipeline,
    stage: StageConfig,
    size_estimate: dict[str, Any] | None,
    gpu_count_by_stage: Mapping[str, int],
    machine_spec: MachineSpec | None,
) -> tuple[float | None, str]:
    stage_kind = pipeline.stage_kind(stage)
    if not stage_kind.in_worker:
        return 0.0, ""
    if size_estimate is None or size_estimate["tokens"] is None or machine_spec is None:
        return None, "never run"
    recipe = pipeline.recipes[stage.name]
    num_forward_passes = 1 + bool(recipe.policy.model_gradient_checkpointing)  # checkpointing repeats the forward pass
    flops_per_weight = _FORWARD_FLOPS * num_forward_passes + _INPUT_GRAD_FLOPS
    flops_per_token = flops_per_weight * size_estimate["parameters"] + _WEIGHT_GRAD_FLOPS * size_estimate["trainable"]
    num_engine_gpus = recipe.num_gpus(has_rollouts=stage_kind.feed == "rollouts") - recipe.num_gpus(has_rollouts=False)
    num_ranks = 1 if machine_spec.is_device_shared else max(1, gpu_count_by_stage.get(stage.name, 1) - num_engine_gpus)
    generation_note = ", without generation" if stage_kind.feed == "rollouts" else ""
    seconds = flops_per_token * size_estimate["tokens"] / (machine_spec.tflops * FLOPS_PER_TFLOP * num_ranks)
    flops_rate_unit = "TFLOP/s" if machine_spec.is_device_shared else "TFLOP/s per GPU"
    machine_text = f" on {machine_spec.name}" if machine_spec.name else ""
    return seconds, f"never run; counted at {machine_spec.tflops:.3g} {flops_rate_unit}{machine_text}{generation_note}"


def _describe_memory_fit(size_estimate: dict[str, Any] | None, machine: MachineSpec | None, rollout_mode: str) -> str:
    if size_estimate is None or machine is None or machine.memory_gib is None:
        return ""
    rollout_bytes = size_estimate["engine_weights"] + (size_estimate["kv_cache"] or 0)
    engines_have_own_gpus = rollout_mode == "disaggregated" and not machine.is_device_shared
    rollout_bytes += 0 if engines_have_own_gpus else size_estimate["memory"]["weights"]
    peak_gib, available_gib = max(size_estimate["peak"], rollout_bytes) / BYTES_PER_GIB, machine.memory_gib
    if peak_gib > available_gib:
        return f"no: {peak_gib:,.1f} GiB"
    return "?" if size_estimate["memory"]["activations"] is None or size_estimate["kv_cache"] is None else "yes"
