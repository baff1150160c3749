"""Compute the cost of a run so far: the GPU hours of all attempts of its stages, and their price."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.table import Column, Table

from cosmos_core.observe.formatting import float_or_inf, format_number
from cosmos_core.observe.record import RunRecord, read_pipeline, read_run
from cosmos_core.run.directory import list_runs, read_start_info
from cosmos_core.run.gpu_time import read_run_gpu_intervals, sum_gpu_seconds
from cosmos_core.run.state import GpuInterval

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class RunCost:
    """GPU hours of all attempts of the stages of a run so far, and their cost."""

    gpu_intervals_by_stage: dict[str, list[GpuInterval]]
    """Time intervals in which GPUs were reserved for the attempts of each stage, by stage name."""
    hourly_price: float | None
    """Price of one GPU hour; None: unknown."""
    budget: float | None
    estimated_gpu_hours: float | None
    """Estimated GPU hours of the run from `plan --estimate`; None if there is no estimate for a stage."""

    @property
    def gpu_hours(self) -> float:
        """Return the GPU hours of all attempts of all stages."""
        return sum(map(sum_gpu_seconds, self.gpu_intervals_by_stage.values())) / _SECONDS_PER_HOUR

    def format_cost(self, gpu_hours: float | None) -> str:
        """Return the cost of a number of GPU hours as text; empty if the price or the number is unknown (None)."""
        return "" if self.hourly_price is None or gpu_hours is None else format_number(gpu_hours * self.hourly_price)

    @property
    def rows(self) -> Iterator[tuple[str, int, int, float, str, str]]:
        """Yield for each time interval: stage, attempt, number of GPUs, seconds, GPU hours and cost."""
        for stage, gpu_intervals in self.gpu_intervals_by_stage.items():
            for each in gpu_intervals:
                gpu_hours, seconds = sum_gpu_seconds([each]) / _SECONDS_PER_HOUR, (each.end or each.begin) - each.begin
                yield stage, each.attempt, each.gpus, seconds, format_number(gpu_hours), self.format_cost(gpu_hours)

    def __str__(self) -> str:
        gpu_hours_text, cost_text = f"{format_number(self.gpu_hours)} GPU hours", self.format_cost(self.gpu_hours)
        cost_text_parts = [f"{cost_text} for {gpu_hours_text}" if cost_text else gpu_hours_text]
        if self.estimated_gpu_hours is not None:
            estimated_hours_text = f"{format_number(self.estimated_gpu_hours)} GPU hours"
            cost_text_parts.append(f"estimated {self.format_cost(self.estimated_gpu_hours) or estimated_hours_text}")
        if self.budget is not None:
            cost_text_parts.append(f"budget {format_number(self.budget)}")
        return ", ".join(cost_text_parts)


def compute_run_cost(run_path: Path) -> RunCost:
    """Return the GPU hours and the cost of a run so far."""
    pipeline, start_info = read_pipeline(run_path), read_start_info(run_path)
    price_settings = [pipeline.get(key) for key in ("price_per_gpu_hour", "budget")]
    hourly_price, budget = (float_or_inf(value) if isinstance(value, int | float) else None for value in price_settings)
    stage_estimates = list(start_info.estimate.values()) if start_info else []
    has_estimates = bool(stage_estimates) and None not in stage_estimates
    estimated_gpu_hours = sum(value or 0.0 for value in stage_estimates) / _SECONDS_PER_HOUR if has_estimates else None
    return RunCost(read_run_gpu_intervals(run_path), hourly_price, budget, estimated_gpu_hours)


def make_cost_card(run: RunRecord) -> dict[str, str]:
    """Return the label and the text of the report's card with the cost of a run, as a dict with one entry; empty if no
    GPU was reserved. If the price is unknown, the dict is also empty for a run without GPUs, where each process counts
    as one GPU."""
    run_cost = compute_run_cost(run.path)
    if run_cost.hourly_price is not None:
        return {"cost": str(run_cost)} if run_cost.gpu_intervals_by_stage else {}
    has_gpus = any(rank.gpus for stage in run.stages for rank in stage.ranks)
    return {"GPUs held": str(run_cost)} if run_cost.gpu_intervals_by_stage and has_gpus else {}


def make_cost_table(output_dir: Path, max_runs: int) -> Table:
    """Return a table with GPU hours and costs of the `max_runs` newest runs of a folder, newest last, and sums."""
    table = Table(Column("run", no_wrap=True), "pipeline", "outcome")
    for column in ("GPU hours", "cost", "estimate", "budget"):
        table.add_column(column, justify="right")
    gpu_hour_sum, total_cost, are_all_prices_known = 0.0, 0.0, True
    for start_info in list_runs(output_dir)[-max_runs:]:
        run, cost = read_run(output_dir / start_info.run_id), compute_run_cost(output_dir / start_info.run_id)
        cost_cells = [format_number(cost.gpu_hours), *map(cost.format_cost, (cost.gpu_hours, cost.estimated_gpu_hours))]
        cost_cells.append(format_number(cost.budget) if cost.budget is not None else "")
        table.add_row(start_info.run_id, run.name, run.outcome, *cost_cells)
        gpu_hour_sum, total_cost = gpu_hour_sum + cost.gpu_hours, total_cost + cost.gpu_hours * (cost.hourly_price or 0)
        are_all_prices_known = are_all_prices_known and (cost.hourly_price is not None or not cost.gpu_hours)
    table.add_section()
    cost_text = f"{'' if are_all_prices_known else '> '}{format_number(total_cost)}"
    table.add_row("all", "", "", format_number(gpu_hour_sum), cost_text, "", "")
    return table
