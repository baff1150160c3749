"""The trainer's end of a weight transfer to engines in separate processes: by host memory, NCCL or CUDA IPC.

`HostWeightLink` sends a bucket as one array in host memory, `DeltaWeightLink` only its values that changed, and
`NativeWeightLink` sends it by a `transport` of vLLM. An engine loads a bucket only after the whole bucket has arrived.
If a native transfer fails, the host link sends the bucket again and then all later buckets of that version.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from cosmos_core.error_handling import log_errors
from cosmos_core.errors import first_line
from cosmos_core.parallel.mesh import broadcast_object, is_first_rank
from cosmos_core.rollout.base import Bucket
from cosmos_core.rollout.delta import find_changed_words
from cosmos_core.rollout.engine_pool import EnginePool, PooledEngine
from cosmos_core.rollout.link import BucketHeader, TransferFailed, call_with_timeout
from cosmos_core.rollout.replica import EngineDescription, PackedBucket, pack_bucket
from cosmos_core.rollout.transport import WeightTransport

logger = logging.getLogger(__name__)

_BUCKET_TIMEOUT_SECONDS = 60.0
_CONNECT_TIMEOUT_SECONDS = 120.0
_MAX_TRANSFER_FAILURES = 2
"""Number of failed transfers in succession after which native transfer (NCCL or CUDA IPC) is not tried again with the
same engines."""


class EngineProcess(NamedTuple):
    """Engine of the pool, and the process in which it ran when a weight load began. A new process of the engine can
    replace that process later."""

    engine: PooledEngine
    description: EngineDescription | None

    @property
    def is_alive(self) -> bool:
        """Return whether the engine still runs in the process with which the weight load began."""
        return self.engine.description is self.description


class WeightLoad:
    """Weight load into engine processes. Only the first rank has the list of processes, from which dead ones are
    removed."""

    def __init__(self, engine_pool: EnginePool, processes: Sequence[EngineProcess]) -> None:
        self._engine_pool, self.processes = engine_pool, list(processes)
        self._engine_process_by_reply: dict[Future[Any], EngineProcess] = {}

    def call_engines(
        self, method: str, arguments: Sequence[tuple[Any, ...]], shared_value: Any = None, indices: Sequence[int] = ()
    ) -> list[Future[Any]]:
        """Call a method of each engine of the load, or only of those at `indices`, without waiting; `arguments` has
        one tuple per call, and `shared_value`, unless it is None, is the last argument of each. Return the futures of
        the replies."""
        processes = [self.processes[i] for i in indices] if indices else self.processes
        engine_calls = zip(processes, arguments, strict=True)
        replies = [p.engine.handle.call(method, *call_args, shared_value=shared_value) for p, call_args in engine_calls]
        self._engine_process_by_reply.update(zip(replies, processes, strict=True))
        return replies

    def await_replies(self, replies: Sequence[Future[Any]]) -> list[int]:
        """Wait for the replies of engines, and remove engines whose process died from the load. Return the positions,
        among the remaining engines, of those whose call raised `TransferFailed`."""
        processes_and_replies = [(self._engine_process_by_reply.pop(reply), reply) for reply in replies]
        self._engine_pool.await_replies([(process.engine, reply) for process, reply in processes_and_replies])
        dead_process_ids, failed_process_ids = set(), set()
        for process, reply in processes_and_replies:
            try:
                reply.result()
            except ConnectionError as error:
                self._engine_pool.mark_engine_dead(*process, error)
                dead_process_ids.add(id(process))
            except TransferFailed:
                failed_process_ids.add(id(process))
        self.processes = [process for process in self.processes if id(process) not in dead_process_ids]
        return [position for position, process in enumerate(self.processes) if id(process) in failed_process_ids]


class HostWeightLink:
    """Transfer of the buckets of one weight load through host memory: the first rank packs a bucket, which is equal on
    all ranks, into an array that all engines read. All ranks call the methods together."""

    def __init__(self, weight_load: WeightLoad) -> None:
        self._weight_load = weight_load

    def send(self, bucket: Bucket, engine_indices: Sequence[int] = ()) -> None:
        """Send a bucket of weights to all engines of the load, or only to those at `engine_indices`."""
        if processes := self._weight_load.processes:
            packed_bucket = processes[0].engine.handle.put(pack_bucket(bucket))
            call_arguments: list[tuple[()]] = [()] * len(engine_indices or processes)
            replies = self._weight_load.call_engines("receive_bucket", call_arguments, packed_bucket, engine_indices)
            self._weight_load.await_replies(replies)

    def end_weight_load(self) -> None:
        """Do nothing, because the link has no memory to release."""

    def confirm_weight_load(self) -> None:
        """Do nothing; only `DeltaWeightLink` records that the engines have loaded all buckets."""


class DeltaWeightTransfer:
    """Weight transfer that sends only the values that changed since the last load. The first rank keeps a copy of the
    weights that it sent last; an engine process without these weights gets all values."""

    def __init__(self) -> None:
        self.buckets: dict[int, PackedBucket] = {}
        """Packed weights of the latest transfer to the engines, by the index of the bucket in the transfer."""
        self.up_to_date_processes: list[EngineDescription | None] = []
        """Engine processes that have loaded all of `buckets`."""
        self.num_sent_bytes = 0
        """Number of bytes that the last weight load sent to one engine: one that had the previous weights, if there was
        any."""

    def open_link(self, weight_load: WeightLoad) -> "DeltaWeightLink":
        """Return the sender of the buckets of one weight load."""
        return DeltaWeightLink(self, weight_load)


class DeltaWeightLink(HostWeightLink):
    """Transfer of the policy's weights to the rollout engines through host memory, for one update of the engines: sends
    only the values that changed since the previous update."""

    def __init__(self, delta_transfer: DeltaWeightTransfer, weight_load: WeightLoad) -> None:
        super().__init__(weight_load)
        self._weight_transfer, self._num_buckets, self._has_changed_values = delta_transfer, 0, False
        # Empty the list, which `confirm_weight_load` fills again: if the load fails, the next load sends all values.
        self._previously_up_to_date, delta_transfer.up_to_date_processes = delta_transfer.up_to_date_processes, []
        delta_transfer.num_sent_bytes = 0

    def send(self, bucket: Bucket, engine_indices: Sequence[int] = ()) -> None:
        assert not engine_indices
        if not is_first_rank():
            return
        bucket_index, sent_buckets = self._num_buckets, self._weight_transfer.buckets
        self._num_buckets += 1
        previous_bucket, packed_bucket = sent_buckets.get(bucket_index), pack_bucket(bucket)
        sent_buckets[bucket_index] = packed_bucket
        changed_words = None
        if previous_bucket is not None and previous_bucket.header == packed_bucket.header:
            changed_words = find_changed_words(previous_bucket.data, packed_bucket.data)
        self._has_changed_values |= changed_words is None or changed_words.nbytes > 0
        up_to_date_description_ids = set(map(id, self._previously_up_to_date)) if changed_words is not None else set()
        has_previous_weights = [
            id(process.description) in up_to_date_description_ids for process in self._weight_load.processes
        ]
        replies: list[Future[Any]] = []
        for shared_bucket, gets_changes in ((changed_words, True), (packed_bucket, False)):
            if receivers := [i for i, has_weights in enumerate(has_previous_weights) if has_weights is gets_changes]:
                shared_value = self._weight_load.processes[receivers[0]].engine.handle.put(shared_bucket)
                arguments = [(bucket_index,)] * len(receivers)
                replies += self._weight_load.call_engines("receive_kept_bucket", arguments, shared_value, receivers)
        self._weight_load.await_replies(replies)
        num_bytes = packed_bucket.data.nbytes
        if changed_words is not None and any(has_previous_weights):
            num_bytes = changed_words.nbytes
        self._weight_transfer.num_sent_bytes += num_bytes

    def confirm_weight_load(self) -> None:
        if not self._num_buckets:
            return
        loaded_processes = [process.description for process in self._weight_load.processes]
        # A load may include only new engines. If no value has changed, the other engines still have the same weights.
        unchanged_processes = [] if self._has_changed_values else self._previously_up_to_date
        self._weight_transfer.up_to_date_processes = [*unchanged_processes, *loaded_processes]


class NativeWeightTransfer:
    """Connection for weight transfer by NCCL or CUDA IPC, kept between weight loads. If the engines cannot be
    connected, a load sends the weights through host memory."""

    def __init__(self, transport: WeightTransport, ranks_per_engine: int) -> None:
        self.transport, self._ranks_per_engine = transport, ranks_per_engine
        self._last_descriptions: list[EngineDescription | None] = []
        """Engine processes of the last attempt to connect them with the trainer, in order."""
        self._is_connected = False
        self.num_failed_transfers = 0
        """Number of failed transfers by NCCL or CUDA IPC in succession: since the last successful load, or since an
        engine process was replaced."""

    def open_link(self, weight_load: WeightLoad) -> HostWeightLink:
        """Return a sender of weights by NCCL or CUDA IPC. If an engine of the load cannot be connected to the ranks,
        return a sender through host memory."""
        uses_native_transfer = broadcast_object(self._ensure_connection(weight_load) if is_first_rank() else False)
        return NativeWeightLink(self, weight_load) if uses_native_transfer else HostWeightLink(weight_load)

    def disconnect_after_failure(self, failure_reason: str) -> None:
        """Disconnect from the engines after a transfer failed, and log the reason; the next load connects again."""
        self.transport.abort()
        self._is_connected = False
        self.num_failed_transfers += 1
        if is_first_rank():
            is_last_attempt = self.num_failed_transfers >= _MAX_TRANSFER_FAILURES
            retry_text = ", as all later ones until an engine is replaced" if is_last_attempt else ""
            log_message = "native weight transfer: %s; these weights travel through host memory%s"
            logger.warning(log_message, failure_reason, retry_text)

    def is_connected(self, processes: Sequence[EngineProcess]) -> bool:
        """Return whether exactly these engine processes are connected with the trainer, in this order."""
        # Compare process descriptions by identity, because another process may have equal values, such as a reused pid.
        return self._is_connected and list(map(id, self._last_descriptions)) == [id(p.description) for p in processes]

    def _ensure_connection(self, weight_load: WeightLoad) -> bool:
        if self.is_connected(weight_load.processes):
            return True
        engine_descriptions = [process.description for process in weight_load.processes]
        if list(map(id, engine_descriptions)) != list(map(id, self._last_descriptions)):
            self._last_descriptions, self.num_failed_transfers, self._is_connected = engine_descriptions, 0, False
        if engine_descriptions and self.num_failed_transfers < _MAX_TRANSFER_FAILURES:
            # After an error, weights are sent through host memory, which needs neither NCCL nor CUDA IPC.
            with log_errors(lambda error: self.disconnect_after_failure(first_line(error))):
                self._connect_engines(weight_load)
                self._is_connected = True
        return self._is_connected

    def _connect_engines(self, weight_load: WeightLoad) -> None:
        num_processes = len(weight_load.processes)
        if not all(description and description.supports_native_transfer for description in self._last_descriptions):
            self.num_failed_transfers = _MAX_TRANSFER_FAILURES  # disable native transfer for these engines
            raise TransferFailed("an engine has no native link")
        init_infos = self.transport.prepare_connection(num_processes, self._ranks_per_engine)
        call_arguments = [(self.transport.backend, init_info, _CONNECT_TIMEOUT_SECONDS) for init_info in init_infos]
        replies = weight_load.call_engines("connect_link", call_arguments)
        try:
            call_with_timeout(
                _CONNECT_TIMEOUT_SECONDS, self.transport.connect, has_peer_failed=_make_failure_check(replies)
            )
        finally:
            failed_engine_indices = weight_load.await_replies(replies)
        if failed_engine_indices or len(weight_load.processes) < num_processes:
            raise TransferFailed("an engine did not connect")


class NativeWeightLink(HostWeightLink):
    """Sender of the buckets of one weight load by NCCL or CUDA IPC; after a failure, all further buckets go through
    host memory."""

    def __init__(self, native_transfer: NativeWeightTransfer, weight_load: WeightLoad) -> None:
        super().__init__(weight_load)
        self._weight_transfer, self._has_transfer_failed = native_transfer, False

    def send(self, bucket: Bucket, engine_indices: Sequence[int] = ()) -> None:
        assert not engine_indices
        if self._has_transfer_failed:
            super().send(bucket)
            return
        indices_without_bucket: Sequence[int] = range(len(self._weight_load.processes))
        try:
            bucket_header = self._weight_transfer.transport.stage_bucket(bucket)
        except TransferFailed as error:
            failure_reason = str(error)
        else:
            failure_reason, indices_without_bucket = (
                self._transfer_bucket(bucket_header) if is_first_rank() else ("", ())
            )
            failure_reason = self._weight_transfer.transport.broadcast_failure(failure_reason)
        if failure_reason:
            self._has_transfer_failed = True
            self._weight_transfer.disconnect_after_failure(failure_reason)
            if indices_without_bucket:
                super().send(bucket, indices_without_bucket)

    def end_weight_load(self) -> None:
        """Free the send buffers of the ranks after the last bucket of the load."""
        self._weight_transfer.transport.end_weight_load()
        if not self._has_transfer_failed:
            self._weight_transfer.num_failed_transfers = 0

    def _transfer_bucket(self, bucket_header: BucketHeader) -> tuple[str, Sequence[int]]:
        """Send the bucket in the send buffer to all engines; return the reason of a failure or "", and the positions of
        engines that lack the bucket."""
        transport, num_processes, failure_reason = self._weight_transfer.transport, len(self._weight_load.processes), ""
        if not self._weight_transfer.is_connected(self._weight_load.processes):
            return "an engine died", range(num_processes)
        call_arguments = [(bucket_header, _BUCKET_TIMEOUT_SECONDS)] * num_processes
        replies = self._weight_load.call_engines("receive_native_bucket", call_arguments)
        try:
            has_peer_failed = _make_failure_check(replies)
            call_with_timeout(
                _BUCKET_TIMEOUT_SECONDS, transport.transmit, abort=transport.abort, has_peer_failed=has_peer_failed
            )
        except Exception as error:  # noqa: BLE001 - the engines get the bucket by the host link
            failure_reason = first_line(error)
            transport.abort()
        indices_without_bucket = self._weight_load.await_replies(replies)
        if indices_without_bucket or len(self._weight_load.processes) < num_processes:
            failure_reason = failure_reason or "an engine did not receive a bucket"
        return failure_reason, indices_without_bucket


def _make_failure_check(replies: Sequence[Future[Any]]) -> Callable[[], bool]:
    return lambda: any(reply.done() and reply.exception() is not None for reply in replies)
