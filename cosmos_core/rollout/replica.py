"""Rollout engine in a separate process: generates while the ranks train, and loads weights between two forward passes.

Methods may be called from any thread. Only one thread uses the engine; it generates until a command arrives. This
module does not depend on how the process was started or is called.
"""

import logging
import os
import queue
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cosmos_core.error_handling import set_future
from cosmos_core.errors import StageFailed, first_line
from cosmos_core.rollout.base import Bucket, Engine, LoadReceipt, WeightFormat, storage_of
from cosmos_core.rollout.link import BucketHeader, TransferFailed
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

_LOAD_SECONDS = 600.0
"""Minimum time limit in seconds for the next bucket of a weight load, in case the trainer has died."""
_TIMEOUT_FACTOR = 4
"""Time limit for the next bucket as a multiple of the trainer's engine timeout, because the trainer may wait that long
for other engines first."""


class Description(NamedTuple):
    """Description of an engine and its process."""

    name: str
    weight_format: WeightFormat
    pid: int
    has_link: bool = False
    """Whether the engine can receive weights through a native link."""


class PackedBucket(NamedTuple):
    """Bucket of weights as one array, which processes share without a copy."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    layout: list[tuple[str, str, tuple[int, ...], int, int]]
    """Name, dtype, shape, first byte and end byte of each tensor in the array."""


_LOAD_ABANDONED = PackedBucket(np.empty(0, np.uint8), [])
"""Placeholder that ends the queue of buckets of an abandoned weight load."""
_ALIGNMENT = 16  # bytes of alignment of each tensor, since a view as a wider dtype needs an aligned offset


@dataclass
class _Incoming:
    """Bucket that the engine's thread receives through a native link."""

    header: BucketHeader
    seconds: float
    """Time limit for the data to arrive."""
    received: Future[None]


@dataclass
class _WeightLoad:
    """A weight load in progress."""

    buckets: queue.Queue[PackedBucket | _Incoming | None]
    """Queue of the buckets to load; an entry of None marks the end of the load."""
    result: Future[LoadReceipt]
    seconds: float
    """Time limit for the next bucket to arrive or to be loaded."""
    is_scheduled: bool = False
    """Whether the command to load the buckets has been queued for the engine's thread."""


class Replica:
    """Rollout engine with the thread that runs it."""

    def __init__(self, open_engine: Callable[[], Engine]) -> None:
        self._commands: queue.Queue[Callable[[Engine], None]] = queue.Queue()
        self._has_ended = threading.Condition()
        self._groups: list[Group] = []
        self._session = ""
        self._num_passes = 0
        self._in_flight = 0
        self._load: _WeightLoad | None = None
        self._version: int | None = None
        self._description: Future[Description] = Future()
        threading.Thread(target=self._run, args=(open_engine,), daemon=True).start()

    def begin(self, session: str) -> Description:
        """Wait until the engine is open, and start a session; requests of earlier sessions are discarded.

        Raises:
            CosmosError: the engine cannot be opened.
        """
        description = self._description.result()

        def reset_session(engine: Engine) -> None:
            if hasattr(engine, "abort"):
                engine.abort()
                self._in_flight = 0
            while self._in_flight:
                self._generate(engine)
            with self._has_ended:
                self._session, self._groups = session, []

        if self._load is not None and not self._load.result.done():  # the trainer died during the weight load
            if self._load.is_scheduled:
                self._load.buckets.put(_LOAD_ABANDONED, timeout=self._load.seconds)
            self._load = None
        self._run_on_engine_thread(reset_session)
        return description

    def submit(self, session: str, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit prompts to the engine, and raise its error for invalid prompts; see `Engine.submit`.

        Raises:
            ConnectionError: the session is over, or it began in an earlier process that has died.
        """

        def submit(engine: Engine) -> None:
            engine.submit(prompts, sampling, step)
            self._in_flight += len(prompts)

        self._check_session(session)
        self._run_on_engine_thread(submit)

    def completed(self, session: str, seconds: float) -> tuple[list[Group], int]:
        """Wait at most `seconds` for a group; return all finished groups, and the engine's number of forward passes.

        The number of passes distinguishes a working engine from one that hangs.

        Raises:
            ConnectionError: the session is over, or it began in an earlier process that has died.
        """
        with self._has_ended:
            self._has_ended.wait_for(lambda: self._groups or session != self._session, seconds)
            self._check_session(session)
            groups, self._groups = self._groups, []
        return groups, self._num_passes

    def _check_session(self, session: str) -> None:
        if session != self._session:
            raise ConnectionError("the process in which the session began has died")

    def begin_load(self, version: int, *, background: bool, timeout_seconds: float) -> None:
        """Prepare to receive the buckets of a version.

        With `background`, the engine generates until the last bucket has arrived, and then loads all buckets.
        `timeout_seconds` is the number of seconds after which the trainer kills an engine that does not reply.
        """
        assert self._load is None or self._load.result.done(), "one load at a time"
        seconds = max(_LOAD_SECONDS, _TIMEOUT_FACTOR * timeout_seconds)
        max_buckets = 0 if background else 1
        self._load = load = _WeightLoad(queue.Queue(max_buckets), Future(), seconds, is_scheduled=not background)
        if not background:
            self._commands.put(lambda engine: self._load_buckets(engine, load, version))

    def bucket(self, packed: PackedBucket) -> None:
        """Receive the next bucket of the weight load in progress."""
        load = self._current_load()
        load.buckets.put(packed, timeout=load.seconds)

    def join_link(self, backend: str, init_info: dict[str, Any], seconds: float) -> None:
        """Connect the engine with the trainer between two passes, for native transfer of weights; see `VllmLink.join`.

        Raises:
            TransferFailed: the engine has no link, or there is no connection after `seconds`.
        """
        self._run_on_engine_thread(lambda engine: _link_of(engine).join(backend, init_info, seconds))

    def receive(self, header: BucketHeader, seconds: float) -> None:
        """Receive the next bucket of the weight load in progress through the native link; return before it is loaded.

        Raises:
            TransferFailed: the bucket did not arrive, and can be sent again by `bucket`.
        """
        load = self._current_load()
        incoming = _Incoming(header, seconds, Future())
        load.buckets.put(incoming, timeout=load.seconds)
        either: list[Future[Any]] = [incoming.received, load.result]
        wait(either, return_when=FIRST_COMPLETED)
        if not incoming.received.done():
            raise TransferFailed("the engine's weight load has ended")
        incoming.received.result()

    def end_load(self, version: int, *, background: bool, waits: bool) -> LoadReceipt:
        """End the load after the last bucket, and wait until all weights are loaded.

        With `background`, loading begins only now. With `waits`, loading first waits until no request is in flight.

        Raises:
            StageFailed: a tensor is missing, or the model has no such tensor.
        """
        load = self._current_load()
        load.buckets.put(None, timeout=load.seconds)
        if background:
            load.is_scheduled = True
            self._commands.put(lambda engine: self._load_buckets(engine, load, version, is_queue_drained=waits))
        return load.result.result()

    def _current_load(self) -> _WeightLoad:
        """Return the weight load in progress; raise a `ConnectionError` if it began in a process that has died."""
        if self._load is None:
            raise ConnectionError("the process in which the load began has died")
        return self._load

    def logprobs(self, version: int, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probabilities of tokens under weights of `version`; see `Engine.logprobs`.

        Raises:
            ConnectionError: the engine does not have weights of that version, because it was restarted.
        """
        if version != self._version:
            raise ConnectionError(f"the engine has weights of version {self._version}")
        return self._run_on_engine_thread(lambda engine: engine.logprobs(token_ids))

    def sleep(self) -> None:
        """Release the engine's memory between two passes; see `Engine.sleep`."""
        self._run_on_engine_thread(lambda engine: engine.sleep())

    def wake(self) -> None:
        """Reallocate the engine's memory between two passes; see `Engine.wake`."""
        self._run_on_engine_thread(lambda engine: engine.wake())

    def _run_on_engine_thread(self, call: Callable[[Engine], Any]) -> Any:
        """Call a function with the engine between two of its passes, and return the result."""
        result: Future[Any] = Future()
        self._commands.put(lambda engine: set_future(result, lambda: call(engine)))
        return result.result()

    def _run(self, open_engine: Callable[[], Engine]) -> None:
        try:
            engine = open_engine()
        except Exception as error:  # noqa: BLE001 - raised again in `begin`
            self._description.set_exception(error)
            return
        has_link = getattr(engine, "link", None) is not None
        self._description.set_result(Description(engine.name, engine.weight_format, os.getpid(), has_link))
        while True:
            while self._in_flight == 0 or not self._commands.empty():
                self._commands.get()(engine)
            self._generate(engine)

    def _generate(self, engine: Engine) -> None:
        """Make a forward pass with `step`, or wait for a group if the engine has no `step`; if that fails, the process
        exits and its requests are lost."""
        try:
            groups = getattr(engine, "step", engine.completed)()
        except Exception:
            logger.exception("the engine failed")
            os._exit(1)
        self._num_passes += 1
        self._in_flight -= len(groups)
        if groups:
            with self._has_ended:
                self._groups += groups
                self._has_ended.notify_all()

    def _load_buckets(self, engine: Engine, load: _WeightLoad, version: int, *, is_queue_drained: bool = False) -> None:
        """Load the buckets of `load`; with `is_queue_drained`, first generate until no request is in flight."""
        # each forward pass is progress, so the trainer does not kill the engine
        while is_queue_drained and self._in_flight:
            self._generate(engine)

        def run() -> Any:
            loaded = engine.load_weights(version, _buckets(load, engine))
            self._version = version
            return loaded

        set_future(load.result, run)


def pack(bucket: Bucket) -> PackedBucket:
    """Return a bucket as one array in host memory; tied weights are stored once."""
    index, size = [], 0
    starts: dict[Hashable, int] = {}
    for name, tensor in bucket:
        start = starts.setdefault(storage_of(tensor), size)
        end = start + tensor.numel() * tensor.element_size()
        index.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start, end))
        size = max(size, -(-end // _ALIGNMENT) * _ALIGNMENT)
    bucket_array = PackedBucket(np.empty(size, np.uint8), index)
    for (_, tensor), (_, view) in zip(bucket, unpack(bucket_array), strict=True):
        if starts.pop(storage_of(tensor), None) is not None:
            view.copy_(tensor.detach())
    return bucket_array


def unpack(bucket: PackedBucket) -> Bucket:
    """Return the tensors of a bucket as views of its memory, which must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.data)
    return [
        (name, flat[start:end].view(getattr(torch, dtype)).reshape(shape))
        for name, dtype, shape, start, end in bucket.layout
    ]


def _link_of(engine: Engine) -> Any:
    link = getattr(engine, "link", None)
    if link is None:
        raise TransferFailed(f"engine {engine.name!r} has no native link")
    return link


def _buckets(load: _WeightLoad, engine: Engine) -> Iterator[Bucket]:
    while (bucket := load.buckets.get(timeout=load.seconds)) is not None:
        if isinstance(bucket, _Incoming):
            try:
                _link_of(engine).receive(bucket.header, bucket.seconds)
            except Exception as error:  # noqa: BLE001 - the trainer sends the bucket again
                bucket.received.set_exception(TransferFailed(first_line(error)))
                continue
            bucket.received.set_result(None)  # the trainer gathers the next bucket while this one is loaded
            yield bucket.header.placeholder()
            continue
        if bucket.data is _LOAD_ABANDONED.data:
            raise StageFailed("weight sync: the trainer has gone")
        yield unpack(bucket)
