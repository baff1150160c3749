"""The mesh of a training: which ranks share samples, parameters, sequences and matrices.

Axes from the outside in: pp, dp_replicate, dp_shard, cp, tp; ep reuses dp_shard x cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.parallel import exchange

T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The device meshes of a training, as one rank sees them."""

    sizes: ParallelismConfig
    """What was asked for."""
    data: DeviceMesh
    """Ranks with samples of their own: dp_replicate x dp_shard."""
    fsdp: DeviceMesh | None
    """What FSDP shards over: dp_shard x cp, with dp_replicate before it where there are replicas; None: nothing to."""
    context: DeviceMesh | None
    """Ranks that share each sequence; None: one."""
    tensor: DeviceMesh | None
    """Ranks that share each matrix; None: one."""
    pipeline: DeviceMesh | None
    """Ranks that each have some of the layers, in their order; None: one has all."""
    expert: DeviceMesh | None
    """Ranks that each have some of a layer's experts; None: one has all."""
    expert_fsdp: DeviceMesh | None
    """What FSDP shards the experts of one rank over, as `fsdp`; None: nothing."""

    def select_own(self, items: Sequence[T]) -> list[T]:
        """Return the items of this data-parallel rank; neighbours go to different ranks."""
        return list(items[self.data.get_local_rank() :: self.data.size()])

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all data-parallel ranks, in their order; of a pipeline those of its last stage, which
        alone sees the end of a sample."""
        found = exchange.all_gather(value, self.data.get_group())
        if self.pipeline:
            group = self.pipeline.get_group()
            found = exchange.broadcast(found, dist.get_global_rank(group, self.pipeline.size() - 1), group)
        return found


def open_mesh(sizes: ParallelismConfig, device_type: str) -> Mesh | None:
    """Return the mesh of the process group; None: there is one rank."""
    if is_alone():
        return None
    num_shards, num_stages = abs(sizes.dp_shard_size) * sizes.cp_size, sizes.pp_size
    num_samples = sizes.dp_replicate_size * abs(sizes.dp_shard_size)

    def axes(**lengths: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(lengths.values()), mesh_dim_names=tuple(lengths))

    def sharded(mesh: DeviceMesh) -> DeviceMesh | None:
        if sizes.dp_replicate_size > 1:
            return mesh["dp_replicate", "dp_shard"]
        return mesh["dp_shard"] if mesh["dp_shard"].size() > 1 else None

    weights = axes(pp=num_stages, dp_replicate=sizes.dp_replicate_size, dp_shard=num_shards, tp=sizes.tp_size)
    rows = axes(pp=num_stages, dp=num_samples, cp=sizes.cp_size, tp=sizes.tp_size)
    experts = weights
    if sizes.ep_size > 1:
        experts = axes(
            pp=num_stages, dp_replicate=sizes.dp_replicate_size, dp_shard=num_shards // sizes.ep_size,
            ep=sizes.ep_size, tp=sizes.tp_size,
        )  # fmt: skip
    return Mesh(
        sizes=sizes,
        data=rows["dp"],
        fsdp=sharded(weights),
        context=rows["cp"] if sizes.cp_size > 1 else None,
        tensor=weights["tp"] if sizes.tp_size > 1 else None,
        pipeline=weights["pp"] if num_stages > 1 else None,
        expert=experts["ep"] if sizes.ep_size > 1 else None,
        expert_fsdp=sharded(experts),
    )


def is_alone() -> bool:
    """Return whether this is the only rank; an engine of vLLM makes a process group of one."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank_number() -> int:
    """Return the number of this rank among all, from 0."""
    return 0 if is_alone() else dist.get_rank()


def num_ranks() -> int:
    """Return how many ranks the process group has."""
    return 1 if is_alone() else dist.get_world_size()


def is_first() -> bool:
    """Return whether this is rank 0, which writes what is written once."""
    return is_alone() or dist.get_rank() == 0


def broadcast_object(value: T) -> T:
    """Return the value of rank 0, on every rank."""
    return value if is_alone() else exchange.broadcast(value)


def all_gather_object(value: T) -> list[T]:
    """Return the values of all ranks, in their order."""
    return [value] if is_alone() else exchange.all_gather(value)


def any_on_ranks(flag: bool) -> bool:
    """Return whether `flag` is true on any rank; the same on all of them."""
    if is_alone():
        return flag
    found = torch.tensor(int(flag))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def first_problem(problem: str | None) -> str | None:
    """Return the problem of the lowest rank that has one; the same on all of them."""
    return next((each for each in all_gather_object(problem) if each), None)
