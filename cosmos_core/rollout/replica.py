"""Rollout engine in a separate process: generates while the ranks train, and loads weights between two forward passes.

Methods can be called from any thread. Only one thread uses the engine; it generates until a command arrives.
"""

import logging
import math
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cosmos_core.error_handling import complete_future
from cosmos_core.errors import ConfigError, DataError, ModelError, StageFailed, first_line
from cosmos_core.rollout.base import Bucket, Engine, LoadReceipt, WeightFormat
from cosmos_core.rollout.delta import ChangedWords
from cosmos_core.rollout.link import BucketHeader, TransferFailed, copy_tensors_to_buffer, split_bucket
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_MIN_BUCKET_TIMEOUT_SECONDS = 600.0
"""Minimum time limit in seconds for the next bucket of a weight load. If no bucket arrives within the limit, the load
fails, because the trainer has probably died."""
_BUCKET_TIMEOUT_FACTOR = 4
"""Time limit for the next bucket of a weight load, as a multiple of the trainer's engine timeout, because the trainer
can wait for other engines between two buckets."""


class EngineDescription(NamedTuple):
    """Description of an engine: its name, weight format, process id, and support of NCCL or CUDA IPC for weights."""

    name: str
    weight_format: WeightFormat
    pid: int
    supports_native_transfer: bool = False


class PackedBucket(NamedTuple):
    """Bucket of weights as one array, which processes on a machine share."""

    header: BucketHeader
    data: np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class _NativeBucket:
    """Header of a bucket of weights whose data the engine receives by NCCL or CUDA IPC, and a future that reports the
    receipt."""

    header: BucketHeader
    timeout_seconds: float
    received_future: Future[None]


_BucketQueueItem = PackedBucket | _NativeBucket | StageFailed | None


@dataclass
class _WeightLoad:
    """State of a weight load in progress: the queue of its buckets and the future of its receipt."""

    buckets: queue.Queue[_BucketQueueItem]
    """Queue of the buckets to load; None marks the end of the load, and an error ends an abandoned load."""
    receipt_future: Future[LoadReceipt]
    timeout_seconds: float
    is_load_scheduled: bool = False
    """Whether the command to load the buckets has been queued for the engine's thread."""

    def put(self, queue_item: _BucketQueueItem) -> None:
        """Wait for room in the queue of buckets and add an item. Discard the item if the load has failed, because
        nothing reads the queue then."""
        while not self.receipt_future.done():
            with suppress(queue.Full):
                self.buckets.put(queue_item, timeout=_POLL_SECONDS)
                return


class EngineReplica:
    """Rollout engine in a separate process, with the thread that runs it."""

    def __init__(
        self, open_engine: Callable[[Callable[[], None]], Engine], *, should_wait_for_trainer: bool = False
    ) -> None:
        """Open the engine in a separate thread. `open_engine` gets a heartbeat callback, which the engine calls
        repeatedly while it generates.

        With `should_wait_for_trainer`, the engine is opened when the first session begins: vLLM measures the memory
        that the trainer leaves on a GPU, so the trainer must have its model by then.
        """
        self._engine_commands: queue.Queue[Callable[[Engine], None]] = queue.Queue()
        self._finished_groups_condition = threading.Condition()
        self._finished_groups: list[Group] = []
        self._permanent_error: Exception | None = None
        """Error of model, data or settings during generation, which a restart of the engine would not fix."""
        self._session_id = ""
        self._num_forward_passes = 0
        self._num_groups_in_flight = 0
        self._weight_load: _WeightLoad | None = None
        self._kept_bucket_by_index: dict[int, PackedBucket] = {}
        self._version: int | None = None
        self._description_future: Future[EngineDescription] = Future()
        self._engine_thread = threading.Thread(target=self._run_engine, args=(open_engine,), daemon=True)
        if not should_wait_for_trainer:
            self._engine_thread.start()

    def begin_session(self, session_id: str) -> EngineDescription:
        """Wait until the engine is open, and discard the requests of earlier sessions, that is, of earlier trainers."""
        with self._finished_groups_condition:
            if self._engine_thread.ident is None:
                self._engine_thread.start()
        engine_description = self._description_future.result()

        def abort_generation(engine: Engine) -> None:
            if hasattr(engine, "abort"):
                engine.abort()
                self._num_groups_in_flight = 0
            elif self._permanent_error:
                os._exit(1)  # exit, because without `abort` the engine would generate its old requests in this session
            while self._num_groups_in_flight:
                self._generate(engine)
            with self._finished_groups_condition:
                self._session_id, self._finished_groups, self._permanent_error = session_id, [], None

        if self._weight_load is not None and not self._weight_load.receipt_future.done():
            # End the weight load of an earlier trainer, which has died and will send no more buckets.
            if self._weight_load.is_load_scheduled:
                self._weight_load.put(StageFailed("weight sync: the trainer has gone"))
            self._weight_load = None
        self._run_on_engine_thread(abort_generation)
        return engine_description

    def submit(self, session_id: str, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit prompts; raise a `ConnectionError` if the session is over or began in a process that has died."""

        def submit(engine: Engine) -> None:
            engine.submit(prompts, sampling, step)
            self._num_groups_in_flight += len(prompts)

        self._check_session_id(session_id)
        self._run_on_engine_thread(submit)

    def completed(self, session_id: str, max_wait_seconds: float) -> tuple[list[Group], int]:
        """Wait at most `max_wait_seconds` for a group. Return all finished groups and the engine's number of forward
        passes, which does not grow while the engine hangs. Raise a `ConnectionError` as `submit` does, and an error of
        model, data or settings that ended the generation."""
        with self._finished_groups_condition:
            self._finished_groups_condition.wait_for(
                lambda: self._finished_groups or self._permanent_error or session_id != self._session_id,
                max_wait_seconds,
            )
            self._check_session_id(session_id)
            if self._permanent_error is not None:
                raise self._permanent_error
            groups, self._finished_groups = self._finished_groups, []
        return groups, self._num_forward_passes

    def _check_session_id(self, session_id: str) -> None:
        if session_id != self._session_id:
            raise ConnectionError("the process in which the session began has died")

    def begin_weight_load(self, version: int, *, loads_in_background: bool, timeout_seconds: float) -> None:
        """Prepare to receive the weights of version `version` in buckets. With `loads_in_background`, the engine
        generates until the last bucket has arrived. The time limit for each bucket depends on `timeout_seconds`, after
        which the trainer kills an engine that does not reply."""
        assert self._weight_load is None or self._weight_load.receipt_future.done(), "one load at a time"
        buckets = queue.Queue[_BucketQueueItem](0 if loads_in_background else 1)
        bucket_timeout_seconds = max(_MIN_BUCKET_TIMEOUT_SECONDS, _BUCKET_TIMEOUT_FACTOR * timeout_seconds)
        self._weight_load = weight_load = _WeightLoad(
            buckets, Future(), bucket_timeout_seconds, is_load_scheduled=not loads_in_background
        )
        if not loads_in_background:
            self._engine_commands.put(lambda engine: self._load_buckets(engine, weight_load, version))

    def receive_bucket(self, packed_bucket: PackedBucket) -> None:
        """Receive the next bucket of the weight load in progress."""
        self._get_current_weight_load().put(packed_bucket)

    def receive_kept_bucket(self, bucket_index: int, bucket: PackedBucket | ChangedWords) -> None:
        """Receive a bucket of the weight load in progress, or its difference from the last load, and keep the bucket
        in host memory for the difference of the next load. Raise a `ConnectionError` if the process that got the
        previous load has died."""
        if isinstance(bucket, ChangedWords):
            if bucket_index not in self._kept_bucket_by_index:
                raise ConnectionError("the process that got the previous weights has died")
            kept_bucket = self._kept_bucket_by_index[bucket_index]
            bucket.apply_changes(kept_bucket.data)
        else:
            # Copy the array, because it may be in shared memory, which a later bucket overwrites.
            kept_bucket = self._kept_bucket_by_index[bucket_index] = bucket._replace(data=bucket.data.copy())
        self.receive_bucket(kept_bucket)

    def connect_link(self, backend: str, init_info: dict[str, Any], timeout_seconds: float) -> None:
        """Connect the engine with the trainer; raise `TransferFailed` after `timeout_seconds`, or if the engine has no
        link for NCCL or CUDA IPC."""
        self._run_on_engine_thread(lambda engine: _get_native_link(engine).connect(backend, init_info, timeout_seconds))

    def receive_native_bucket(self, bucket_header: BucketHeader, timeout_seconds: float) -> None:
        """Receive the next bucket by NCCL or CUDA IPC; raise `TransferFailed` if it does not arrive in time."""
        weight_load = self._get_current_weight_load()
        received_future: Future[None] = Future()
        weight_load.put(_NativeBucket(bucket_header, timeout_seconds, received_future))
        pending_futures: list[Future[Any]] = [received_future, weight_load.receipt_future]
        wait(pending_futures, return_when=FIRST_COMPLETED)
        if not received_future.done():
            raise TransferFailed("the engine's weight load has ended")
        received_future.result()

    def end_weight_load(self, version: int, *, loads_in_background: bool, drains_requests: bool) -> LoadReceipt:
        """End the load after the last bucket, and wait until all weights are loaded. With `loads_in_background`, the
        engine begins only now to load the buckets that it has received. With `drains_requests`, it first generates
        until no request is in flight. Raise a `StageFailed` if a tensor is missing, or the model has no such tensor."""
        weight_load = self._get_current_weight_load()
        weight_load.put(None)
        if loads_in_background:
            weight_load.is_load_scheduled = True
            self._engine_commands.put(
                lambda engine: self._load_buckets(engine, weight_load, version, drains_requests=drains_requests)
            )
        return weight_load.receipt_future.result()

    def _get_current_weight_load(self) -> _WeightLoad:
        """Return the weight load in progress; raise a `ConnectionError` if it began in a process that has died."""
        if self._weight_load is None:
            raise ConnectionError("the process in which the load began has died")
        return self._weight_load

    def logprobs(self, version: int, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of tokens; raise a `ConnectionError` if the engine's weights do not have the
        version `version`."""
        if version != self._version:
            raise ConnectionError(f"the engine has weights of version {self._version}")
        return self._run_on_engine_thread(lambda engine: engine.logprobs(token_ids))

    def sleep(self) -> None:
        """Release the engine's accelerator memory between two forward passes; see `Engine.sleep`."""
        self._run_on_engine_thread(lambda engine: engine.sleep())

    def wake(self) -> None:
        """Reallocate the engine's accelerator memory between two forward passes; see `Engine.wake`."""
        self._run_on_engine_thread(lambda engine: engine.wake())

    def _run_on_engine_thread(self, engine_function: Callable[[Engine], Any]) -> Any:
        """Call a function with the engine on the engine's thread, between two forward passes, and return the result."""
        result_future: Future[Any] = Future()
        self._engine_commands.put(lambda engine: complete_future(result_future, lambda: engine_function(engine)))
        return result_future.result()

    def _count_forward_pass(self) -> None:
        self._num_forward_passes += 1

    def _run_engine(self, open_engine: Callable[[Callable[[], None]], Engine]) -> None:
        try:
            engine = open_engine(self._count_forward_pass)
        except Exception as error:  # noqa: BLE001 - raised again in `begin_session`
            self._description_future.set_exception(error)
            return
        has_native_link = getattr(engine, "link", None) is not None
        engine_description = EngineDescription(engine.name, engine.weight_format, os.getpid(), has_native_link)
        self._description_future.set_result(engine_description)
        while True:
            while self._num_groups_in_flight == 0 or not self._engine_commands.empty():
                self._engine_commands.get()(engine)
            self._generate(engine)

    def _generate(self, engine: Engine) -> None:
        """Make a forward pass with `step`, or generate a group if the engine has no `step`. Exit the process after an
        error, except errors of model, data or settings, which a new process would raise, too."""
        try:
            groups = getattr(engine, "step", engine.completed)()
        except (ConfigError, DataError, ModelError) as error:
            with self._finished_groups_condition:
                self._permanent_error, self._num_groups_in_flight = error, 0
                self._finished_groups_condition.notify_all()
            return
        except Exception:
            logger.exception("the engine failed")
            os._exit(1)
        self._count_forward_pass()
        self._num_groups_in_flight -= len(groups)
        if groups:
            with self._finished_groups_condition:
                self._finished_groups += groups
                self._finished_groups_condition.notify_all()

    def _load_buckets(
        self, engine: Engine, weight_load: _WeightLoad, version: int, *, drains_requests: bool = False
    ) -> None:
        """Load the weights of version `version` into the engine, as the buckets of `weight_load` arrive; with
        `drains_requests`, first generate until no request is in flight."""
        while drains_requests and self._num_groups_in_flight:
            # Each forward pass counts as progress, so that the trainer does not kill the engine as hung.
            self._generate(engine)

        def load_and_record_version() -> Any:
            receipt = engine.load_weights(version, _iterate_buckets(weight_load, engine))
            self._version = version
            return receipt

        complete_future(weight_load.receipt_future, load_and_record_version)


def pack_bucket(bucket: Bucket) -> PackedBucket:
    """Return a bucket of weights as one array in host memory; tied weights are stored once."""
    bucket_header, tensors = split_bucket(bucket)
    data = np.empty(sum(tensor.nbytes for tensor in tensors), np.uint8)
    copy_tensors_to_buffer(torch.from_numpy(data), tensors)
    return PackedBucket(bucket_header, data)


def unpack_bucket(packed_bucket: PackedBucket) -> Bucket:
    """Return the tensors of a packed bucket of weights as views of its memory, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        packed_bytes = torch.from_numpy(packed_bucket.data)
    bucket_header = packed_bucket.header
    dtypes = [getattr(torch, name) for name in bucket_header.dtype_names]
    tensor_sizes = [
        math.prod(shape) * dtype.itemsize for shape, dtype in zip(bucket_header.shapes, dtypes, strict=True)
    ]
    tensor_slices = zip(bucket_header.names, packed_bytes.split(tensor_sizes), dtypes, strict=True)
    return bucket_header.make_bucket({name: tensor_bytes.view(dtype) for name, tensor_bytes, dtype in tensor_slices})


def _get_native_link(engine: Engine) -> Any:
    native_link = getattr(engine, "link", None)
    if native_link is None:
        raise TransferFailed(f"engine {engine.name!r} has no native link")
    return native_link


def _iterate_buckets(weight_load: _WeightLoad, engine: Engine) -> Iterator[Bucket]:
    while (bucket := weight_load.buckets.get(timeout=weight_load.timeout_seconds)) is not None:
        if isinstance(bucket, _NativeBucket):
            try:
                _get_native_link(engine).receive(bucket.header, bucket.timeout_seconds)
            except Exception as error:  # noqa: BLE001 - the trainer sends the bucket again
                bucket.received_future.set_exception(TransferFailed(first_line(error)))
                continue
            # Report the receipt before the bucket is loaded, so that the trainer gathers the next bucket meanwhile.
            bucket.received_future.set_result(None)
            yield bucket.header.make_meta_bucket()
            continue
        if isinstance(bucket, StageFailed):
            raise bucket
        yield unpack_bucket(bucket)
