"""The room that a group of ranks, and what is beside them, needs in a Ray cluster, all at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cosmos_core.errors import ConfigError, Preempted

if TYPE_CHECKING:
    from cosmos_core.cluster.actors import ActorGroup

POLL_SECONDS = 0.2


def bundles(ray: Any, size: int, beside: ActorGroup | None, *, is_embedded: bool) -> list[dict[str, int]]:
    """Return what each rank needs of the cluster, with the actor that shares its GPU, or what ranks need together that
    share theirs with one actor; then what one actor needs that does not share any: a training that has its ranks and no
    engine would keep others from theirs and wait for ever.

    Raises:
        ConfigError: the cluster has not so much, and Ray would wait for more without end.
    """
    there = ray.cluster_resources()
    num_gpus, num_cpus = int(there.get("GPU", 0)), int(there.get("CPU", 0))
    gpu, beside_gpus, beside_cpus = min(num_gpus, 1), 0, 0
    if beside is not None:
        beside_gpus, beside_cpus = beside.processes * gpu, 0 if is_embedded else beside.processes
    if beside is not None and beside.shares_gpus:
        count = ranks_of_bundle(beside, has_gpus=gpu > 0)
        wanted = [{"CPU": count + beside_cpus * gpu, "GPU": gpu * count}] * (size // count)
    else:
        wanted = [{"CPU": 1, "GPU": gpu}] * size + [{"CPU": beside_cpus, "GPU": beside_gpus}]
    wanted = [found for each in wanted if (found := {name: count for name, count in each.items() if count})]
    needed = {name: sum(each.get(name, 0) for each in wanted) for name in ("CPU", "GPU")}
    engine = f", and a rollout engine {beside_gpus}" if needed["GPU"] > size else ""
    if needed["GPU"] > num_gpus:
        raise ConfigError(
            f"the mesh takes {size} GPUs{engine}, of {num_gpus} that the Ray cluster has; make policy.parallelism "
            f"smaller"
        )
    if needed["CPU"] > num_cpus:
        raise ConfigError(
            f"{size} ranks and what is beside them take {needed['CPU']} CPUs, of {num_cpus} that the Ray cluster has; "
            f"give it more, or make policy.parallelism smaller"
        )
    return wanted


def ranks_of_bundle(beside: ActorGroup | None, *, has_gpus: bool) -> int:
    """Return how many ranks a bundle is for: all that share their GPUs with one actor, which are of one machine."""
    return beside.processes if beside is not None and beside.shares_gpus and has_gpus else 1


def rooms_of(
    ray: Any, needed: list[dict[str, int]], should_stop: Callable[[], bool], while_waiting: Callable[[], None]
) -> list[Any]:
    """Return Ray's strategy for each bundle, which are had all at once.

    Raises:
        Preempted: asked to stop while there is no room.
    """
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group(needed, strategy="PACK")
    ready = group.ready()
    while not ray.wait([ready], timeout=POLL_SECONDS)[0]:
        while_waiting()
        if should_stop():
            raise Preempted("asked to stop while the ranks wait for room in the Ray cluster")
    ray.get(ready)
    return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(len(needed))]
