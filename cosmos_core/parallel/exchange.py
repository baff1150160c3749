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

_RECORDS: list[Any] = [each for each in vars(types).values() if isinstance(each, type) and is_dataclass(each)]
_ALLOWED_CLASSES_LOCK = threading.Lock()
"""Lock around torch's process-wide list of classes that are safe to unpickle.

Without the lock, a thread that leaves `safe_globals` would remove the classes while another thread still needs them.
"""


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a process group, in the order of ranks; `group` None: the default group."""
    local_bytes = _to_bytes(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(local_bytes)]), group=group)
    max_bytes = max(int(size) for size in sizes)
    received = [torch.empty(max_bytes, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(received, torch.nn.functional.pad(local_bytes, (0, max_bytes - len(local_bytes))), group=group)
    return [_from_bytes(packed[: int(size)]) for packed, size in zip(received, sizes, strict=True)]


def broadcast(value: T, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return on every rank of a process group the value of the rank with global number `source`."""
    is_source = dist.get_rank() == source
    packed = _to_bytes(value) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(packed)])
    dist.broadcast(size, src=source, group=group)
    if not is_source:
        packed = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(packed, src=source, group=group)
    received: T = value if is_source else _from_bytes(packed)
    return received


def _to_bytes(value: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def _from_bytes(packed: Tensor) -> Any:
    with _ALLOWED_CLASSES_LOCK, torch.serialization.safe_globals(_RECORDS):
        return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
