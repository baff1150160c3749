"""Transports that send a bucket of weights from a GPU of the trainer to vLLM: NCCL broadcast or CUDA IPC.

The engine receives with vLLM's transfer engine (`vllm_link`). This module is untested on GPUs.
"""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_core.errors import first_line
from cosmos_core.parallel.mesh import all_gather_object, broadcast_object, is_first
from cosmos_core.rollout.base import Bucket
from cosmos_core.rollout.link import BucketHeader, TransferFailed, fill_bucket, split_bucket
from cosmos_core.rollout.vllm import import_vllm, set_environment
from cosmos_core.rollout.vllm_process import restore_process_state

_MAX_BUFFER_BYTES = (1 << 63) - 1
"""Size in bytes of vLLM's receive buffers; its maximum makes vLLM receive each bucket by one broadcast."""


class Transport:
    """The trainer's end of a transfer engine of vLLM; `stage`, `agree` and `end_load` run on all ranks, other methods
    on the first rank."""

    backend: str
    """Name of the transfer engine in vLLM."""
    device = "cuda"
    """Device of the buffer in which a bucket is staged."""

    def __init__(self) -> None:
        self.staged: Tensor | None = None

    def prepare(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
        """Return, for each engine, the init info (a dict) with which vLLM initialises its weight transfer engine."""
        return [{"packed": True}] * num_engines

    def connect(self) -> None:
        """Connect with the engines, which connect at the same time."""

    def stage(self, bucket: Bucket) -> BucketHeader:
        """Copy a bucket into the send buffer, and return its header; raise `TransferFailed` if a rank lacks memory, or
        its CUDA driver fails."""
        raise NotImplementedError

    def transmit(self) -> None:
        """Send the staged bucket, and wait until it is sent."""

    def agree(self, reason: str) -> str:
        """Return the reason why the first rank's transfer failed, on each rank that needs it; empty: success."""
        return reason

    def abort(self) -> None:
        """Make `transmit` return if it hangs, and disconnect from the engines, from any thread."""

    def end_load(self) -> None:
        """Release the memory of the staged bucket."""
        self.staged = None

    def stream(self) -> Any:
        """Return the CUDA stream that copies into the buffer."""
        return torch.cuda.current_stream()

    def fill_buffer(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the buffer, replaced by a larger one if necessary, with the bytes of tensors in it."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.staged is None or self.staged.numel() < num_bytes:
            self.staged = None  # free the old memory before allocating
            self.staged = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        fill_bucket(self.staged, tensors)
        self.stream().synchronize()  # another thread or process reads the buffer
        return self.staged[:num_bytes]


class NcclTransport(Transport):
    """NCCL broadcast from the first rank to all ranks of all engines, which never overlaps the ranks' own collectives,
    because two communicators on one GPU may deadlock."""

    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self._communicator: Any = None
        self._staged_bytes: Tensor | None = None
        self._unique_id, self._num_ranks = b"", 0

    def prepare(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
        self.abort()
        set_environment()
        with restore_process_state():  # the trainer's process runs no engine
            import_vllm()
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._num_ranks = 1 + num_engines * ranks_per_engine
        common_init_info = {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(), "world_size": self._num_ranks,
            "packed": True, "packed_buffer_size_bytes": _MAX_BUFFER_BYTES,
        }  # fmt: skip
        # vLLM's own trainer sends one offset to all engines, which then must be one `LLM` with data parallelism.
        return [{**common_init_info, "rank_offset": 1 + i * ranks_per_engine} for i in range(num_engines)]

    def connect(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        device = torch.cuda.current_device()
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(self._unique_id, 0, self._num_ranks, device)
        if self._communicator.disabled:  # a disabled communicator transfers nothing, without an error
            raise TransferFailed("vLLM cannot use NCCL")

    def stage(self, bucket: Bucket) -> BucketHeader:
        header, tensors = split_bucket(bucket)
        if is_first():
            try:
                self._staged_bytes = self.fill_buffer(tensors)
            except RuntimeError as error:
                raise TransferFailed(first_line(error)) from error
        return header

    def transmit(self) -> None:
        stream = self.stream()
        self._communicator.broadcast(self._staged_bytes, src=0, stream=stream)
        stream.synchronize()

    def abort(self) -> None:
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


class IpcTransport(Transport):
    """CUDA IPC to engines on the ranks' GPUs: each rank stages the whole bucket for the engine's rank on its GPU."""

    backend = "ipc"

    def __init__(self) -> None:
        super().__init__()
        self._ipc_handle_by_gpu: dict[str, tuple[Any, ...]] = {}

    def stage(self, bucket: Bucket) -> BucketHeader:
        header, tensors = split_bucket(bucket)
        error_message = ""
        try:
            previous_buffer = self.staged
            self.fill_buffer(tensors)
            if self.staged is not previous_buffer:  # a buffer is exported once, because vLLM maps it once
                self._ipc_handle_by_gpu = self.export()
        except RuntimeError as error:
            error_message = first_line(error)
        # The collective is also a barrier: no engine reads before the rank on its GPU has staged the bucket.
        error_messages, handles = zip(*all_gather_object((error_message, self._ipc_handle_by_gpu)), strict=True)
        if any(error_messages):
            raise TransferFailed(next(filter(None, error_messages)))
        ipc_handles = {gpu_uuid: handle for handle_by_gpu in handles for gpu_uuid, handle in handle_by_gpu.items()}
        return header._replace(extra={"ipc_handles": ipc_handles, "tensor_sizes": [t.nbytes for t in tensors]})

    def export(self) -> dict[str, tuple[Any, ...]]:
        """Return the handle by which other processes map the buffer, by the UUID of its GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        assert self.staged is not None
        return {str(torch.cuda.get_device_properties(self.staged.device).uuid): reduce_tensor(self.staged)[1]}

    def agree(self, reason: str) -> str:
        return broadcast_object(reason)  # also a barrier: no rank overwrites a buffer that an engine still reads

    def end_load(self) -> None:
        super().end_load()
        self._ipc_handle_by_gpu = {}
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
