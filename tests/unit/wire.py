"""What stands in the place of NCCL and CUDA IPC where there is no GPU: bytes are copied through queues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch

from cosmos_core.rollout.base import Bucket, LoadReceipt
from cosmos_core.rollout.link import BucketHeader, TransferFailed, call_with_timeout
from cosmos_core.rollout.transport import IpcTransport, NcclTransport
from tests.unit.replicas import Drawing

STREAM = SimpleNamespace(synchronize=lambda: None)


class Wire:
    """One communicator after another; a broadcast hangs until each receiver has taken it, or is aborted."""

    def __init__(self) -> None:
        self.receivers: list[End] = []
        self.worlds: list[tuple[int, list[int]]] = []
        """Size and ranks of each communicator that was made."""
        self.is_cut = False
        """Whether the next broadcast stops in the middle and hangs."""
        self.num_bytes = 0

    def renew(self, size: int) -> None:
        self.receivers = []
        self.worlds.append((size, [0]))

    def join(self, rank: int) -> End:
        end = End(self)
        self.receivers.append(end)
        self.worlds[-1][1].append(rank)
        return end


class End:
    """A `PyNcclCommunicator`, of the trainer or of a rank of an engine."""

    disabled = False

    def __init__(self, wire: Wire, *, is_sender: bool = False) -> None:
        self._wire, self._is_sender = wire, is_sender
        self._chunks: queue.Queue[torch.Tensor] = queue.Queue()
        self._rest = torch.empty(0, dtype=torch.uint8)
        self.is_aborted = threading.Event()

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        assert src == 0 and (stream is None or stream is STREAM) and tensor.is_contiguous()
        data = tensor.reshape(-1).view(torch.uint8)
        if self._is_sender:
            self._send(data)
        else:
            self._receive(data)

    def destroy(self) -> None:
        self.is_aborted.set()

    def _send(self, data: torch.Tensor) -> None:
        wire = self._wire
        is_cut, wire.is_cut = wire.is_cut, False
        wire.num_bytes += len(data)
        for receiver in wire.receivers:
            receiver._chunks.put(data[: len(data) // 2].clone() if is_cut else data.clone())
        while not self.is_aborted.is_set():
            if not is_cut and not any(receiver._chunks.unfinished_tasks for receiver in wire.receivers):
                return
            time.sleep(0.001)

    def _receive(self, data: torch.Tensor) -> None:
        start = 0
        while start < len(data) and not self.is_aborted.is_set():
            if not len(self._rest):
                try:
                    self._rest = self._chunks.get(timeout=0.01)
                except queue.Empty:
                    continue
            count = min(len(self._rest), len(data) - start)
            data[start : start + count] = self._rest[:count]
            self._rest, start = self._rest[count:], start + count
            if not len(self._rest):
                self._chunks.task_done()


class QueueTransport(NcclTransport):
    """NCCL's transport, with a wire in the place of its communicator."""

    device = "cpu"

    def __init__(self, wire: Wire, *, packed: bool = True) -> None:
        super().__init__()
        self.wire, self.packed = wire, packed

    def stream(self) -> Any:
        return STREAM

    def prepare_connection(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
        self.abort()
        size = 1 + num_engines * ranks_per_engine
        self.wire.renew(size)
        common = {"master_address": "nowhere", "master_port": 1, "world_size": size, "packed": self.packed}
        return [{**common, "rank_offset": 1 + i * ranks_per_engine} for i in range(num_engines)]

    def connect(self) -> None:
        self._communicator = End(self.wire, is_sender=True)


class MemoryTransport(IpcTransport):
    """CUDA IPC's transport between threads of one process, which see the same memory anyway."""

    device = "cpu"
    uuid = "GPU-1"

    def __init__(self) -> None:
        super().__init__()
        self.exported: list[torch.Tensor] = []

    def stream(self) -> Any:
        return STREAM

    def export_buffer(self) -> dict[str, tuple[Any, ...]]:
        assert self.send_buffer is not None
        self.exported.append(self.send_buffer)
        return {self.uuid: (len(self.exported) - 1, 0, 0, 0, 0, 0, "device of the sender")}


class QueueLink:
    """The link of an engine with one rank, without vLLM."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._end: End | None = None
        self._bucket: Bucket = []
        self.received: list[list[str]] = []
        self.on_header: Callable[[], None] = lambda: None

    def connect(self, backend: str, init_info: dict[str, Any], seconds: float) -> None:
        assert backend == "nccl"
        self._end = self._wire.join(init_info["rank_offset"])

    def receive(self, header: BucketHeader, seconds: float) -> None:
        self.on_header()
        end = self._end
        if end is None or end.is_aborted.is_set():
            raise TransferFailed("not connected")
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in zip(header.names, header.dtype_names, header.shapes, strict=True)
        }

        def read() -> None:
            for tensor in tensors.values():
                end.broadcast(tensor, 0)

        call_with_timeout(seconds, read, abort=end.destroy)
        self._bucket = header.make_bucket(tensors)
        self.received.append([name for name, _ in self._bucket])

    def take_bucket(self) -> Bucket:
        return self._bucket


class Linked(Drawing):
    """A `Drawing` with a native link."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.link = QueueLink(wire)

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> LoadReceipt:
        whole = (self.link.take_bucket() if bucket[0][1].is_meta else bucket for bucket in buckets)
        return super().load_weights(version, whole)
