"""Gathering of full tensors of a sharded model on every rank, several tensors at a time.

If all tensors are on the CPUs of one machine, ranks use shared memory: each rank writes its shards, and all ranks read
the full tensors. gloo would send the same bytes through TCP at about a tenth of the speed (docs/benchmarks.md).
Otherwise, ranks use collectives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from mmap import mmap
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_core.parallel.fsdp import full_tensors, get_shard_bounds, local_shard
from cosmos_core.parallel.mesh import all_gather_object, all_reduce_any, broadcast_object, is_first_rank, rank_number

_ALIGNMENT_BYTES = 64
_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class FullTensorGatherer:
    """Gatherer of the full tensors of a sharded model. All ranks must create it together and call its methods in the
    same order."""

    def __init__(self, tensors: Mapping[str, Tensor], max_bytes: int) -> None:
        """Store this rank's `tensors`, full or sharded, and exchange with all ranks which rank has which tensor.

        `max_bytes` is the maximum total size of the full tensors in one call of `full_tensors`.
        """
        self.tensors, self._max_bytes = tensors, max_bytes
        self._owner_ranks: dict[str, int] = {}
        """Lowest rank that has each tensor, by name of the tensor."""
        for rank, tensor_names in enumerate(all_gather_object(list(tensors))):
            self._owner_ranks = dict.fromkeys(tensor_names, rank) | self._owner_ranks
        are_tensors_on_cpu = all(local_shard(tensor).device.type == "cpu" for tensor in tensors.values())
        boot_id = _BOOT_ID_FILE.read_text() if _BOOT_ID_FILE.is_file() else None
        machine_ids = set(all_gather_object((boot_id, os.uname().nodename) if are_tensors_on_cpu and boot_id else None))
        self._uses_shared_memory = len(machine_ids) == 1 and None not in machine_ids
        # Use two buffers, because a loop over tensors may still refer to a tensor of the previous call.
        self._shared_memories: list[_SharedMemory | None] = [None, None]

    def full_tensors(self, tensor_templates: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return full tensors by name, for each name in `tensor_templates`; their memory is reused when no reference to
        them is left. A template has the shape and dtype of the full tensor, and can be on the meta device."""
        if self._uses_shared_memory and (shared_memory := self._take_shared_memory(tensor_templates)) is not None:
            return self._gather_by_shared_memory(shared_memory, tensor_templates)
        tensors = dict(full_tensors({name: self.tensors[name] for name in tensor_templates if name in self.tensors}))
        return {name: tensors[name] for name in tensor_templates}

    def _take_shared_memory(self, tensor_templates: Mapping[str, Tensor]) -> _SharedMemory | None:
        """Return shared memory that is not in use and large enough for the tensors of `tensor_templates`; None if a
        rank cannot map it."""
        num_bytes = sum(_round_up_to_alignment(tensor_template.nbytes) for tensor_template in tensor_templates.values())
        shared_memory = self._shared_memories.pop(0)
        # The collective is also a barrier: a fast rank must not overwrite data that a slow rank still reads.
        if all_reduce_any(shared_memory is None or shared_memory.num_bytes < num_bytes or shared_memory.is_in_use):
            shared_memory = None  # free the old memory before new memory is allocated
            shared_memory = _open_shared_memory(max(num_bytes, self._max_bytes))
            self._uses_shared_memory = shared_memory is not None
        self._shared_memories.append(shared_memory)
        return shared_memory

    def _gather_by_shared_memory(
        self, shared_memory: _SharedMemory, tensor_templates: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the full tensors that `tensor_templates` names, as views of memory that all ranks fill with their
        shards."""
        tensors, byte_offset = {}, 0
        for name, tensor_template in tensor_templates.items():
            tensors[name] = shared_memory.make_tensor_view(byte_offset, tensor_template)
            byte_offset += _round_up_to_alignment(tensor_template.nbytes)
            # Of several ranks with equal shards, the first writes its shard.
            tensor, is_first_replica = self.tensors.get(name), self._owner_ranks[name] == rank_number()
            if isinstance(tensor, DTensor):
                placements = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
                is_first_replica = all(index == 0 for index, placement in placements if placement.is_replicate())
            if tensor is not None and is_first_replica:
                tensors[name][get_shard_bounds(tensor)].copy_(local_shard(tensor.detach()))
        dist.barrier()
        return tensors


class _SharedMemory:
    """Anonymous memory of `num_bytes` bytes that several processes map; the system frees it with the last mapping."""

    def __init__(self, file_descriptor: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory_view = memoryview(mmap(file_descriptor, num_bytes))
        self._num_initial_references = sys.getrefcount(self._memory_view)

    @property
    def is_in_use(self) -> bool:
        """Return True if this rank still has a tensor that is a view of this shared memory."""
        # Each tensor from the method `tensor` refers to the memory view, so the reference count shows its use.
        return sys.getrefcount(self._memory_view) > self._num_initial_references

    def make_tensor_view(self, byte_offset: int, tensor_template: Tensor) -> Tensor:
        """Return a view of this shared memory from `byte_offset` on, as a tensor with the shape and dtype of
        `tensor_template`."""
        numel = tensor_template.numel()
        if not numel:
            return torch.empty_like(tensor_template, device="cpu")
        tensor = torch.frombuffer(self._memory_view, dtype=tensor_template.dtype, count=numel, offset=byte_offset)
        return tensor.view(tensor_template.shape)


def _open_shared_memory(num_bytes: int) -> _SharedMemory | None:
    """Allocate `num_bytes` bytes of memory that all ranks map; None if memory is short or a rank cannot open it."""
    file_descriptor = -1
    if is_first_rank():
        file_descriptor = os.memfd_create("cosmos-weights")
        try:
            os.posix_fallocate(file_descriptor, 0, num_bytes)  # allocate now: a later lack of memory raises SIGBUS
        except OSError:
            os.close(file_descriptor)
            file_descriptor = -1
    first_rank_pid, first_rank_descriptor = broadcast_object((os.getpid(), file_descriptor))
    with suppress(OSError):
        if first_rank_descriptor >= 0 and not is_first_rank():
            file_descriptor = os.open(f"/proc/{first_rank_pid}/fd/{first_rank_descriptor}", os.O_RDWR)
    shared_memory = None if all_reduce_any(file_descriptor < 0) else _SharedMemory(file_descriptor, num_bytes)
    dist.barrier()  # the first rank must not close its descriptor until all ranks have opened it
    if file_descriptor >= 0:
        os.close(file_descriptor)
    return shared_memory


def _round_up_to_alignment(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
