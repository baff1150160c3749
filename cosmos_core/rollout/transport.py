"""Transports that send a bucket of weights from a GPU of the trainer to vLLM: NCCL broadcast or CUDA IPC.

The engine receives with vLLM's transfer engine (`vllm_link`). This module is untested on GPUs.
"""

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cosmos_core.errors import first_line
from cosmos_core.parallel.mesh import all_gather_object, broadcast_object, is_first_rank
from cosmos_core.rollout.base import Bucket
from cosmos_core.rollout.link import BucketHeader, TransferFailed, copy_tensors_to_buffer, split_bucket
from cosmos_core.rollout.vllm import import_vllm, set_environment
from cosmos_core.rollout.vllm_process import restore_process_state

_MAX_BUFFER_BYTES = (1 << 63) - 1
"""Size in bytes of vLLM's receive buffers: the largest 64-bit integer, so that each bucket is one broadcast."""


class WeightTransport:
    """Base class of transports: the trainer's end of a transfer of weights to the transfer engines of vLLM. All ranks
    of the trainer call `stage_bucket`, `broadcast_failure`, `abort` and `end_weight_load`; only the first rank calls
    `prepare_connection`, `connect` and `transmit`."""

    backend: str
    """Name of the transport in vLLM's configuration of its weight transfer engine, such as `nccl`."""
    device = "cuda"

    def __init__(self) -> None:
        self.send_buffer: Tensor | None = None

    def prepare_connection(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
        """Return, for each rollout engine, the init info with which vLLM initialises its weight transfer engine."""
        return [{"packed": True}] * num_engines

    def connect(self) -> None:
        """Connect the trainer with the rollout engines, which connect at the same time."""

    def stage_bucket(self, bucket: Bucket) -> BucketHeader:
        """Copy a bucket of weights into the send buffer of each rank that sends it, and return the header of the
        bucket. Raise `TransferFailed` if a rank fails."""
        raise NotImplementedError

    def transmit(self) -> None:
        """Send the bucket in the send buffer to the rollout engines, and wait until it is sent."""

    def broadcast_failure(self, failure_reason: str) -> str:
        """Return, on each rank that sends buckets, the reason why the first rank's transfer of a bucket failed; empty
        if it succeeded."""
        return failure_reason

    def abort(self) -> None:
        """Disconnect from the rollout engines, so that `transmit` returns even if it hangs; any thread can call this
        method."""

    def end_weight_load(self) -> None:
        """Free the send buffer of each rank at the end of a weight load."""
        self.send_buffer = None

    def stream(self) -> Any:
        """Return the CUDA stream that copies a bucket into the send buffer."""
        return torch.cuda.current_stream()

    def fill_buffer(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copy the bytes of tensors into this rank's send buffer, enlarged if necessary, and return the used part of
        it."""
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self.send_buffer is None or self.send_buffer.numel() < num_bytes:
            self.send_buffer = None  # free the old buffer before a larger one is allocated
            self.send_buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        copy_tensors_to_buffer(self.send_buffer, tensors)
        self.stream().synchronize()  # wait for the copy, because another thread or process reads the buffer next
        return self.send_buffer[:num_bytes]


class NcclTransport(WeightTransport):
    """NCCL broadcast of weights from the trainer's first rank to all ranks of all rollout engines. It never overlaps
    collectives of the trainer's ranks, because two communicators on one GPU can deadlock."""

    backend = "nccl"

    def __init__(self) -> None:
        super().__init__()
        self._communicator: Any = None
        self._staged_bucket: Tensor | None = None
        self._nccl_unique_id, self._num_ranks = b"", 0

    def prepare_connection(self, num_engines: int, ranks_per_engine: int) -> list[dict[str, Any]]:
        self.abort()
        set_environment()
        with restore_process_state():  # importing vLLM must not change the trainer's process
            import_vllm()
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._nccl_unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        self._num_ranks = 1 + num_engines * ranks_per_engine
        common_init_info = {
            "nccl_unique_id_b64": base64.b64encode(self._nccl_unique_id).decode(), "world_size": self._num_ranks,
            "packed": True, "packed_buffer_size_bytes": _MAX_BUFFER_BYTES,
        }  # fmt: skip
        # Each engine has its own rank offset; with vLLM's trainer code, all engines would have the same offset.
        return [{**common_init_info, "rank_offset": 1 + i * ranks_per_engine} for i in range(num_engines)]

    def connect(self) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        device = torch.cuda.current_device()
        self._communicator = PyNcclCommunicator.from_unique_id_bytes(self._nccl_unique_id, 0, self._num_ranks, device)
        if self._communicator.disabled:
            # Raise an error, because a disabled communicator transfers nothing without reporting it.
            raise TransferFailed("vLLM cannot use NCCL")

    def stage_bucket(self, bucket: Bucket) -> BucketHeader:
        bucket_header, tensors = split_bucket(bucket)
        if is_first_rank():
            try:
                self._staged_bucket = self.fill_buffer(tensors)
            except RuntimeError as error:
                raise TransferFailed(first_line(error)) from error
        return bucket_header

    def transmit(self) -> None:
        stream = self.stream()
        self._communicator.broadcast(self._staged_bucket, src=0, stream=stream)
        stream.synchronize()

    def abort(self) -> None:
        if self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None


class IpcTransport(WeightTransport):
    """Transfer of weights by CUDA IPC from each rank of the trainer, which has the whole bucket in its send buffer, to
    the rank of a rollout engine on the same GPU."""

    backend = "ipc"

    def __init__(self) -> None:
        super().__init__()
        self._ipc_handle_by_gpu: dict[str, tuple[Any, ...]] = {}

    def stage_bucket(self, bucket: Bucket) -> BucketHeader:
        bucket_header, tensors = split_bucket(bucket)
        error_message = ""
        try:
            previous_buffer = self.send_buffer
            self.fill_buffer(tensors)
            if self.send_buffer is not previous_buffer:  # a buffer is exported once, because vLLM maps it once
                self._ipc_handle_by_gpu = self.export_buffer()
        except RuntimeError as error:
            error_message = first_line(error)
        # The collective is also a barrier: no engine reads before the rank on its GPU has staged the bucket.
        error_messages, gpu_handles = zip(*all_gather_object((error_message, self._ipc_handle_by_gpu)), strict=True)
        if any(error_messages):
            raise TransferFailed(next(filter(None, error_messages)))
        ipc_handles = {gpu_uuid: handle for handle_by_gpu in gpu_handles for gpu_uuid, handle in handle_by_gpu.items()}
        tensor_sizes = [tensor.nbytes for tensor in tensors]
        return bucket_header._replace(transport_fields={"ipc_handles": ipc_handles, "tensor_sizes": tensor_sizes})

    def export_buffer(self) -> dict[str, tuple[Any, ...]]:
        """Return the CUDA IPC handle of this rank's send buffer, by the UUID of its GPU."""
        from torch.multiprocessing.reductions import reduce_tensor

        assert self.send_buffer is not None
        return {str(torch.cuda.get_device_properties(self.send_buffer.device).uuid): reduce_tensor(self.send_buffer)[1]}

    def broadcast_failure(self, failure_reason: str) -> str:
        # The broadcast is also a barrier: no rank overwrites a buffer that an engine still reads.
        return broadcast_object(failure_reason)

    def end_weight_load(self) -> None:
        super().end_weight_load()
        self._ipc_handle_by_gpu = {}
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
