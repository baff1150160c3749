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
_NUM_ARRIVALS_KEY, _NUM_HEARTBEATS_KEY = "cosmos/arrivals", "cosmos/heartbeats"
"""Keys of two counters in the key-value store of the process group: calls of `wait_for_ranks`, and heartbeats."""


@dataclass(frozen=True)
class Mesh:
    """Device meshes that contain this rank, one for each kind of parallelism of a training."""

    parallelism: ParallelismConfig
    """Configured size of each axis of the mesh."""
    dp: DeviceMesh
    """Mesh of ranks that have different samples: dp_replicate x dp_shard."""
    fsdp: DeviceMesh | None
    """Mesh over which FSDP shards parameters: dp_shard x cp, with replicas as the outer axis; None: no FSDP."""
    cp: DeviceMesh | None
    """Mesh of ranks that each process some tokens of the same sequences; None: no context parallelism."""
    tp: DeviceMesh | None
    """Mesh of ranks that each hold a slice of the same matrices; None: no tensor parallelism."""
    pp: DeviceMesh | None
    """Mesh of ranks that hold consecutive layers, in order; None: no pipeline parallelism."""
    ep: DeviceMesh | None
    """Mesh of ranks that each hold some experts of a layer; None: no expert parallelism."""
    ep_fsdp: DeviceMesh | None
    """Mesh over which FSDP shards the experts of an expert-parallel rank; None: FSDP does not shard experts."""

    def select_local_items(self, global_items: Sequence[T]) -> list[T]:
        """Return those of `global_items` that this data-parallel rank processes: each of n ranks gets every n-th
        item."""
        return list(global_items[self.dp.get_local_rank() :: self.dp.size()])

    def all_gather_object(self, local_value: T) -> list[T]:
        """Return `local_value` of all data-parallel ranks, in the order of ranks. With pipeline parallelism, these are
        the values of the ranks of the last pipeline stage, which computes the outputs of the model."""
        values_by_rank = exchange.all_gather(local_value, self.dp.get_group())
        if self.pp:
            pp_group = self.pp.get_group()
            last_stage_rank = dist.get_global_rank(pp_group, self.pp.size() - 1)
            values_by_rank = exchange.broadcast(values_by_rank, last_stage_rank, pp_group)
        return values_by_rank


def open_mesh(parallelism: ParallelismConfig, device_type: str) -> Mesh | None:
    """Return the device meshes over all ranks of the process group; None if there is only one rank."""
    if is_single_rank():
        return None
    num_replicas, num_shards = parallelism.dp_replicate_size, abs(parallelism.dp_shard_size) * parallelism.cp_size
    cp_size, ep_size = parallelism.cp_size, parallelism.ep_size

    def init_mesh(**data_axis_sizes: int) -> DeviceMesh:
        axis_sizes = {"pp": parallelism.pp_size, **data_axis_sizes, "tp": parallelism.tp_size}
        return init_device_mesh(device_type, tuple(axis_sizes.values()), mesh_dim_names=tuple(axis_sizes))

    def select_fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh | None:
        if num_replicas > 1:
            return mesh["dp_replicate", "dp_shard"]
        return mesh["dp_shard"] if mesh["dp_shard"].size() > 1 else None

    weight_mesh = expert_mesh = init_mesh(dp_replicate=num_replicas, dp_shard=num_shards)
    batch_mesh = init_mesh(dp=num_replicas * abs(parallelism.dp_shard_size), cp=cp_size)
    if ep_size > 1:
        expert_mesh = init_mesh(dp_replicate=num_replicas, dp_shard=num_shards // ep_size, ep=ep_size)
    return Mesh(
        parallelism=parallelism,
        dp=batch_mesh["dp"],
        fsdp=select_fsdp_mesh(weight_mesh),
        cp=batch_mesh["cp"] if cp_size > 1 else None,
        tp=weight_mesh["tp"] if parallelism.tp_size > 1 else None,
        pp=weight_mesh["pp"] if parallelism.pp_size > 1 else None,
        ep=expert_mesh["ep"] if ep_size > 1 else None,
        ep_fsdp=select_fsdp_mesh(expert_mesh),
    )


def is_single_rank() -> bool:
    """Return True if this is the only rank: there is no process group or, as in a vLLM engine, a group of one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank_number() -> int:
    """Return the global number of this rank, counted from 0."""
    return 0 if is_single_rank() else dist.get_rank()


def num_ranks() -> int:
    """Return the number of ranks; 1 without a process group."""
    return 1 if is_single_rank() else dist.get_world_size()


def is_first_rank() -> bool:
    """Return True on rank 0, which writes files for all ranks."""
    return rank_number() == 0


def broadcast_object(local_value: T) -> T:
    """Return on all ranks the `local_value` of rank 0."""
    return local_value if is_single_rank() else exchange.broadcast(local_value)


def all_gather_object(local_value: T) -> list[T]:
    """Return the values `local_value` of all ranks, in the order of ranks."""
    return [local_value] if is_single_rank() else exchange.all_gather(local_value)


def all_reduce_any(local_flag: bool) -> bool:
    """Return True on all ranks if `local_flag` is true on any rank."""
    if is_single_rank():
        return local_flag
    reduced_flag = torch.tensor(int(local_flag))
    dist.all_reduce(reduced_flag, dist.ReduceOp.MAX)
    return bool(reduced_flag)


def first_error_of_ranks(local_error: str | None) -> str | None:
    """Return on all ranks the nonempty error message `local_error` of the lowest rank that has one; None: no rank has
    one."""
    return next((rank_message for rank_message in all_gather_object(local_error) if rank_message), None)


def send_heartbeat(report_heartbeat: Callable[[], None]) -> None:
    """Call `report_heartbeat`, which shows that this rank is alive, and make each rank that waits in `wait_for_ranks`
    call its own `report_heartbeat`."""
    report_heartbeat()
    if not is_single_rank():
        _get_default_store().add(_NUM_HEARTBEATS_KEY, 1)


def wait_for_ranks(report_heartbeat: Callable[[], None]) -> None:
    """Wait until all ranks have called this function, without the timeout of a collective. While this rank waits, call
    `report_heartbeat` whenever another rank has called `send_heartbeat`."""
    if is_single_rank():
        return
    key_value_store, num_heartbeats = _get_default_store(), 0
    num_expected_arrivals = -(-key_value_store.add(_NUM_ARRIVALS_KEY, 1) // num_ranks()) * num_ranks()
    while key_value_store.add(_NUM_ARRIVALS_KEY, 0) < num_expected_arrivals:
        time.sleep(_POLL_SECONDS)
        if (new_num_heartbeats := key_value_store.add(_NUM_HEARTBEATS_KEY, 0)) > num_heartbeats:
            num_heartbeats = new_num_heartbeats
            report_heartbeat()
