"""Several rollout engines in separate processes, as one engine that generates while the ranks train.

Only the first rank communicates with the engines (`engine_pool`). The other ranks take part in collective operations:
gathering weights, and waiting.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from cosmos_core.errors import ERRORS_BY_NAME, CosmosError, serialise_error
from cosmos_core.parallel.mesh import all_reduce_any, broadcast_object, is_first_rank
from cosmos_core.rollout.base import Bucket, LoadReceipt, WeightFormat
from cosmos_core.rollout.engine_pool import POLL_SECONDS, EngineHandle, EnginePool
from cosmos_core.rollout.transfer import (
    DeltaWeightTransfer,
    EngineProcess,
    HostWeightLink,
    NativeWeightTransfer,
    WeightLoad,
)
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)


class EngineFleet:
    """`Engine` that consists of several engines. All ranks call its methods together, except `request`, `needs_weights`
    and `raise_thread_error`."""

    weight_format: WeightFormat
    ranks_per_engine = 1

    def __init__(  # noqa: PLR0913 - one parameter per property of a fleet
        self,
        get_handles: Callable[[], Sequence[EngineHandle]],
        *,
        max_groups: int,
        timeout_seconds: float,
        weight_sync_mode: Literal["disabled", "generation", "inference"] = "disabled",
        sleeps_in_training: bool = False,
        weight_transfer: NativeWeightTransfer | DeltaWeightTransfer | None = None,
        send_heartbeat: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the first engine is open; if engines share the trainer's GPUs, wait until all engines are open.

        `get_handles` returns the current engines, which can change. `max_groups`: maximum number of groups in flight in
        one engine. An engine without a forward pass for `timeout_seconds` is killed. `weight_sync_mode`: value of
        `rollout.async_r2r_sync`. With `sleeps_in_training`, engines share the trainer's GPUs and sleep during training.
        `weight_transfer` sends weights by NCCL or CUDA IPC, or only changed values; None: all through host memory.
        """
        self._weight_sync_mode, self._sleeps_in_training = weight_sync_mode, sleeps_in_training
        self._weight_transfer, self._send_heartbeat = weight_transfer, send_heartbeat
        self._pool = EnginePool(get_handles, max_groups, timeout_seconds, send_heartbeat)
        self.request, self.raise_thread_error = self._pool.request, self._pool.raise_thread_error
        self._submissions: list[tuple[Prompt, Future[Group]]] = []
        self._loads_only_new_engines = False
        self.has_new_engine = False
        """Whether the last weight load was the first load of at least one engine."""
        self.sleep_level = 0
        """1 if the engines share the trainer's GPUs and have slept since the last weight load; else 0."""
        self.version = -1
        """The lowest version of weights among the engines that have weights; -1 before the first weight load."""
        self.send_missing_weights: Callable[[], object] = lambda: None
        """Function that sends the last published weights to engines without weights; all ranks call it together."""
        self._release_cached_memory()
        if is_first_rank():
            self._pool.start_thread()
        name, self.weight_format, error_record = broadcast_object(self._wait_for_engines() if is_first_rank() else None)  # type: ignore[misc]
        self._raise_on_all_ranks(error_record)
        self.name = f"{name}, in processes of their own"

    @property
    def needs_weights(self) -> bool:
        """Return whether an engine has no weights yet and so cannot be sent prompts."""
        return any(engine.version is None for engine in self._pool.open_engines())

    @property
    def num_delta_bytes(self) -> int | None:
        """Return the number of bytes that the last weight load sent to one engine; None if loads send all values."""
        return self._weight_transfer.num_sent_bytes if isinstance(self._weight_transfer, DeltaWeightTransfer) else None

    @property
    def num_restarts(self) -> int:
        """Return the number of times that engines died or hung since the start of the fleet."""
        return self._pool.num_restarts

    @contextmanager
    def loading_new_engines(self) -> Iterator[None]:
        """Return a context manager in which weights are loaded only into engines that have no weights yet."""
        self._loads_only_new_engines = True
        try:
            yield
        finally:
            self._loads_only_new_engines = False

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        if is_first_rank():
            self._submissions += [(prompt, self.request(prompt, sampling, step, is_urgent=True)) for prompt in prompts]

    def completed(self) -> list[Group]:
        """Wait for all submitted groups, and return them together; engines that restart get the weights again."""
        while True:  # poll by short collectives, so that no rank exceeds the timeout of a collective
            groups, error_record, needs_load = broadcast_object(self._poll_submissions() if is_first_rank() else None)  # type: ignore[misc]
            self._raise_on_all_ranks(error_record)
            if groups is not None:
                return groups
            if needs_load:
                self.send_missing_weights()

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        """Load weights into all open engines except those that die during the load; see `Engine.load_weights`."""
        self._release_cached_memory()
        engines = self._pool.open_engines()  # the list is empty on all ranks but the first
        receiving_processes = [
            EngineProcess(e, e.description) for e in engines if e.version is None or not self._loads_only_new_engines
        ]
        num_sent_tensors, weight_load = 0, WeightLoad(self._pool, receiving_processes)
        uses_host_link = self._loads_only_new_engines and isinstance(self._weight_transfer, NativeWeightTransfer)
        weight_transfer = None if uses_host_link else self._weight_transfer
        weight_link = weight_transfer.open_link(weight_load) if weight_transfer else HostWeightLink(weight_load)
        if is_first_rank():
            self._pool.is_loading_weights = True
            load_replies = self._call_engine_processes(
                weight_load.processes, "begin_weight_load", version,
                loads_in_background=self._weight_sync_mode != "disabled", timeout_seconds=self._pool.timeout_seconds,
            )  # fmt: skip
            weight_load.processes = [engine_process for engine_process, _ in load_replies]
        has_new_engine = any(engine_process.engine.version is None for engine_process in weight_load.processes)
        try:
            for bucket in buckets:
                num_sent_tensors += len(bucket)
                weight_link.send(bucket)
        finally:
            weight_link.end_weight_load()
        if is_first_rank():
            self._end_weight_load(version, weight_load.processes, num_sent_tensors)
            weight_link.confirm_weight_load()
        engine_versions = [engine.version for engine in self._pool.get_loaded_engines() if engine.version is not None]
        self.version, self.has_new_engine = broadcast_object((min(engine_versions, default=version), has_new_engine))
        self.sleep_level = 0
        return LoadReceipt(version, num_sent_tensors)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities that one of the engines computes; see `Engine.logprobs`."""
        return next(iter(self.logprobs_per_engine(token_ids)))

    def logprobs_per_engine(self, token_ids: Sequence[int], version: int | None = None) -> list[list[float]]:
        """Return the log-probabilities of `token_ids` from each engine whose weights have the version `version`;
        None: from all engines."""
        logprobs: list[list[float]] = []
        if is_first_rank():
            engines = [engine for engine in self._pool.get_loaded_engines() if version in {None, engine.version}]
            engine_replies = [(engine, engine.handle.call("logprobs", engine.version, token_ids)) for engine in engines]
            self._pool.await_replies(engine_replies)
            for _, reply in engine_replies:
                with suppress(ConnectionError):  # skip dead engines, which the communication thread handles
                    logprobs.append(reply.result())
        return broadcast_object(logprobs)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Let engines that share the trainer's GPUs sleep, see `Engine.sleep`; other engines stay awake."""
        self.sleep_level = max(self.sleep_level, int(self._sleeps_in_training))
        self._call_colocated_engines("sleep")
        self._release_cached_memory()  # this call is a barrier: no rank trains before all engines have released memory

    def wake(self) -> None:
        self._release_cached_memory()
        self._call_colocated_engines("wake")

    def _release_cached_memory(self) -> None:
        """On GPUs that the trainer shares with engines, release torch's cached memory, and wait for all ranks."""
        if self._sleeps_in_training:
            torch.cuda.empty_cache()
            all_reduce_any(False)

    def close(self) -> None:
        """End the communication with the engines, whose processes the process manager ends; see `Engine.close`."""
        self._pool.is_closed = True

    def _raise_on_all_ranks(self, error_record: tuple[str, str] | None) -> None:
        """Raise an error of the first rank on all ranks. `error_record` has the name and message of the error; None: no
        error. The first rank raises the original error if possible."""
        if error_record is not None:
            self.raise_thread_error()
            error_name, error_message = error_record
            raise ERRORS_BY_NAME[error_name](error_message)

    # The methods below run on the first rank, the only rank that communicates with the engines.

    def _poll_submissions(self) -> tuple[list[Group] | None, tuple[str, str] | None, bool]:
        """Return the submitted groups (None if some are not complete), the error of an engine (None if there is none),
        and whether an engine has no weights."""
        try:
            wait([future for _, future in self._submissions], POLL_SECONDS, FIRST_EXCEPTION)
            self.raise_thread_error()
            self._send_heartbeat()
            groups = [future.result() for _, future in self._submissions if future.done()]
            if len(groups) < len(self._submissions):
                return None, None, self.needs_weights
        except Exception as error:
            if not isinstance(error, CosmosError):
                logger.exception("an engine refused what it was asked")
            self._submissions = []
            return [], serialise_error(error), False
        self._submissions = []
        return groups, None, False

    def _call_colocated_engines(self, method_name: str) -> None:
        if self._sleeps_in_training and is_first_rank():
            engines = self._pool.get_loaded_engines()
            self._call_engine_processes([EngineProcess(engine, engine.description) for engine in engines], method_name)

    def _wait_for_engines(self) -> tuple[str, WeightFormat, tuple[str, str] | None]:
        """Wait for the first open engine, or for all engines that share the trainer's GPUs, because vLLM cannot open
        while the training needs the memory. Return the name and weight format of an engine, and an error or None."""
        try:
            needs_all_engines, engine_pool = self._sleeps_in_training, self._pool
            while len(engines := engine_pool.open_engines()) < max(1, len(engine_pool.engines) * needs_all_engines):
                self._send_heartbeat()
                self.raise_thread_error()
                time.sleep(0.05)
        except Exception as error:  # noqa: BLE001 - the error is raised on all ranks
            return "", "checkpoint", serialise_error(error)
        assert engines[0].description is not None
        return engines[0].description.name, engines[0].description.weight_format, None

    def _call_engine_processes(
        self, processes: Sequence[EngineProcess], method: str, *arguments: Any, **kwargs: Any
    ) -> list[tuple[EngineProcess, Any]]:
        """Call a method of each engine process. Return the processes that replied, with their replies; mark the engines
        whose process died as dead."""
        reply_futures = [(process, process.engine.handle.call(method, *arguments, **kwargs)) for process in processes]
        self._pool.await_replies([(process.engine, reply_future) for process, reply_future in reply_futures])
        processes_and_replies = []
        for process, reply_future in reply_futures:
            try:
                processes_and_replies.append((process, reply_future.result()))
            except ConnectionError as error:
                self._pool.mark_engine_dead(*process, error)
        return processes_and_replies

    def _end_weight_load(self, version: int, processes: Sequence[EngineProcess], num_sent_tensors: int) -> None:
        load_options = {
            "loads_in_background": self._weight_sync_mode != "disabled",
            "drains_requests": self._weight_sync_mode == "generation",
        }
        try:
            for process, receipt in self._call_engine_processes(processes, "end_weight_load", version, **load_options):
                receipt.verify(version, num_sent_tensors, "an engine")
                with self._pool.lock:
                    if process.is_alive:
                        process.engine.version, process.engine.last_progress_time = version, time.monotonic()
        finally:
            with self._pool.lock:
                self._pool.is_loading_weights = False
                for engine in self._pool.engines.values():
                    engine.last_progress_time = time.monotonic()
