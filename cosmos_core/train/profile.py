"""Traces of train steps by torch.profiler, as set in `[profiler]`; written to `profile/` in the stage."""

from pathlib import Path
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from cosmos_core.config.schema.profiler import ProfilerConfig
from cosmos_core.parallel.mesh import rank_number
from cosmos_core.run.files import write_json
from cosmos_core.run.stage import PROFILE_REQUEST_FILE, PROFILES_FOLDER

_MAX_SAVED_OPERATORS = 20


class StepProfiler:
    """Context manager that traces train steps of one rank, at the start or when `cosmos profile` requests a trace."""

    def __init__(self, stage_folder: Path, config: ProfilerConfig, start_step: int) -> None:
        """Prepare the profiler; `start_step` is the number of train steps completed before this attempt of the
        training."""
        self._stage_folder, self._config = stage_folder, config.sub_profiler_config
        self._rank = rank_number()
        self._is_rank_profiled = config.enable_profiler and self._rank in (self._config.rank_filter or (0,))
        self._last_request_time = self._read_profile_request_time()
        self._torch_profiler: profile | None = None
        self._step = self._profile_start_step = start_step

    def __enter__(self) -> Self:
        if self._is_rank_profiled and self._config.do_profile:
            self._begin_profile()
        return self

    def __exit__(self, *error: object) -> None:
        if self._torch_profiler is not None:
            self._torch_profiler.stop()

    def step(self, step: int) -> None:
        """Notify the profiler that train step `step` has ended."""
        self._step = step
        if self._torch_profiler is not None:
            self._torch_profiler.step()
            if step == self._last_profiled_step:
                self._torch_profiler.stop()
                self._torch_profiler = None
        elif self._is_rank_profiled and (request_time := self._read_profile_request_time()) != self._last_request_time:
            self._last_request_time = request_time
            self._begin_profile()

    def _read_profile_request_time(self) -> float:
        profile_request_file = self._stage_folder / PROFILE_REQUEST_FILE
        return profile_request_file.stat().st_mtime if profile_request_file.exists() else 0.0

    def _begin_profile(self) -> None:
        config, has_gpu = self._config, torch.cuda.is_available()
        self._profile_start_step = self._step
        self._torch_profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])],
            schedule=schedule(wait=config.wait_steps, warmup=config.warmup_steps, active=config.active_steps, repeat=1),
            on_trace_ready=self._write_trace,
            record_shapes=config.record_shape,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
        )
        self._torch_profiler.start()

    @property
    def _last_profiled_step(self) -> int:
        config = self._config
        return self._profile_start_step + config.wait_steps + config.warmup_steps + config.active_steps

    def _write_trace(self, profile: profile) -> None:
        if (first_traced_step := self._last_profiled_step - self._config.active_steps + 1) > self._step:
            return  # the training ended before the first step to trace, so there is no trace
        profiles_folder = self._stage_folder / PROFILES_FOLDER
        profiles_folder.mkdir(exist_ok=True)
        trace_name = f"steps_{first_traced_step}-{self._step}_rank_{self._rank}"
        profile.export_chrome_trace(str(profiles_folder / f"{trace_name}.json.gz"))
        write_json(profiles_folder / f"{trace_name}.operators.json", _list_slowest_operators(profile))


def _list_slowest_operators(profile: profile) -> list[dict[str, Any]]:
    """Return the operators with the longest self time in a trace, each with its milliseconds on the GPU or, without a
    GPU, on the CPU, and its share of the total time."""
    self_time_attribute = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    timed_operators = [(getattr(event, self_time_attribute), event) for event in profile.key_averages()]
    total_microseconds = sum(microseconds for microseconds, _ in timed_operators) or 1.0
    timed_operators.sort(key=lambda timed_event: -timed_event[0])
    return [
        {
            "operator": event.key,
            "calls": event.count,
            "ms": round(microseconds / 1000, 3),
            "share": round(microseconds / total_microseconds, 4),
        }
        for microseconds, event in timed_operators[:_MAX_SAVED_OPERATORS]
    ]
