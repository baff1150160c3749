"""Collectives for Python values: tensors, plain data, and the dataclasses of `cosmos_core.types`.

The object collectives of `torch.distributed` unpickle any received data, so that any client that reaches a port of a
rank could run code there. These functions use the restricted unpickler of `torch.load(weights_only=True)`.
"""

import io
import threading
from dataclasses import is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cosmos_core import types

T = TypeVar("T")

_SAFE_GLOBALS: list[Any] = [cls for cls in vars(types).values() if isinstance(cls, type) and is_dataclass(cls)]
_SAFE_GLOBALS_LOCK = threading.Lock()
"""Lock around torch's process-wide list of classes that are safe to unpickle: without it, a thread that leaves
`safe_globals` would remove the classes while another thread still needs them."""


def all_gather(local_value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a process group, in the order of ranks; `group` None: the default group."""
    serialized_value = _serialize(local_value)
    byte_counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(byte_counts, torch.tensor([len(serialized_value)]), group=group)
    max_byte_count = int(max(byte_counts))
    received_buffers = [torch.empty(max_byte_count, dtype=torch.uint8) for _ in byte_counts]
    padded_bytes = torch.nn.functional.pad(serialized_value, (0, max_byte_count - len(serialized_value)))
    dist.all_gather(received_buffers, padded_bytes, group=group)
    return [_deserialize(buffer[: int(count)]) for buffer, count in zip(received_buffers, byte_counts, strict=True)]


def broadcast(local_value: T, source_rank: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return on every rank of a process group the `local_value` of the rank with the global number `source_rank`."""
    is_source_rank = dist.get_rank() == source_rank
    serialized_value = _serialize(local_value) if is_source_rank else torch.empty(0, dtype=torch.uint8)
    num_serialized_bytes = torch.tensor([len(serialized_value)])
    dist.broadcast(num_serialized_bytes, src=source_rank, group=group)
    if not is_source_rank:
        serialized_value = torch.empty(int(num_serialized_bytes), dtype=torch.uint8)
    dist.broadcast(serialized_value, src=source_rank, group=group)
    received_value: T = local_value if is_source_rank else _deserialize(serialized_value)
    return received_value


def _serialize(python_value: Any) -> Tensor:
    byte_stream = io.BytesIO()
    torch.save(python_value, byte_stream)
    return torch.frombuffer(byte_stream.getbuffer(), dtype=torch.uint8)


def _deserialize(serialized_value: Tensor) -> Any:
    with _SAFE_GLOBALS_LOCK, torch.serialization.safe_globals(_SAFE_GLOBALS):
        return torch.load(io.BytesIO(serialized_value.numpy().tobytes()), map_location="cpu", weights_only=True)
