"""Choose `train_policy.mini_batch` and `train.num_threads` by measurement, if the recipe sets them to `auto`.

The first train step computes the gradients of its first optimizer step several times, each time with other settings,
and drops them. The samples, the layout of the model over the ranks and the memory that rollout engines hold are thus
those of the training. The weights, the random generators and the algorithm are left as they were, so the training
continues as if the recipe had named the chosen values. Checkpoints contain these values.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.checkpoint.state import capture_rng, restore_rng
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.parallel.mesh import all_gather_object, is_single_rank, num_ranks
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.feeds import SampleFeed
from cosmos_core.train.trainer import SpeedSettings, Trainer

logger = logging.getLogger(__name__)

MAX_MEASURED_SECONDS = 45.0
"""Maximum total duration of the measurements."""
MAX_MEMORY_FRACTION = 0.85
"""Fraction of the free memory that the activations of a micro-batch may take."""
_MAX_SLOWDOWN = 1.15
"""Ratio to the fastest settings above which settings are slow. After two slow ones in a row, no further ones are
measured in the same direction."""
_NUM_FINALISTS, _NUM_FINAL_ROUNDS = 4, 4
"""Number of settings that are measured again in turns, and how often."""
_MIN_SECONDS, _MAX_REPEATS = 0.5, 5
"""Minimum total duration of the measurements of one setting, unless it was measured `_MAX_REPEATS` times."""
_MIN_SPEEDUP = 1.02
"""Factor by which settings with more rows must be faster than settings with fewer rows, which need less memory."""


class SettingsSearch:
    """Search for the fastest settings of a grid, which measures only some of them."""

    def __init__(
        self,
        default: SpeedSettings,
        sizes: Sequence[int],
        thread_counts: Sequence[int],
        measure: Callable[[SpeedSettings], float],
        is_affordable: Callable[[SpeedSettings, float], bool] = lambda settings, seconds: True,
    ) -> None:
        """Prepare the search.

        Args:
            default: settings to start from.
            sizes: numbers of rows per pass, in ascending order.
            thread_counts: numbers of threads, in ascending order.
            measure: function that returns the seconds of settings.
            is_affordable: function that returns whether settings may be measured, given the seconds that they will
                probably take.
        """
        self._default, self._sizes, self._thread_counts = default, sizes, thread_counts
        self._measure, self._is_affordable = measure, is_affordable
        self.seconds: dict[SpeedSettings, float] = {}
        """Minimum of the measured seconds of each setting."""

    def run(self) -> SpeedSettings:
        """Return the fastest settings. Measured are sizes around the default, then for each number of threads that is
        not slow with the fastest size so far the sizes around that, and finally the fastest settings again."""
        default = self._default
        for num_threads in sorted(self._thread_counts, key=lambda count: abs(count - default.num_threads)):
            start = SpeedSettings(self._fastest.rows_per_pass, num_threads)
            if self._try(start) and not self._is_slow(start):
                self._walk_sizes(start)
        finalists = sorted(self.seconds, key=lambda settings: self.seconds[settings])[:_NUM_FINALISTS]
        for settings in finalists * _NUM_FINAL_ROUNDS if len(finalists) > 1 else ():
            self._try(settings)
        limit = _MIN_SPEEDUP * self.seconds.get(self._fastest, math.inf)
        close_settings = [settings for settings, seconds in self.seconds.items() if seconds <= limit]
        return min(close_settings, key=lambda each: (each.rows_per_pass, self.seconds[each]), default=default)

    @property
    def _fastest(self) -> SpeedSettings:
        return min(self.seconds, key=lambda settings: self.seconds[settings], default=self._default)

    def _is_slow(self, settings: SpeedSettings) -> bool:
        return self.seconds[settings] > _MAX_SLOWDOWN * self.seconds[self._fastest]

    def _walk_sizes(self, start: SpeedSettings) -> None:
        """Measure sizes above the size of `start`, ascending, then those below, descending. Each direction ends after
        two slow settings in a row, or at settings that are too expensive."""
        larger_sizes = [size for size in self._sizes if size > start.rows_per_pass]
        smaller_sizes = [size for size in reversed(self._sizes) if size < start.rows_per_pass]
        for sizes in (larger_sizes, smaller_sizes):
            num_slow = 0
            for size in sizes:
                settings = start._replace(rows_per_pass=size)
                if num_slow == 2 or not self._try(settings):
                    break
                num_slow = num_slow + 1 if self._is_slow(settings) else 0

    def _try(self, settings: SpeedSettings) -> bool:
        """Measure settings, and return True; return False if they are too expensive."""
        expected_seconds = self.seconds.get(settings, max(self.seconds.values(), default=0.0))
        if not self._is_affordable(settings, expected_seconds):
            return False
        repeats: list[float] = []
        while len(repeats) < _MAX_REPEATS and sum(repeats) < _MIN_SECONDS:
            repeats.append(self._measure(settings))
        self.seconds[settings] = min([*repeats, self.seconds.get(settings, math.inf)])
        return True


class SpeedTuning:
    """Choice of the `SpeedSettings` of a training. All ranks measure the same settings at the same time."""

    _memory: PeakMemory
    """Memory since the start of the measurements."""

    def __init__(
        self, trainer: Trainer, feed: SampleFeed, algorithm: Algorithm, train: TrainConfig, progress: ProgressWriter
    ) -> None:
        self._trainer, self._feed, self._algorithm, self._progress = trainer, feed, algorithm, progress
        self._default = trainer.speed_settings
        self._sizes, self._thread_counts = ([value] for value in self._default)
        mesh, policy = trainer.adapter.mesh, train.train_policy
        if policy.mini_batch == "auto" and not policy.has_token_based_batches:
            self._sizes = micro_batch_sizes(train, mesh.dp.size() if mesh else 1)
        if train.num_threads == "auto" and trainer.adapter.device.type == "cpu":
            num_cores = max(1, len(os.sched_getaffinity(0)) // num_ranks())
            self._thread_counts = thread_counts(min(num_cores, self._default.num_threads))
            self._default = self._default._replace(num_threads=self._thread_counts[-1])
        default_size = max(size for size in self._sizes if size <= self._default.rows_per_pass)
        self._default = self._default._replace(rows_per_pass=default_size)
        self._rows_per_update = getattr(policy, "batch_size_per_optimize", None)
        self._measured_seconds, self._bytes_per_row, self._max_bytes = 0.0, math.inf, math.inf
        self.chosen: SpeedSettings | None = None
        """The chosen settings; None: not chosen yet."""
        self.max_memory_fraction = MAX_MEMORY_FRACTION

    def apply(self, settings: Sequence[int] | None) -> None:
        """Use settings that were chosen before, as a checkpoint contains them; None: it contains none."""
        if settings is not None:
            self.chosen = self._trainer.speed_settings = SpeedSettings(*settings)

    def choose(self, samples: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Choose settings with the samples of the newest train step of the feed. Return these samples, divided into
        micro-batches of the chosen size, and metrics. If settings were chosen before, do nothing; if the algorithm
        leaves out most of the samples, because nothing is learned from them, wait for another step."""
        if self.chosen is not None or not samples or len(self._sizes) == len(self._thread_counts) == 1:
            return samples, {}
        start_time, rng_states, algorithm_state = time.monotonic(), capture_rng(), self._algorithm.state_dict()

        def measure(settings: SpeedSettings) -> float:
            seconds = self._measure(settings, samples)
            restore_rng(rng_states)
            self._algorithm.load_state_dict(algorithm_state)
            return seconds

        num_update_samples = len(
            next((update.samples for update in self._algorithm.updates(samples, self._trainer)), ())
        )
        restore_rng(rng_states)
        self._algorithm.load_state_dict(algorithm_state)
        if 2 * num_update_samples < min(len(samples), self._rows_per_update or len(samples)):
            return samples, {}
        self._memory = PeakMemory(self._trainer.adapter.device)
        free_bytes = self.max_memory_fraction * self._memory.available_bytes() - self._missing_optimizer_bytes()
        self._max_bytes = min(all_gather_object(free_bytes))
        measure(self._default)  # the first gradients are slow: memory is allocated, and kernels are chosen
        search = SettingsSearch(self._default, self._sizes, self._thread_counts, measure, self._is_affordable)
        chosen = search.run()
        self.apply(chosen)
        if search.seconds:
            speedup = search.seconds[self._default] / search.seconds[chosen]
            logger.info(
                "mini_batch = %d, num_threads = %d: %.2f times as fast as %d and %d; measured %d settings",
                *chosen, speedup, *self._default, len(search.seconds),
            )  # fmt: skip
        metrics = {f"tuning/{name}": float(value) for name, value in chosen._asdict().items()}
        return self._divide_again(samples), {**metrics, "time/tuning": time.monotonic() - start_time}

    def _is_affordable(self, settings: SpeedSettings, expected_seconds: float) -> bool:
        """Return whether all ranks have memory for settings, and whether there is time to measure them."""
        has_memory = settings.rows_per_pass * self._bytes_per_row <= self._max_bytes
        is_smaller = settings.rows_per_pass <= self._default.rows_per_pass  # the training has to run with some number
        has_time = self._measured_seconds + expected_seconds <= MAX_MEASURED_SECONDS
        return has_time and (has_memory or is_smaller)

    def _measure(self, settings: SpeedSettings, samples: list[Any]) -> float:
        """Return the seconds in which the slowest rank computes the gradients of the first optimizer step; infinity if
        the memory of the GPU does not suffice. All ranks get the same number."""
        self._trainer.speed_settings = settings
        samples, compile_seconds = self._divide_again(samples), self._progress.compile_seconds
        self._memory.reset()
        start_time = time.perf_counter()
        try:
            for update in islice(self._algorithm.updates(samples, self._trainer), 1):
                self._trainer.compute_gradients(update)
            self._memory.synchronize()
            seconds = time.perf_counter() - start_time - (self._progress.compile_seconds - compile_seconds)
        except torch.OutOfMemoryError:
            if not is_single_rank():
                raise  # the other ranks wait in a collective operation
            seconds = math.inf
        self._trainer.drop_gradients()
        longest_sample = max(map(self._trainer.adapter.num_tokens, samples))
        growth = max(1.0, (self._feed.max_sample_tokens or 0) / max(1, longest_sample))
        rank_values = all_gather_object((seconds, growth * self._memory.peak_bytes() / settings.rows_per_pass))
        seconds, bytes_per_row = map(max, zip(*rank_values, strict=True))
        # With few rows the result is too high, because memory that does not depend on the rows is divided by them.
        self._bytes_per_row = min(self._bytes_per_row, bytes_per_row)
        self._measured_seconds += seconds if math.isfinite(seconds) else 0.0
        return seconds

    def _divide_again(self, samples: list[Any]) -> list[Any]:
        rows_per_pass = self._trainer.speed_settings.rows_per_pass
        if self._feed.rows_per_pass in {None, rows_per_pass}:
            return samples
        return self._feed.divide_again(rows_per_pass)

    def _missing_optimizer_bytes(self) -> int:
        """Return the size of the two moments of each parameter that the optimizer creates in its first step."""
        optimizer = self._trainer.optimizer
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
        local_parameters = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
        return 2 * sum(p.numel() * p.element_size() for p in local_parameters)


class PeakMemory:
    """Memory of this process on a device, a GPU or the host, beyond its memory when the object was created."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self.synchronize()
        self._start_bytes = torch.cuda.memory_allocated(device) if self._is_cuda else psutil.Process().memory_info().rss

    def reset(self) -> None:
        """Start to measure a new peak."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # without the permission, the peak is that since the start of the process
            Path("/proc/self/clear_refs").write_text("5")

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int:
        """Return the peak since the last reset, beyond the memory at the creation of the object."""
        if self._is_cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._start_bytes
        with suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/self/status").read_text().splitlines()
            peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
            return max(0, 1024 * peak_kib - self._start_bytes)
        return 0

    def available_bytes(self) -> int:
        """Return the free memory of the GPU, or this rank's share of the free memory of the host."""
        if self._is_cuda:
            unused_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + unused_bytes
        free_bytes, cgroup = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
        with suppress(OSError, ValueError):  # no limit is the word `max`
            limit, current = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
            free_bytes = min(free_bytes, limit - current)
        return free_bytes // num_ranks()


def micro_batch_sizes(train: TrainConfig, num_data_ranks: int) -> list[int]:
    """Return the values that `mini_batch` may have, in ascending order, up to the number of rows that one of
    `num_data_ranks` data-parallel ranks has in an optimizer step."""
    policy, num_rows = train.train_policy, train.train_batch_per_replica
    rows_per_update = min(getattr(policy, "batch_size_per_optimize", None) or num_rows, num_rows)
    num_divisible_rows = math.gcd(
        max(1, num_rows // num_data_ranks) if policy.has_rollouts else num_rows, rows_per_update
    )
    max_size = -(-rows_per_update // num_data_ranks)
    return [size for size in range(1, max_size + 1) if num_divisible_rows % size == 0]


def thread_counts(max_threads: int) -> list[int]:
    """Return the powers of two below `max_threads`, and `max_threads`."""
    return [2**i for i in range(max_threads.bit_length()) if 2**i < max_threads] + [max_threads]
