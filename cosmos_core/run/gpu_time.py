"""GPU time of stages, held (from `state.json`) and estimated, to compute costs and to enforce budgets.

An interval ends when the GPUs are free for other stages. If the launcher was killed, the interval ends with the last
heartbeat of launcher or worker. The time of a stage includes all earlier attempts, whose files are in `superseded/`.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import BUDGET_KEYS
from cosmos_core.run.files import SHARED_FOLDER, JsonDocument, read_document, warn_if_disk_full, write_json
from cosmos_core.run.manifest import RESULT_FILE, Result, read_result
from cosmos_core.run.progress import read_progress
from cosmos_core.run.state import GpuInterval, read_state, update_state


@contextmanager
def record_gpu_time(stage_path: Path, num_gpus: int) -> Iterator[None]:
    """Record that the next attempt of a stage holds `num_gpus` GPUs during the `with` block; record nothing for 0
    GPUs."""
    if not num_gpus:
        yield
        return
    saved_gpu_intervals = read_gpu_intervals(stage_path)
    gpu_interval = GpuInterval(attempt=read_state(stage_path).attempt + 1, gpus=num_gpus, begin=time.time())
    update_state(stage_path, holds=[*saved_gpu_intervals, gpu_interval])
    try:
        yield
    finally:
        with warn_if_disk_full(f"the time for which {stage_path.name} held GPUs"):
            update_state(stage_path, holds=[*saved_gpu_intervals, gpu_interval.model_copy(update={"end": time.time()})])


def read_gpu_intervals(stage_path: Path) -> list[GpuInterval]:
    """Return the intervals in which a stage held GPUs; an interval without an end lasts until the last heartbeat."""
    state, progress = read_state(stage_path), read_progress(stage_path)
    heartbeat_times = (state.renewed, state.heartbeat, progress.heartbeat if progress else None)
    last_heartbeat_time = min(max(filter(None, heartbeat_times), default=0.0), time.time())
    end_times = [max(each.begin, last_heartbeat_time) if each.end is None else each.end for each in state.holds]
    return [interval.model_copy(update={"end": end}) for interval, end in zip(state.holds, end_times, strict=True)]


def sum_gpu_seconds(intervals: list[GpuInterval]) -> float:
    """Return the GPU seconds of intervals that have ended: the sum of duration times number of GPUs."""
    return sum(max(0.0, (interval.end or interval.begin) - interval.begin) * interval.gpus for interval in intervals)


def read_run_gpu_intervals(run_path: Path) -> dict[str, list[GpuInterval]]:
    """Return the intervals in which each stage of a run held GPUs, including intervals of superseded attempts."""
    intervals_by_stage: dict[str, list[GpuInterval]] = {}
    for folder in (*sorted(run_path.glob("superseded/*")), *sorted(run_path.glob("stages/*"))):
        intervals_by_stage.setdefault(folder.name.partition(".")[0], []).extend(read_gpu_intervals(folder))
    return {name: intervals for name, intervals in intervals_by_stage.items() if intervals}


def compute_run_gpu_seconds(run_path: Path) -> float:
    """Return the GPU seconds of all attempts of all stages of a run."""
    return sum(map(sum_gpu_seconds, read_run_gpu_intervals(run_path).values()))


def add_gpu_time_to_result(stage_path: Path) -> Result:
    """Add the GPU seconds of a finished stage to its `result.json`, as `gpu_seconds` and by attempt as `attempts`, and
    return the result. The digest of the result does not cover these values, and a full disk may prevent the write."""
    result, result_path = read_result(stage_path), stage_path / RESULT_FILE
    assert result is not None
    intervals_by_attempt: dict[int, list[GpuInterval]] = {}
    for interval in read_gpu_intervals(stage_path):
        intervals_by_attempt.setdefault(interval.attempt, []).append(interval)
    result["attempts"] = [
        {"attempt": attempt, "gpus": max(each.gpus for each in intervals), "gpu_seconds": sum_gpu_seconds(intervals)}
        for attempt, intervals in intervals_by_attempt.items()
    ]
    result["gpu_seconds"] = sum(attempt_entry["gpu_seconds"] for attempt_entry in result["attempts"])
    with warn_if_disk_full(f"the GPU seconds of {stage_path.name}"):
        result_file_mode = result_path.stat().st_mode
        write_json(result_path, result)
        result_path.chmod(result_file_mode)  # keep the file private if the worker made it so
    return result


class GpuTimeEstimate(JsonDocument):
    """Content of an estimate file: GPU seconds of each stage of a run, None if unknown."""

    gpu_seconds: dict[str, float | None] = {}


def save_estimate(pipeline: Pipeline, output_dir: Path, gpu_seconds: Mapping[str, float | None]) -> None:
    """Save the estimated GPU seconds of each stage of a pipeline; this replaces an earlier estimate."""
    estimate_file = _locate_estimate_file(pipeline, output_dir)
    estimate_file.parent.mkdir(parents=True, exist_ok=True)
    write_json(estimate_file, GpuTimeEstimate(gpu_seconds=dict(gpu_seconds)).model_dump(), fsync=False)


def read_saved_estimate(pipeline: Pipeline, output_dir: Path) -> dict[str, float | None]:
    """Return the last estimate of the GPU seconds of each stage of a pipeline with the same settings; empty if there is
    none."""
    saved_estimate = read_document(_locate_estimate_file(pipeline, output_dir), GpuTimeEstimate)
    return saved_estimate.gpu_seconds if saved_estimate else {}


def _locate_estimate_file(pipeline: Pipeline, output_dir: Path) -> Path:
    settings = pipeline.as_toml()
    settings["pipeline"] = {key: value for key, value in settings["pipeline"].items() if key not in BUDGET_KEYS}
    settings_digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()
    return output_dir / SHARED_FOLDER / "estimates" / f"{settings_digest}.json"
