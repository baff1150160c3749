"""Tables of several runs: a list of the runs in a folder, and a comparison of two by settings, metrics and time."""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.table import Column, Table

from cosmos_core.config.compose import StageKinds, load_pipeline
from cosmos_core.config.difference import pipeline_differences
from cosmos_core.observe import formatting
from cosmos_core.observe.record import RunRecord, StageRecord, read_run
from cosmos_core.observe.resuming import describe_interruption
from cosmos_core.run.directory import PIPELINE_FILE, list_runs
from cosmos_core.run.liveness import find_dead_holder_start_time, is_flow_running, read_holder
from cosmos_core.run.state import ACTIVE_STATES, FINISHED_STATES

_MAX_INACTIVE_SECONDS = 60.0
"""Seconds after the last activity of a run within which a stage whose input stages are finished should start; if no
stage has started by then, the run counts as inactive."""


def make_run_table(output_dir: Path, max_runs: int) -> Table:
    """Return a table of the `max_runs` newest runs of a folder, newest last, each with its outcome and last metrics."""
    run_id_column = Column("run", no_wrap=True)  # never truncate the run id, which users copy into other commands
    table = Table(run_id_column, "pipeline", "began", "took", "stages", "outcome", "metrics", caption_justify="left")
    interruption_messages: list[str] = []
    for start_info in list_runs(output_dir)[-max_runs:]:
        run = read_run(output_dir / start_info.run_id)
        num_done_stages = sum(stage.status in FINISHED_STATES for stage in run.stages)
        total_seconds = sum(stage.seconds or 0.0 for stage in run.stages)
        # The size of an export, its only metric, says nothing about what was trained.
        stage_metrics = (stage.metrics for stage in reversed(run.stages) if list(stage.metrics) != ["export/bytes"])
        last_metrics = next(filter(None, map(formatting.select_table_metrics, stage_metrics)), dict[str, float]())
        metrics_text = ", ".join(f"{name} {_format_metric(value)}" for name, value in last_metrics.items())
        table.add_row(
            start_info.run_id, run.name, formatting.format_timestamp(start_info.started),
            formatting.format_duration(total_seconds), f"{num_done_stages}/{len(run.stages)}", run.outcome, metrics_text
        )  # fmt: skip
        interruption_messages += [f"{start_info.run_id}: {message}"] if (message := describe_interruption(run)) else []
    table.caption = "\n".join(interruption_messages) or None
    return table


def compare_runs(first_run_path: Path, second_run_path: Path, stage_kinds: StageKinds) -> Iterator[str | Table]:
    """Yield the differences between two runs: settings as lines of text, then a table of the metrics of shared stages;
    raise ConfigError if a pipeline cannot be read."""
    pipelines = [load_pipeline(path / PIPELINE_FILE, (), stage_kinds) for path in (first_run_path, second_run_path)]
    difference_lines = list(pipeline_differences(*pipelines))
    yield from difference_lines or ["the settings are the same"]
    second_stage_by_name = {stage.name: stage for stage in read_run(second_run_path).stages}
    metric_column = Column("metric", overflow="fold")  # two names may begin with the same characters
    table = Table("stage", metric_column, first_run_path.name, second_run_path.name, "change")
    for stage in read_run(first_run_path).stages:
        if stage.name in second_stage_by_name:
            for table_row in _compare_stage_metrics(stage, second_stage_by_name[stage.name]):
                table.add_row(stage.name, *table_row)
    yield table


def _compare_stage_metrics(old_stage: StageRecord, new_stage: StageRecord) -> Iterator[tuple[str, str, str, str]]:
    stage_seconds = [stage.seconds for stage in (old_stage, new_stage)]
    if any(stage_seconds):
        yield "time", formatting.format_duration(stage_seconds[0]), formatting.format_duration(stage_seconds[1]), ""
    metrics = [key for key in old_stage.metrics | new_stage.metrics if not key.startswith(formatting.RESOURCE_PREFIXES)]
    for key in sorted(metrics):
        metric_values = [stage.metrics.get(key) for stage in (old_stage, new_stage)]
        metric_numbers = [formatting.float_or_inf(value) for value in metric_values if isinstance(value, int | float)]
        difference = metric_numbers[1] - metric_numbers[0] if len(set(metric_numbers)) == 2 else 0.0
        change_text = f"{difference:+.4g} {formatting.judge_change(key, difference)}".rstrip() if difference else ""
        yield key, _format_metric(metric_values[0]), _format_metric(metric_values[1]), change_text


def _format_metric(metric_value: object) -> str:
    return f"{formatting.float_or_inf(metric_value):.4g}" if isinstance(metric_value, int | float) else "–"


def is_run_inactive(run: RunRecord) -> bool:
    """Return True if no stage of a run is active or about to start, and no Python flow of the run executes code."""
    if is_flow_running(run.path) or any(stage.status in ACTIVE_STATES for stage in run.stages):
        return False
    finished_stage_names = {stage.name for stage in run.stages if stage.status in FINISHED_STATES}
    waiting_stages = [stage for stage in run.stages if stage.status == "waiting"]
    if not any(finished_stage_names.issuperset(stage.after) for stage in waiting_stages) or run.outcome == "stopped":
        return True
    run_lock_holder = read_holder(run.path)
    if run_lock_holder and not run_lock_holder.flow_state and run_lock_holder.is_local:
        # A run with a live process is active, because its stages may wait for hours for GPUs, a worker or an approval.
        return find_dead_holder_start_time(run.path) is not None or run.outcome not in {"running", "waiting"}
    last_activity_time = max([run.start_time, *(stage.state.ended or 0.0 for stage in run.stages)])
    return time.time() - last_activity_time >= _MAX_INACTIVE_SECONDS
