"""Placement of ranks and actors in a Ray cluster, with one placement group that reserves all resources at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cosmos_core.errors import ConfigError, Preempted

if TYPE_CHECKING:
    from cosmos_core.cluster.actors import ActorGroup

POLL_SECONDS = 0.2  # seconds between two polls whether Ray has started or finished a task


def list_resource_bundles(
    ray: Any, num_ranks: int, actor_group: ActorGroup | None, *, owns_cluster: bool
) -> list[dict[str, int]]:
    """Return the resource bundles to reserve for `num_ranks` ranks and their actors, as amounts by resource name.

    An actor that shares GPUs with ranks is in one bundle with these ranks. Otherwise each rank and the first actor have
    separate bundles. The resources of the first actor are reserved together with those of the ranks: otherwise two
    trainings could block each other, each with ranks but without an engine. Raises `ConfigError` if the bundles exceed
    the GPUs or CPUs of the cluster, or no machine has enough of them for one bundle: Ray would wait forever.
    """
    cluster_resources = ray.cluster_resources()
    num_gpus, num_cpus = int(cluster_resources.get("GPU", 0)), int(cluster_resources.get("CPU", 0))
    gpus_per_rank, actor_gpus, actor_cpus = min(num_gpus, 1), 0, 0
    if actor_group is not None:
        processes_per_actor = actor_group.processes_per_actor
        actor_gpus, actor_cpus = processes_per_actor * gpus_per_rank, 0 if owns_cluster else processes_per_actor
    if actor_group is not None and actor_group.shares_gpus:
        ranks_per_bundle = count_ranks_per_bundle(actor_group, has_gpus=gpus_per_rank > 0)
        bundle = {"CPU": ranks_per_bundle + actor_cpus * gpus_per_rank, "GPU": gpus_per_rank * ranks_per_bundle}
        required_bundles = [bundle] * (num_ranks // ranks_per_bundle)
    else:
        required_bundles = [{"CPU": 1, "GPU": gpus_per_rank}] * num_ranks + [{"CPU": actor_cpus, "GPU": actor_gpus}]
    bundles = [{name: amount for name, amount in bundle.items() if amount} for bundle in required_bundles]
    bundles = [bundle for bundle in bundles if bundle]
    required_cpus, required_gpus = (sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU"))
    if required_gpus > num_gpus:
        engine_description = f", and a rollout engine {actor_gpus}" if required_gpus > num_ranks else ""
        raise ConfigError(
            f"the mesh takes {num_ranks} GPUs{engine_description}, of {num_gpus} that the Ray cluster has; make "
            f"policy.parallelism smaller"
        )
    if required_cpus > num_cpus:
        raise ConfigError(
            f"{num_ranks} ranks and what is beside them take {required_cpus} CPUs, of {num_cpus} that the Ray "
            f"cluster has; give it more, or make policy.parallelism smaller"
        )
    largest_bundle, machines = bundles[-1].items(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fits_machine = any(all(machine.get(name, 0) >= amount for name, amount in largest_bundle) for machine in machines)
    if actor_group is not None and not fits_machine:
        resources_text = " and ".join(f"{amount} {name}s" for name, amount in largest_bundle)
        raise ConfigError(
            f"rollout.parallelism.tp_size = {actor_group.processes_per_actor}: an engine takes {resources_text} of one "
            f"machine, and no machine of the Ray cluster has them; make it smaller"
        )
    return bundles


def count_ranks_per_bundle(actor_group: ActorGroup | None, *, has_gpus: bool) -> int:
    """Return the number of ranks per resource bundle: all ranks that share their GPUs with one actor, or 1 if actors
    share no GPUs with ranks."""
    return actor_group.processes_per_actor if actor_group is not None and actor_group.shares_gpus and has_gpus else 1


def reserve_bundles(
    ray: Any, bundles: list[dict[str, int]], should_stop: Callable[[], bool], on_poll: Callable[[], None]
) -> list[Any]:
    """Reserve all resource bundles at once, and return Ray's scheduling strategy for each bundle; equal bundles on one
    machine follow each other in the list. `should_stop` and `on_poll` are called repeatedly while the cluster lacks
    free resources. Raises `Preempted` if a stop was requested while this function waited."""
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray_placement_group = placement_group(bundles, strategy="PACK")
    reservation_ref = ray_placement_group.ready()
    while not ray.wait([reservation_ref], timeout=POLL_SECONDS)[0]:
        on_poll()
        if should_stop():
            raise Preempted("asked to stop while the ranks wait for room in the Ray cluster")
    ray.get(reservation_ref)
    # Sort bundles by machine: Ray distributes equal bundles in any order, and neighbouring ranks exchange most data.
    node_ids = placement_group_table(ray_placement_group)["bundles_to_node_id"]
    bundle_indices = sorted(range(len(bundles)), key=lambda i: (bundles[i] != bundles[0], node_ids[i]))
    return [
        PlacementGroupSchedulingStrategy(ray_placement_group, placement_group_bundle_index=i) for i in bundle_indices
    ]
