"""Code for both ends of a weight transfer by NCCL or CUDA IPC: the header of a bucket, and calls with a time limit."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from cosmos_core.error_handling import complete_future
from cosmos_core.rollout.base import Bucket, get_storage_key

T = TypeVar("T")
_POLL_SECONDS = 0.1


class TransferFailed(Exception):
    """Error raised if a bucket of weights did not arrive by NCCL or CUDA IPC; the bucket can be sent again through host
    memory."""


class BucketHeader(NamedTuple):
    """Header of a bucket of weights: names, dtypes and shapes of its tensors. Their data are sent separately, as
    consecutive bytes."""

    names: list[str]
    """Names of the sent tensors, wider dtypes first, so that each tensor starts at a multiple of its element size."""
    dtype_names: list[str]
    shapes: list[list[int]]
    name_by_alias: dict[str, str]
    """For each further name of a tied weight, the name under which its data are sent once."""
    transport_fields: dict[str, Any]
    """Further fields of vLLM's update info, which depend on the transport."""

    def make_update_info(self) -> dict[str, Any]:
        """Return the fields of vLLM's update info; a scalar has the shape [1], because vLLM cannot unpack scalars."""
        sent_shapes = [shape or [1] for shape in self.shapes]
        return {"names": self.names, "dtype_names": self.dtype_names, "shapes": sent_shapes, **self.transport_fields}

    def make_bucket(self, tensors: Mapping[str, Tensor]) -> Bucket:
        """Return the bucket of weights with the received `tensors`, in the sender's shapes and under all names of tied
        weights."""
        bucket = {name: tensors[name].reshape(shape) for name, shape in zip(self.names, self.shapes, strict=True)}
        return [*bucket.items(), *((alias, bucket[name]) for alias, name in self.name_by_alias.items())]

    def make_meta_bucket(self) -> Bucket:
        """Return the bucket of weights that this header describes with tensors on the meta device, for an engine whose
        ranks have the data already."""
        dtypes = [getattr(torch, name) for name in self.dtype_names]
        tensors = [torch.empty(shape, dtype=t, device="meta") for shape, t in zip(self.shapes, dtypes, strict=True)]
        return self.make_bucket(dict(zip(self.names, tensors, strict=True)))


def split_bucket(bucket: Bucket) -> tuple[BucketHeader, list[Tensor]]:
    """Return the header of a bucket of weights, and the tensors to send, in the order of the header."""
    first_name_by_storage: dict[Any, str] = {}
    sent_name_by_tensor_name = {
        name: first_name_by_storage.setdefault(get_storage_key(tensor), name) for name, tensor in bucket
    }
    first_name_by_alias = {name: sent_name for name, sent_name in sent_name_by_tensor_name.items() if sent_name != name}
    named_tensors = [(name, tensor) for name, tensor in bucket if name not in first_name_by_alias]
    named_tensors.sort(key=lambda named_tensor: -named_tensor[1].element_size())
    tensors = [tensor.detach() for _, tensor in named_tensors]
    dtype_names = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
    sent_shapes = [list(tensor.shape) for tensor in tensors]
    return BucketHeader([name for name, _ in named_tensors], dtype_names, sent_shapes, first_name_by_alias, {}), tensors


def copy_tensors_to_buffer(byte_buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy tensors into a buffer of bytes, one after the other."""
    start_offset = 0
    for tensor in tensors:
        end_offset = start_offset + tensor.nbytes
        byte_buffer[start_offset:end_offset].view(tensor.dtype).reshape(tensor.shape).copy_(tensor)
        start_offset = end_offset


def call_with_timeout(
    timeout_seconds: float,
    function: Callable[[], T],
    *,
    abort: Callable[[], object] = lambda: None,
    has_peer_failed: Callable[[], bool] = lambda: False,
) -> T:
    """Return the result of a function that can hang, such as a collective whose peer has died. The function runs in a
    new thread, on this thread's device. After `timeout_seconds`, or when `has_peer_failed` returns True, call `abort`
    and raise `TransferFailed`. A later result is ignored, because an aborted collective leaves arbitrary bytes."""
    result_future: Future[T] = Future()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def run_and_report() -> None:
        with nullcontext() if device is None else torch.accelerator.device_index(device):
            complete_future(result_future, function)

    threading.Thread(target=run_and_report, daemon=True, name="weight transfer").start()
    deadline = time.monotonic() + timeout_seconds
    while not wait([result_future], min(_POLL_SECONDS, timeout_seconds)).done:
        if (is_late := time.monotonic() > deadline) or has_peer_failed():
            abort()
            raise TransferFailed(f"it took longer than {timeout_seconds:g} s" if is_late else "an engine has failed")
    return result_future.result()
