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

_ALLOWED_CLASSES: list[Any] = [each for each in vars(types).values() if isinstance(each, type) and is_dataclass(each)]
_ALLOWED_CLASSES_LOCK = threading.Lock()
"""Lock around torch's process-wide list of classes that are safe to unpickle.

Without the lock, a thread that leaves `safe_globals` would remove the classes while another thread still needs them.
"""


def all_gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the values of all ranks of a process group, in the order of ranks; `group` None: the default group."""
    local_bytes = _to_bytes(value)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, torch.tensor([len(local_bytes)]), group=group)
    max_bytes = int(max(counts))
    received = [torch.empty(max_bytes, dtype=torch.uint8) for _ in counts]
    padded_bytes = torch.nn.functional.pad(local_bytes, (0, max_bytes - len(local_bytes)))
    dist.all_gather(received, padded_bytes, group=group)
    return [_from_bytes(packed_bytes[: int(count)]) for packed_bytes, count in zip(received, counts, strict=True)]


def broadcast(value: T, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return on every rank of a process group the value of the rank with global number `source`."""
    is_source = dist.get_rank() == source
    packed_bytes = _to_bytes(value) if is_source else torch.empty(0, dtype=torch.uint8)
    num_bytes = torch.tensor([len(packed_bytes)])
    dist.broadcast(num_bytes, src=source, group=group)
    if not is_source:
        packed_bytes = torch.empty(int(num_bytes), dtype=torch.uint8)
    dist.broadcast(packed_bytes, src=source, group=group)
    received_value: T = value if is_source else _from_bytes(packed_bytes)
    return received_value


def _to_bytes(value: Any) -> Tensor:
    stream = io.BytesIO()
    torch.save(value, stream)
    return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)


def _from_bytes(packed_bytes: Tensor) -> Any:
    with _ALLOWED_CLASSES_LOCK, torch.serialization.safe_globals(_ALLOWED_CLASSES):
        return torch.load(io.BytesIO(packed_bytes.numpy().tobytes()), map_location="cpu", weights_only=True)
