"""The engine's end of a native weight transfer: vLLM's own transfer engines (NCCL, CUDA IPC), one in each rank.

A rank collects a bucket before any of its tensors is loaded, so that an incomplete bucket can be sent again
through host memory. Untested on GPUs.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cosmos_core.errors import first_line
from cosmos_core.rollout.base import Bucket
from cosmos_core.rollout.link import BucketHeader, TransferFailed, call_with_timeout


class VllmWeightLink:
    """Connection of all ranks of a vLLM engine with the trainer, through which the ranks receive weights by NCCL or
    CUDA IPC."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def connect(self, backend: str, init_info: dict[str, Any], timeout_seconds: float) -> None:
        """Connect each rank with the trainer through vLLM's transfer engine `backend`, and close an earlier link."""
        self._call_all_ranks(_connect_rank, backend, init_info, timeout_seconds)

    def receive(self, bucket_header: BucketHeader, timeout_seconds: float) -> None:
        """Receive a bucket of weights in each rank; raise `TransferFailed` if it has not arrived after
        `timeout_seconds`."""
        self._call_all_ranks(_receive_on_rank, bucket_header, timeout_seconds)

    def _call_all_ranks(self, rank_function: Callable[..., None], *arguments: Any) -> None:
        # Ranks return error messages, because an error would leave the replies of other ranks in vLLM's queues.
        error_messages = self._llm.collective_rpc(_call_and_get_error, args=(rank_function, *arguments))
        if any(error_messages):
            raise TransferFailed(next(filter(None, error_messages)))


class _TensorCollector(list[tuple[str, Tensor]]):
    """List that collects received tensors, and that vLLM's transfer engine gets in place of the model."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.extend(tensors)


class RankWeightLink:
    """Connection of one rank of a vLLM engine with the trainer; it keeps the last received bucket of weights."""

    def __init__(self, vllm_worker: Any, backend: str, init_info: dict[str, Any]) -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory

        self._received_bucket: Bucket | None = None
        model, transfer_config = vllm_worker.model_runner.get_model(), WeightTransferConfig(backend=backend)
        create_engine = WeightTransferEngineFactory.create_engine
        # The type is Any, because `receive` passes a collector of tensors where vLLM's annotation says module.
        self._transfer_engine: Any = create_engine(transfer_config, vllm_worker.vllm_config, vllm_worker.device, model)
        self._transfer_engine.init_transfer_engine(self._transfer_engine.parse_init_info(init_info))
        # Raise an error, because a disabled communicator transfers nothing without reporting it.
        if getattr(self._nccl_group, "disabled", False):
            raise TransferFailed("vLLM cannot use NCCL")

    def receive(self, header: BucketHeader, timeout_seconds: float) -> None:
        """Receive a bucket of weights in this rank, or raise `TransferFailed` if it has not arrived after
        `timeout_seconds`."""
        if torch.cuda.is_available():  # wait for loads that read the buffer: vLLM receives on another stream
            torch.cuda.current_stream().synchronize()
        self._received_bucket, tensor_collector = None, _TensorCollector()
        self._transfer_engine.set_weight_update_target(tensor_collector, self._transfer_engine.model_config)
        engine = self._transfer_engine
        call_with_timeout(
            timeout_seconds, lambda: engine.update_weights(header.make_update_info()), abort=self._disconnect
        )
        self._received_bucket = header.make_bucket(dict(tensor_collector))

    def take_bucket(self) -> Bucket:
        """Return the last received bucket of weights, and drop the reference to it."""
        assert self._received_bucket is not None, "a bucket is loaded after it has arrived"
        bucket, self._received_bucket = self._received_bucket, None
        return bucket

    def end_weight_load(self) -> None:
        """Release the last received bucket, and the trainer's memory that this rank has mapped."""
        self._received_bucket = None
        if ipc_importer := getattr(self._transfer_engine, "_packed_importer", None):
            ipc_importer.close()

    def close(self) -> None:
        """Close the connection of this rank with the trainer: free its communicator and its memory."""
        self.end_weight_load()
        self._disconnect()
        self._transfer_engine.shutdown()

    @property
    def _nccl_group(self) -> Any:
        return getattr(self._transfer_engine, "model_update_group", None)

    def _disconnect(self) -> None:
        if self._nccl_group is not None:
            self._nccl_group.destroy()


def _call_and_get_error(vllm_worker: Any, rank_function: Callable[..., None], *function_arguments: Any) -> str:
    """Call a function in a rank of a vLLM engine, and return its error in one line, or an empty string."""
    try:
        rank_function(vllm_worker, *function_arguments)
        return ""
    except Exception as error:  # noqa: BLE001 - raised again in the engine's process
        return first_line(error)


def _connect_rank(worker: Any, backend: str, init_info: dict[str, Any], timeout_seconds: float) -> None:
    if earlier_link := getattr(worker, "weight_link", None):
        earlier_link.close()
    worker.weight_link = None
    worker.weight_link = call_with_timeout(timeout_seconds, partial(RankWeightLink, worker, backend, init_info))


def _receive_on_rank(vllm_worker: Any, bucket_header: BucketHeader, timeout_seconds: float) -> None:
    vllm_worker.weight_link.receive(bucket_header, timeout_seconds)
