"""Device mesh of a training: the groups of ranks that share samples, parameters, sequences or matrices.

Axes from the outermost to the innermost: pp, dp_replicate, dp_shard, cp, tp; ep reuses dp_shard x cp.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from cosmos_core.config.schema.parallelism import ParallelismConfig
from cosmos_core.parallel import exchange

T = TypeVar("T")

_POLL_SECONDS = 0.02
_ARRIVALS, _HEARTBEATS = "cosmos/arrivals", "cosmos/heartbeats"
"""Keys of counters in the store of the process group."""


@dataclass(frozen=True)
class Mesh:
    """Device meshes of a training that contain this rank; None for a kind of parallelism that is not used."""

    sizes: ParallelismConfig
    """Configured size of each axis of the mesh."""
    data: DeviceMesh
    """Mesh of ranks that have different samples: dp_replicate x dp_shard."""
    fsdp: DeviceMesh | None
    """Mesh over which FSDP shards parameters: dp_shard x cp, with dp_replicate as the outer axis if there are replicas;
    None: no FSDP."""
    context: DeviceMesh | None
    """Mesh of ranks that each process some tokens of the same sequences; None: no context parallelism."""
    tensor: DeviceMesh | None
    """Mesh of ranks that each hold a slice of the same matrices; None: no tensor parallelism."""
    pipeline: DeviceMesh | None
    """Mesh of ranks that hold consecutive layers, in order; None: no pipeline parallelism."""
    expert: DeviceMesh | None
    """Mesh of ranks that each hold some experts of a layer; None: no expert parallelism."""
    expert_fsdp: DeviceMesh | None
    """Mesh over which FSDP shards the experts of an expert-parallel rank, with dp_replicate as the outer axis if there
    are replicas; None: experts are not sharded."""

    def select_local_items(self, items: Sequence[T]) -> list[T]:
        """Return the items of this data-parallel rank: of n data-parallel ranks, each gets every n-th item."""
        return list(items[self.data.get_local_rank() :: self.data.size()])

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all data-parallel ranks, in order; with pipeline parallelism those of the last pipeline
        stage, which computes the outputs."""
        values = exchange.all_gather(value, self.data.get_group())
        if self.pipeline:
            group = self.pipeline.get_group()
            values = exchange.broadcast(values, dist.get_global_rank(group, self.pipeline.size() - 1), group)
        return values


def open_mesh(sizes: ParallelismConfig, device_type: str) -> Mesh | None:
    """Return the device meshes over all ranks of the process group; None if there is only one rank."""
    if is_single_rank():
        return None
    num_shards, num_stages = abs(sizes.dp_shard_size) * sizes.cp_size, sizes.pp_size
    dp_size = sizes.dp_replicate_size * abs(sizes.dp_shard_size)

    def axes(**lengths: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(lengths.values()), mesh_dim_names=tuple(lengths))

    def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
        if sizes.dp_replicate_size > 1:
            return mesh["dp_replicate", "dp_shard"]
        return mesh["dp_shard"] if mesh["dp_shard"].size() > 1 else None

    weight_mesh = axes(pp=num_stages, dp_replicate=sizes.dp_replicate_size, dp_shard=num_shards, tp=sizes.tp_size)
    batch_mesh = axes(pp=num_stages, dp=dp_size, cp=sizes.cp_size, tp=sizes.tp_size)
    expert_mesh = weight_mesh
    if sizes.ep_size > 1:
        expert_mesh = axes(
            pp=num_stages, dp_replicate=sizes.dp_replicate_size, dp_shard=num_shards // sizes.ep_size,
            ep=sizes.ep_size, tp=sizes.tp_size,
        )  # fmt: skip
    return Mesh(
        sizes=sizes,
        data=batch_mesh["dp"],
        fsdp=fsdp_mesh(weight_mesh),
        context=batch_mesh["cp"] if sizes.cp_size > 1 else None,
        tensor=weight_mesh["tp"] if sizes.tp_size > 1 else None,
        pipeline=weight_mesh["pp"] if num_stages > 1 else None,
        expert=expert_mesh["ep"] if sizes.ep_size > 1 else None,
        expert_fsdp=fsdp_mesh(expert_mesh),
    )


def is_single_rank() -> bool:
    """Return True if this is the only rank: there is no process group or, as in a vLLM engine, a group of one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank_number() -> int:
    """Return the global number of this rank, counted from 0."""
    return 0 if is_single_rank() else dist.get_rank()


def num_ranks() -> int:
    """Return the number of ranks in the process group."""
    return 1 if is_single_rank() else dist.get_world_size()


def is_first() -> bool:
    """Return True on rank 0, which writes files for all ranks."""
    return rank_number() == 0


def broadcast_object(value: T) -> T:
    """Return the value of rank 0 on all ranks."""
    return value if is_single_rank() else exchange.broadcast(value)


def all_gather_object(value: T) -> list[T]:
    """Return the values of all ranks, in the order of ranks."""
    return [value] if is_single_rank() else exchange.all_gather(value)


def any_rank(flag: bool) -> bool:
    """Return True on all ranks if `flag` is true on any rank."""
    if is_single_rank():
        return flag
    max_flag = torch.tensor(int(flag))
    dist.all_reduce(max_flag, dist.ReduceOp.MAX)
    return bool(max_flag)


def first_error_of_ranks(problem: str | None) -> str | None:
    """Return on all ranks the `problem` of the lowest rank with a nonempty error message; None: no rank has one."""
    return next((message for message in all_gather_object(problem) if message), None)


def send_heartbeat(beat: Callable[[], None]) -> None:
    """Call `beat`, and report to the ranks in `wait_for_ranks` that this rank is alive."""
    beat()
    if not is_single_rank():
        _get_default_store().add(_HEARTBEATS, 1)


def wait_for_ranks(beat: Callable[[], None]) -> None:
    """Wait until all ranks have called this function, for longer than a collective may take; call `beat` when another
    rank has sent a heartbeat."""
    if is_single_rank():
        return
    store, num_heartbeats = _get_default_store(), 0
    num_expected = -(-store.add(_ARRIVALS, 1) // num_ranks()) * num_ranks()
    while store.add(_ARRIVALS, 0) < num_expected:
        time.sleep(_POLL_SECONDS)
        if (new_num_heartbeats := store.add(_HEARTBEATS, 0)) > num_heartbeats:
            num_heartbeats = new_num_heartbeats
            beat()
