"""Full tensors of a model of which each rank holds a shard, some at a time, on every rank.

On the CPUs of one machine through memory that all ranks see: each writes what it holds, and all read the whole. gloo
moves the same bytes through TCP, at about a tenth of the speed (docs/benchmarks.md). Elsewhere by collectives.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_core.parallel.fsdp import bounds, full_tensors, local
from cosmos_core.parallel.mesh import all_gather_object, any_on_ranks, broadcast_object, rank_number

_ALIGNMENT = 64


class Full(NamedTuple):
    """What is known of a whole tensor without having it."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size in memory."""
        return self.shape.numel() * self.dtype.itemsize


class Gatherer:
    """Gives every rank full tensors; all ranks make one together and call its methods in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor], most_bytes: int) -> None:
        """`tensors` are those that this rank holds or has a part of; ranks may hold others. `most_bytes` are asked for
        at a time."""
        self.tensors, self._most_bytes = tensors, most_bytes
        self._holders: dict[str, list[int]] = {}
        for rank, names in enumerate(all_gather_object(list(tensors))):
            for name in names:
                self._holders.setdefault(name, []).append(rank)
        is_on_cpu = all(local(tensor).device.type == "cpu" for tensor in tensors.values())
        self._is_shared = not any_on_ranks(not is_on_cpu) and _is_one_machine()
        # Two, because whoever goes through tensors in a loop has the last one of a call until the next has returned.
        self._memories: list[_SharedMemory | None] = [None, None]

    def full(self, wanted: Mapping[str, Full]) -> dict[str, Tensor]:
        """Return these tensors, whole. Their memory is used again once nobody refers to them."""
        if self._is_shared and (memory := self._room(wanted)) is not None:
            return self._through(memory, wanted)
        found = dict(full_tensors({name: self.tensors[name] for name in wanted if name in self.tensors}))
        return {name: found[name] for name in wanted}

    def _room(self, wanted: Mapping[str, Full]) -> _SharedMemory | None:
        """Give shared memory for these tensors, which nobody refers to; None: a rank cannot have it."""
        num_bytes = sum(_aligned(full.num_bytes) for full in wanted.values())
        memory = self._memories.pop(0)
        # Also the barrier that keeps a fast rank from writing over what a slow one still reads.
        if any_on_ranks(memory is None or memory.size < num_bytes or memory.is_in_use):
            memory = None  # freed before there is another one
            memory = _open_memory(max(num_bytes, self._most_bytes))
            self._is_shared = memory is not None
        self._memories.append(memory)
        return memory

    def _through(self, memory: _SharedMemory, wanted: Mapping[str, Full]) -> dict[str, Tensor]:
        found, start = {}, 0
        for name, full in wanted.items():
            found[name] = memory.tensor(start, full)
            start += _aligned(full.num_bytes)
            if self._writes(name):
                tensor = self.tensors[name].detach()
                found[name][bounds(tensor)].copy_(local(tensor))
        dist.barrier()
        return found

    def _writes(self, name: str) -> bool:
        """Whether this rank has a part of the tensor that no rank before it has."""
        tensor = self.tensors.get(name)
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate() or ()
            return all(index == 0 for index, p in zip(coordinate, tensor.placements, strict=True) if p.is_replicate())
        return self._holders[name][0] == rank_number()


class _SharedMemory:
    """Anonymous memory that several processes map; the kernel frees it with the last of them."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._view = memoryview(mmap(descriptor, size))
        self._num_references = sys.getrefcount(self._view)

    @property
    def is_in_use(self) -> bool:
        """Return whether a tensor made of it is still referred to on this rank."""
        return sys.getrefcount(self._view) > self._num_references  # each storage made of the view holds one

    def tensor(self, start: int, full: Full) -> Tensor:
        """Return a tensor that begins at byte `start`."""
        numel = full.shape.numel()
        if not numel:
            return torch.empty(full.shape, dtype=full.dtype, device="cpu")
        return torch.frombuffer(self._view, dtype=full.dtype, count=numel, offset=start).view(full.shape)


def _open_memory(size: int) -> _SharedMemory | None:
    """Make memory that all ranks see; None: there is not so much, or a rank is not let at it."""
    descriptor = -1
    if rank_number() == 0:
        try:
            descriptor = os.memfd_create("cosmos-weights")
            os.posix_fallocate(descriptor, 0, size)  # now, because later a lack of memory kills with SIGBUS
        except OSError:
            descriptor = -1
    pid, number = broadcast_object((os.getpid(), descriptor))
    opened = descriptor
    if number >= 0 and rank_number() != 0:
        try:
            opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError:
            opened = -1
    memory = None
    if not any_on_ranks(opened < 0):
        memory = _SharedMemory(opened, size)
    dist.barrier()  # the descriptor of the first rank stays until all have opened it
    if opened >= 0:
        os.close(opened)
    return memory


def _is_one_machine() -> bool:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.is_file() and len(set(all_gather_object((boot.read_text(), os.uname().nodename)))) == 1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
