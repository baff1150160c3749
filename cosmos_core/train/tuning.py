"""Choose `train_policy.mini_batch` and `train.num_threads` by measurement, if the recipe sets them to `auto`.

The first train step computes the gradients of its first optimizer step several times, each time with other settings,
and drops them. The samples, the layout of the model over the ranks and the memory that rollout engines hold are thus
those of the training. The weights, the random generators and the algorithm are left as they were, so from this step on
the training continues as if the recipe had named the chosen values. Checkpoints contain these values. Reference
log-probabilities, which are computed before the first train step, use the default values.
"""

import copy
import ctypes
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import torch

from cosmos_core.algorithms.base import Algorithm
from cosmos_core.algorithms.registry import iterate_optimizer_updates
from cosmos_core.checkpoint.state import capture_rng, restore_rng
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.parallel.fsdp import local_shard
from cosmos_core.parallel.mesh import all_gather_object, is_single_rank
from cosmos_core.run.workspace import Workspace
from cosmos_core.train.feeds import RowFeed, SampleFeed
from cosmos_core.train.trainer import SpeedSettings, Trainer

logger = logging.getLogger(__name__)

MAX_TUNING_SECONDS = 45.0
"""Maximum total duration of the measurements that choose `mini_batch` and `num_threads`. It is exceeded only if a
single gradient computation with a few samples takes longer."""
_MEASUREMENT_SECONDS = 3.0
"""Target duration of one measurement, which sets the number of samples to measure with: as many as the gradient
computation with the fewest rows per pass and the most threads needs this time for, but at least two rows per
data-parallel rank."""
MAX_MEMORY_FRACTION = 0.85
"""Maximum fraction of the free memory for gradients, the optimizer's moments and the activations of a micro-batch.
Settings that are expected to need more are not measured."""
_MAX_SLOWDOWN = 1.15
"""Settings count as slow if they take longer than the fastest settings times this factor. After two slow settings in a
row, the search tries no larger or no smaller numbers of rows."""
_NUM_FINALISTS, _NUM_FINALIST_ROUNDS = 4, 4
"""Number of the fastest settings that are measured again at the end, and number of new measurements of each."""
_MIN_TOTAL_MEASURED_SECONDS, _MAX_MEASUREMENT_REPEATS = 0.5, 5
"""Settings are measured again until their measurements take `_MIN_TOTAL_MEASURED_SECONDS` together, but at most
`_MAX_MEASUREMENT_REPEATS` times."""
_MAX_POSTPONED_STEPS = 3
"""Number of train steps with too few samples to measure, after which the default settings are chosen."""
_MIN_PEAK_BYTES = 1 << 20
"""Minimum number of bytes that activations are assumed to take: their measured memory can be too small, because
allocations that reuse freed memory of the process are not measured."""
_MIN_SPEEDUP = 1.02
"""Settings with more rows per pass are chosen only if they are faster by more than this factor than settings with fewer
rows, which need less memory."""


class SettingsSearch:
    """Search for the fastest `SpeedSettings` among combinations of rows per pass and CPU threads, of which it measures
    only some."""

    def __init__(
        self,
        row_counts: Sequence[int],
        thread_counts: Sequence[int],
        measure: Callable[[SpeedSettings], float],
        is_affordable: Callable[[SpeedSettings, float], bool] = lambda settings, seconds: True,
    ) -> None:
        """Prepare the search over numbers of rows per pass and numbers of threads, both in ascending order. `measure`
        returns the seconds of settings, infinity if they need too much memory. `is_affordable` returns whether there is
        enough time and memory to measure settings, from the seconds that they will probably take."""
        self._row_counts, self._thread_counts = row_counts, thread_counts
        self._initial_settings = SpeedSettings(row_counts[0], thread_counts[-1])
        self._measure, self._is_affordable = measure, is_affordable
        self.seconds: dict[SpeedSettings, float] = {}
        """Shortest measured duration in seconds of each of the `SpeedSettings` that were measured."""

    def run(self) -> SpeedSettings:
        """Return the fastest settings. First measure each number of rows per pass with the most threads, from the
        smallest, which needs the least memory. Then measure each smaller number of threads with the fastest number of
        rows so far and, if this is not slow, with larger and smaller numbers. Finally measure the fastest again."""
        self._measure_if_affordable(self._initial_settings)
        self._measure_nearby_row_counts(self._initial_settings)
        for num_threads in reversed(self._thread_counts[:-1]):
            settings = self._fastest_settings._replace(num_threads=num_threads)
            if self._measure_if_affordable(settings) and not self._is_slow(settings):
                self._measure_nearby_row_counts(settings)
        finalist_settings = sorted(self.seconds, key=lambda settings: self.seconds[settings])[:_NUM_FINALISTS]
        for settings in finalist_settings * _NUM_FINALIST_ROUNDS if len(finalist_settings) > 1 else ():
            if math.isfinite(self.seconds[settings]):
                self._measure_if_affordable(settings)
        max_candidate_seconds = _MIN_SPEEDUP * self.seconds.get(self._fastest_settings, math.inf)
        candidates = [settings for settings, seconds in self.seconds.items() if seconds <= max_candidate_seconds]
        return min(
            candidates, key=lambda each: (each.rows_per_pass, self.seconds[each]), default=self._initial_settings
        )

    @property
    def _fastest_settings(self) -> SpeedSettings:
        return min(self.seconds, key=lambda settings: self.seconds[settings], default=self._initial_settings)

    def _is_slow(self, settings: SpeedSettings) -> bool:
        seconds = self.seconds[settings]
        return math.isinf(seconds) or seconds > _MAX_SLOWDOWN * self.seconds[self._fastest_settings]

    def _measure_nearby_row_counts(self, initial_settings: SpeedSettings) -> None:
        """Measure settings with more rows per pass than `initial_settings` in ascending order, then with fewer in
        descending order. Either order ends after two slow settings in a row, at settings for which `is_affordable`
        returns False, or when the memory does not suffice."""
        larger_row_counts = [size for size in self._row_counts if size > initial_settings.rows_per_pass]
        smaller_row_counts = [size for size in reversed(self._row_counts) if size < initial_settings.rows_per_pass]
        for sizes in (larger_row_counts, smaller_row_counts):
            num_consecutive_slow_settings = 0
            for size in sizes:
                settings = initial_settings._replace(rows_per_pass=size)
                if num_consecutive_slow_settings == 2 or not self._measure_if_affordable(settings):
                    break
                num_consecutive_slow_settings = num_consecutive_slow_settings + 1 if self._is_slow(settings) else 0
                if math.isinf(self.seconds[settings]):
                    break

    def _measure_if_affordable(self, settings: SpeedSettings) -> bool:
        """Measure settings, and return True; return False without a measurement if `is_affordable` returns False for
        them."""
        expected_seconds = self.seconds.get(settings, max(filter(math.isfinite, self.seconds.values()), default=0.0))
        if not self._is_affordable(settings, expected_seconds):
            return False
        times = [self._measure(settings)]
        while (
            len(times) < _MAX_MEASUREMENT_REPEATS
            and sum(times) < _MIN_TOTAL_MEASURED_SECONDS
            and self._is_affordable(settings, times[0])
        ):
            times.append(self._measure(settings))
        self.seconds[settings] = min([*times, self.seconds.get(settings, math.inf)])
        return True


class SpeedTuning:
    """Choice of the `SpeedSettings` of a training. All ranks call its methods together, and measure the same settings
    at the same time."""

    def __init__(
        self, trainer: Trainer, feed: SampleFeed, algorithm: Algorithm, train: TrainConfig, workspace: Workspace
    ) -> None:
        self._trainer, self._feed, self._algorithm, self._workspace = trainer, feed, algorithm, workspace
        initial_settings, mesh, algorithm_config = trainer.speed_settings, trainer.adapter.mesh, train.train_policy
        self._num_dp_ranks = mesh.dp.size() if mesh else 1
        self._samples_per_row, self._rows_per_update = algorithm_config.num_sequences_per_row, rows_per_update(train)
        self._row_counts, self._thread_counts = ([value] for value in initial_settings)
        if algorithm_config.mini_batch == "auto" and not algorithm_config.has_token_based_batches:
            self._row_counts = micro_batch_sizes(train, self._num_dp_ranks)
        self._num_local_ranks = all_gather_object(platform.node()).count(platform.node())
        if train.num_threads == "auto" and trainer.adapter.device.type == "cpu":
            num_cores = max(1, count_usable_cores() // self._num_local_ranks)
            self._thread_counts = thread_counts(min(all_gather_object(min(num_cores, initial_settings.num_threads))))
        self.max_memory_fraction, self.max_tuning_seconds = MAX_MEMORY_FRACTION, MAX_TUNING_SECONDS
        self.chosen: SpeedSettings | None = None
        """Chosen `SpeedSettings`; None: not chosen yet."""
        self._num_postponed_steps = 0

    def restore(self, settings: Sequence[int] | None) -> None:
        """Use the settings that a checkpoint has saved; None: it has none. Values in the recipe have priority. If a
        saved value is not possible in this training, for example on a larger mesh, `choose` will measure again."""
        options_by_setting = (self._row_counts, self._thread_counts)
        saved_settings = [v if len(c) > 1 else c[0] for v, c in zip(settings or (), options_by_setting, strict=False)]
        if saved_settings and all(value in c for value, c in zip(saved_settings, options_by_setting, strict=True)):
            self._set_chosen(SpeedSettings(*saved_settings))

    def choose(self, samples: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Choose the fastest `SpeedSettings` by trial passes over the samples of the newest train step. Return these
        samples, divided into micro-batches of the chosen size, and metrics. If settings were chosen before, return the
        samples unchanged. If the algorithm leaves out most of the samples, postpone the choice to a later step, but
        only a few times. If a signal requests a stop, end early without a choice; a resumed training chooses."""
        if self.chosen is not None or not samples or len(self._row_counts) == len(self._thread_counts) == 1:
            return samples, {}
        previous_settings = self._trainer.speed_settings
        measurement = _Measurement(self, samples)
        measured_counts = measurement.select_samples()
        if measured_counts is None:
            self._num_postponed_steps += 1
            self._apply_settings(previous_settings)
            if self._num_postponed_steps == _MAX_POSTPONED_STEPS:
                self._set_chosen(previous_settings)
            return measurement.read_samples(), {"time/tuning": measurement.seconds}
        search = SettingsSearch(measured_counts, self._thread_counts, measurement.measure, measurement.is_affordable)
        chosen_settings = search.run()
        if measurement.is_stopped:
            self._apply_settings(previous_settings)
            return measurement.read_samples(), {"time/tuning": measurement.seconds}
        if not search.seconds:  # keep the earlier settings if no time was left to measure others
            chosen_settings = previous_settings
        self._set_chosen(chosen_settings)
        slowest_settings = max(search.seconds, key=lambda settings: search.seconds[settings], default=chosen_settings)
        speedup = search.seconds.get(slowest_settings, 1.0) / search.seconds.get(chosen_settings, 1.0)
        logger.info(
            "mini_batch = %d, num_threads = %d: %.2f times as fast as %d and %d; measured %d settings with %d of %d "
            "samples", *chosen_settings, speedup, *slowest_settings, len(search.seconds),
            measurement.num_samples, len(samples),
        )  # fmt: skip
        metrics = {f"tuning/{name}": float(value) for name, value in chosen_settings._asdict().items()}
        return measurement.read_samples(), {**metrics, "time/tuning": measurement.seconds}

    def _set_chosen(self, settings: SpeedSettings) -> None:
        self.chosen = settings
        self._apply_settings(settings)

    def _apply_settings(self, settings: SpeedSettings) -> None:
        self._trainer.speed_settings = settings
        if isinstance(self._feed, RowFeed):
            self._feed.set_rows_per_pass(settings.rows_per_pass)


class _Measurement:
    """Measurements of the speed of different `SpeedSettings` with the samples of one train step. They leave the
    weights, the random generators and the algorithm as they were."""

    def __init__(self, tuning: SpeedTuning, samples: list[Any]) -> None:
        self._tuning, self._all_samples = tuning, samples
        self._trainer, self._algorithm = tuning._trainer, tuning._algorithm
        self._rng_states, self._algorithm_state = capture_rng(), copy.deepcopy(tuning._algorithm.state_dict())
        self._start_time, self._num_update_samples = time.monotonic(), 0
        self._progress = tuning._workspace.progress
        self._start_compile_seconds = self._progress.compile_seconds
        self._peak_memory = PeakMemory(self._trainer.adapter.device, tuning._num_local_ranks)
        optimizer = self._trainer.optimizer
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._gradient_bytes = sum(local_shard(parameter).nbytes for parameter in parameters)
        # In its first step, the optimizer creates two moments for each parameter.
        optimizer_bytes = 2 * sum(local_shard(p).nbytes for p in parameters if p not in optimizer.state)
        free_bytes = tuning.max_memory_fraction * self._peak_memory.available_bytes()
        self._max_activation_bytes = min(all_gather_object(free_bytes - self._gradient_bytes - optimizer_bytes))
        self._bytes_per_token = self._max_measured_bytes = 0.0
        self._max_measured_rows = 0
        """Largest number of rows per pass measured so far; its activations took `_max_measured_bytes`."""
        token_counts = [self._trainer.adapter.num_tokens(sample) for sample in samples]
        self._max_row_tokens = tuning._samples_per_row * max(*token_counts, tuning._feed.find_max_sample_tokens() or 0)
        self._min_row_tokens = tuning._samples_per_row * min(token_counts)
        has_batch_id = self._trainer.adapter.assigned_batch_id(samples[0]) is not None
        self._batching_feed = tuning._feed if isinstance(tuning._feed, RowFeed) and has_batch_id else None
        """Feed that forms the micro-batches of the samples; None: the trainer forms them."""
        self.num_samples = len(samples)
        """Number of samples with which settings are measured, the first ones of the train step."""
        self.seconds = 0.0
        """Duration of all measurements so far, on the slowest rank."""
        self.is_stopped = False
        """Whether a signal has requested a stop on any rank, after which nothing more is measured."""

    def select_samples(self) -> list[int] | None:
        """Select so many samples that computing their gradient takes a few seconds. Return the numbers of rows per pass
        to measure with these samples; None if the algorithm leaves out most of the samples."""
        speed_tuning, sample_divisor = self._tuning, self._tuning._samples_per_row * self._tuning._num_dp_ranks
        initial_settings = SpeedSettings(speed_tuning._row_counts[0], speed_tuning._thread_counts[-1])
        min_rows_per_rank = max(2, speed_tuning._row_counts[0])
        self.num_samples = min(len(self._all_samples), min_rows_per_rank * sample_divisor)
        self.measure(initial_settings)  # discard a first, slow gradient, which allocates memory
        seconds_per_sample = self.measure(initial_settings) / self.num_samples
        max_samples = int(_MEASUREMENT_SECONDS / seconds_per_sample) if seconds_per_sample else len(self._all_samples)
        num_samples = max(min_rows_per_rank, max_samples // sample_divisor) * sample_divisor
        self.num_samples = min(len(self._all_samples), num_samples)
        self.measure(initial_settings)
        num_rows_per_update = min(self.num_samples // speed_tuning._samples_per_row, speed_tuning._rows_per_update)
        if 2 * self._num_update_samples < num_rows_per_update * speed_tuning._samples_per_row:
            return None
        rows_per_rank = -(-num_rows_per_update // speed_tuning._num_dp_ranks)
        return [size for size in speed_tuning._row_counts if size <= rows_per_rank] or speed_tuning._row_counts[:1]

    def read_samples(self) -> list[Any]:
        """Return all samples of the train step, divided into micro-batches of the measured number of rows."""
        return self._batching_feed.reread_newest_samples() if self._batching_feed else self._all_samples

    def is_affordable(self, settings: SpeedSettings, expected_seconds: float) -> bool:
        """Return True if all ranks have enough memory for `settings`, and the time limit leaves `expected_seconds` to
        measure them."""
        rows_per_pass = settings.rows_per_pass
        # Rows of a data term, or rows that share a prompt, may need more memory than their numbers of tokens suggest.
        bytes_scaled_by_rows = self._max_measured_bytes * rows_per_pass / max(1, self._max_measured_rows)
        expected_bytes = max(rows_per_pass * self._max_row_tokens * self._bytes_per_token, bytes_scaled_by_rows)
        has_measured_memory = settings.rows_per_pass <= self._max_measured_rows
        is_time_left = self.seconds + expected_seconds <= self._tuning.max_tuning_seconds
        return (
            is_time_left
            and not self.is_stopped
            and (has_measured_memory or expected_bytes <= self._max_activation_bytes)
        )

    def measure(self, settings: SpeedSettings) -> float:
        """Return the seconds in which the slowest rank computes the gradients of the first optimizer step; infinity if
        the memory of the GPU does not suffice. All ranks get the same number."""
        self._tuning._apply_settings(settings)
        samples = self.read_samples()
        compile_seconds = self._progress.compile_seconds
        self._peak_memory.reset()
        self._trainer.max_batch_tokens = 0
        start_time = time.perf_counter()
        try:
            updates = iterate_optimizer_updates(self._algorithm, samples[: self.num_samples], self._trainer)
            for update in islice(updates, 1):
                self._num_update_samples = len(update.samples)
                self._trainer.compute_gradients(update)
            self._peak_memory.synchronize()
            seconds = time.perf_counter() - start_time - (self._progress.compile_seconds - compile_seconds)
        except torch.OutOfMemoryError:
            if not is_single_rank():
                raise  # this rank cannot go on alone: the others wait for it in a collective
            seconds = math.inf
        self._trainer.drop_gradients()
        restore_rng(self._rng_states)
        self._algorithm.load_state_dict(copy.deepcopy(self._algorithm_state))
        activation_bytes = float(max(_MIN_PEAK_BYTES, self._peak_memory.peak_bytes() - self._gradient_bytes))
        compile_seconds = self._progress.compile_seconds - self._start_compile_seconds
        total_seconds = time.monotonic() - self._start_time - compile_seconds
        local_measurements = (seconds, activation_bytes, self._trainer.max_batch_tokens, total_seconds)
        rank_results = all_gather_object((*local_measurements, self._tuning._workspace.stop_requested))
        seconds, activation_bytes, num_tokens, self.seconds, self.is_stopped = map(max, zip(*rank_results, strict=True))
        if settings.rows_per_pass >= self._max_measured_rows and math.isfinite(seconds):
            # More rows give a better estimate, because memory that does not depend on the rows counts less.
            # With pipeline parallelism, all rows of a pass are in memory, not only those of one micro-batch.
            num_tokens = max(1, num_tokens, settings.rows_per_pass * self._min_row_tokens)
            self._bytes_per_token, self._max_measured_bytes = activation_bytes / num_tokens, activation_bytes
            self._max_measured_rows = settings.rows_per_pass
        return seconds


class PeakMemory:
    """Peak memory of this process on a GPU or the host, minus its memory when the object was created."""

    def __init__(self, device: torch.device, num_local_ranks: int) -> None:
        self._device, self._is_cuda, self._num_local_ranks = device, device.type == "cuda", num_local_ranks
        self.synchronize()
        with suppress(OSError, AttributeError):  # return freed memory to the system, as its reuse hides allocations
            ctypes.CDLL(None).malloc_trim(0)
        self._bytes_at_creation = (
            torch.cuda.memory_allocated(device) if self._is_cuda else psutil.Process().memory_info().rss
        )

    def reset(self) -> None:
        """Start a new measurement of the peak memory."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # without permission to reset the peak, use the peak since the process started
            Path("/proc/self/clear_refs").write_text("5")

    def synchronize(self) -> None:
        """Wait until the GPU has finished its work."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int:
        """Return the peak memory since the last reset, minus the memory at the creation of the object."""
        if self._is_cuda:
            return torch.cuda.max_memory_allocated(self._device) - self._bytes_at_creation
        with suppress(OSError, ValueError, StopIteration):
            process_status_lines = Path("/proc/self/status").read_text().splitlines()
            peak_kib = next(int(line.split()[1]) for line in process_status_lines if line.startswith("VmHWM:"))
            return max(0, 1024 * peak_kib - self._bytes_at_creation)
        return 0

    def available_bytes(self) -> int:
        """Return the free memory of the GPU, or this rank's share of the free memory of the host."""
        if self._is_cuda:
            cached_bytes = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
            return torch.cuda.mem_get_info(self._device)[0] + cached_bytes
        free_bytes, cgroup_path = psutil.virtual_memory().available, Path("/sys/fs/cgroup")
        with suppress(OSError, ValueError, KeyError):  # ignore the value `max`, which means that there is no limit
            cgroup_limit, cgroup_usage = (int((cgroup_path / f"memory.{n}").read_text()) for n in ("max", "current"))
            memory_statistics = dict(line.split() for line in (cgroup_path / "memory.stat").read_text().splitlines())
            page_cache_bytes = int(memory_statistics["inactive_file"])  # the kernel frees the page cache on demand
            free_bytes = min(free_bytes, cgroup_limit - cgroup_usage + page_cache_bytes)
        return free_bytes // self._num_local_ranks


def rows_per_update(train_config: TrainConfig) -> int:
    """Return the maximum number of rows in an optimizer step, summed over all data-parallel ranks."""
    configured_num_rows = getattr(train_config.train_policy, "batch_size_per_optimize", None)
    return min(configured_num_rows or train_config.train_batch_per_replica, train_config.train_batch_per_replica)


def micro_batch_sizes(train: TrainConfig, num_dp_ranks: int) -> list[int]:
    """Return the possible values of `mini_batch` in ascending order, up to the number of rows that one of
    `num_dp_ranks` data-parallel ranks has in an optimizer step."""
    rows_per_step, max_rows = train.train_batch_per_replica, rows_per_update(train)
    num_rows_to_divide = max(1, rows_per_step // num_dp_ranks) if train.train_policy.has_rollouts else rows_per_step
    common_divisor = math.gcd(num_rows_to_divide, max_rows)
    return [size for size in range(1, -(-max_rows // num_dp_ranks) + 1) if common_divisor % size == 0]


def thread_counts(max_threads: int) -> list[int]:
    """Return the numbers of threads to try: the powers of two below `max_threads`, and `max_threads`."""
    return [2**i for i in range(max_threads.bit_length()) if 2**i < max_threads] + [max_threads]
