"""Execution of one function on several ranks, each a process in a torch process group, as if it were a single call.

Ranks are Ray actors in a placement group. The Ray cluster is the one at `RAY_ADDRESS`, or an embedded cluster that this
process starts. An error on one rank ends all ranks, and is raised in the caller.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from cosmos_core.cluster.join import join_cluster
from cosmos_core.cluster.placement import POLL_SECONDS, count_ranks_per_bundle, list_resource_bundles, reserve_bundles
from cosmos_core.cluster.properties import get_rank_environment
from cosmos_core.cluster.rank import Rank, RankMessages, RankProgram, Rendezvous
from cosmos_core.errors import CosmosError, ProgramError, StageFailed, first_line
from cosmos_core.job_signals import block_job_signals
from cosmos_core.run.lock import make_locked_folder
from cosmos_core.run.process import ATTEMPT_VARIABLE, locate_socket_folder
from cosmos_core.transient import is_transient

if TYPE_CHECKING:
    from cosmos_core.cluster.actors import ActorGroup

logger = logging.getLogger(__name__)

_REPLY_TIMEOUT_SECONDS = 10.0
"""Seconds to wait for a reply of a rank or of Ray. If no rank has ended for this long, all ranks are polled, because
Ray can lose the reply of a rank that has ended."""
_OBJECT_STORE_BYTES = 1 << 30
"""Size in bytes of Ray's object store in an embedded cluster with rollout engines: enough for two buckets of weights
that are being sent to the engines, and for values that no process has read yet."""
_MAX_SOCKET_FOLDER_BYTES = 40
"""Maximum length in bytes of the path of Ray's temporary folder; instead of a folder with a longer path, a folder in
/tmp is used. The path of a socket has at most 107 bytes, of which Ray takes 65."""
_MAX_RANK_RESTARTS = 3
"""Maximum number of times that `WorkerGroup.run` restarts all ranks after one of them has died or has requested it.
Ranks are restarted only if the group also has Ray actors, such as rollout engines, which keep running meanwhile;
otherwise the call fails."""
_DEATH_REPORT_TIMEOUT_SECONDS = 10.0  # wait for Ray's report that a rank is dead, after another rank has failed


class RankFailed(StageFailed):
    """Raised if a rank has died, or has raised a transient error from outside this package."""


class RankRaised(RankFailed, ProgramError):
    """Raised if a rank has raised an error that a retry cannot fix: a `ProgramError`, or an error from outside this
    package that is not transient."""


class RanksMustRestart(RankFailed):
    """Raised by a program on every rank to request a restart of all ranks from the newest checkpoint."""


@dataclass(frozen=True)
class WorkerGroup:
    """Group of `num_ranks` ranks that run one program, on GPUs if there are any, otherwise on CPUs with gloo."""

    num_ranks: int
    actors: ActorGroup | None = None
    """Actors that run alongside the ranks and continue when ranks are restarted; None: no actors."""

    def run(
        self,
        program: RankProgram,
        should_stop: Callable[[], bool] = lambda: False,
        on_poll: Callable[[], None] = lambda: None,
    ) -> Any:
        """Run `program` on all ranks and return its value on the first rank. `should_stop` returns True when ranks must
        stop; `on_poll` is called while the cluster lacks resources. Raises the first `CosmosError` that a rank raised,
        and `StageFailed` if a rank died or raised an error from outside this package."""
        num_ranks, actor_group = self.num_ranks, self.actors
        with _connect_to_cluster(num_ranks, actor_group) as (ray, owns_cluster, threads_per_actor):
            required_bundles = list_resource_bundles(ray, num_ranks, actor_group, owns_cluster=owns_cluster)
            placements = reserve_bundles(ray, required_bundles, should_stop, on_poll)
            ranks_per_bundle = count_ranks_per_bundle(actor_group, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
            rank_placements = [placements[rank // ranks_per_bundle] for rank in range(num_ranks)]
            gpu_fraction = 0.5 if actor_group is not None and actor_group.shares_gpus and ranks_per_bundle == 1 else 1
            start_ranks = _make_rank_starter(ray, rank_placements, gpu_fraction)
            actor_supervisor = None
            if actor_group is not None:
                actor_placements = placements if actor_group.shares_gpus else placements[num_ranks:]
                actor_supervisor = importlib.import_module("cosmos_core.cluster.actors").ActorSupervisor(
                    actor_group, owns_cluster=owns_cluster, num_threads=threads_per_actor, placements=actor_placements
                )
            for attempt in range(_MAX_RANK_RESTARTS + 1):
                rank_actors, run_refs = start_ranks(program)
                try:
                    return _wait_for_ranks(
                        ray, rank_actors, run_refs, should_stop, actor_supervisor, owns_cluster=owns_cluster
                    )
                except RankFailed as error:
                    # Look for a dead rank: other ranks may report a broken connection before Ray reports the death.
                    death_error = None if isinstance(error, RanksMustRestart) else _find_dead_rank(ray, run_refs)
                    should_restart_ranks = isinstance(error, RanksMustRestart) or death_error is not None
                    if actor_supervisor is None or attempt == _MAX_RANK_RESTARTS or not should_restart_ranks:
                        raise death_error or error from error.__cause__
                    warning_text = "%s; the ranks start again from their newest checkpoint, and those beside them stay"
                    logger.warning(warning_text, death_error or error)
                    for rank_actor in rank_actors:
                        ray.kill(rank_actor)


@contextmanager
def open_process_group(rendezvous: Rendezvous) -> Iterator[None]:
    """Open torch's default process group for the duration of a `with` block. `rendezvous` has the rank of this process,
    the number of ranks, and the address of the group's TCP store."""
    os.environ |= {
        "RANK": str(rendezvous.rank), "WORLD_SIZE": str(rendezvous.num_ranks), "LOCAL_RANK": str(rendezvous.device),
        "MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port),
    }  # fmt: skip
    # Set the interface: by default gloo and NCCL use the host name, which may have an unreachable address.
    if network_interface := find_network_interface(rendezvous.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", network_interface)
        if not ip_address(rendezvous.address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", network_interface)
    process_group_backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rendezvous.device)
        process_group_backend = "cpu:gloo,cuda:nccl"
    # The timeout is long, because ranks wait at this store for other ranks that load or compile longer.
    store = dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.num_ranks, timeout=dist.default_pg_timeout)
    dist.init_process_group(process_group_backend, store=store, rank=rendezvous.rank, world_size=rendezvous.num_ranks)
    yield
    dist.destroy_process_group()  # not after an error, because closing the group makes other ranks fail


def find_network_interface(address: str) -> str | None:
    """Return the name of this machine's network interface that routes to an address; None: it cannot be determined."""
    with socket.socket(_get_address_family(address), socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect((address, 9))  # selects a route without sending a packet, because the socket is UDP
        except OSError:
            return None
        source_address = probe_socket.getsockname()[0]
    for interface_name, addresses in psutil.net_if_addrs().items():
        if source_address in {each.address.split("%")[0] for each in addresses}:
            return interface_name
    return None


def _get_address_family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET


def create_tcp_store(address: str, num_ranks: int) -> dist.TCPStore:
    """Return the TCP store for a process group of `num_ranks` ranks. The store listens on a free port of the IP address
    `address` only, because it trusts all clients."""
    listening_socket = socket.create_server((address, 0), family=_get_address_family(address))
    free_port, fd = listening_socket.getsockname()[1], listening_socket.detach()
    return dist.TCPStore(address, free_port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def run_as_rank(program: RankProgram, rank_messages: RankMessages, rendezvous: Rendezvous) -> tuple[bool, Any]:
    """Run `program` as one rank of a process group. Return True and the value of the program (None except on rank 0),
    or, after an error, False and the error."""
    try:
        with open_process_group(rendezvous):
            return_value = program(rank_messages)
    except Exception as error:  # noqa: BLE001 - every error must reach the process that started the rank
        is_user_error = type(error) is ProgramError
        if is_user_error or not isinstance(error, CosmosError) or "traceback in the log" in str(error):
            traceback.print_exc()
        if is_user_error:
            error = RankRaised(f"rank {rendezvous.rank}: {error}")
        elif not isinstance(error, CosmosError):
            error_class = RankFailed if is_transient(error) else RankRaised
            error = error_class(f"rank {rendezvous.rank}: {type(error).__name__}: {error}")
        return False, error
    return True, return_value if rendezvous.rank == 0 else None


@contextmanager
def _connect_to_cluster(num_ranks: int, actor_group: ActorGroup | None) -> Iterator[tuple[Any, bool, int]]:
    """Connect as the Ray driver to the cluster at `RAY_ADDRESS` or, if that is unset, to a new embedded cluster. Yield
    the module `ray`, whether the cluster is embedded, and the threads per actor process (0: the node's default)."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    owns_cluster, threads_per_actor = not os.environ.get("RAY_ADDRESS"), 0
    if owns_cluster:
        _restrict_ray_access()
    import ray

    sigterm_handler = signal.getsignal(signal.SIGTERM)
    with join_cluster(), _make_socket_folder() if owns_cluster else nullcontext() as socket_folder:
        try:
            if owns_cluster and actor_group is not None and not actor_group.shares_gpus:
                num_actors = actor_group.get_target_size() * actor_group.processes_per_actor
                threads_per_rank, threads_per_actor = split_threads(
                    torch.get_num_threads(), num_ranks, num_actors, is_parallel=actor_group.is_concurrent_with_ranks
                )
                # The processes of the ranks inherit this number of threads from the environment.
                os.environ["OMP_NUM_THREADS"] = str(threads_per_rank)
                # Ranks and actors share cores, so a waiting OpenMP thread must release its core at once.
                os.environ.setdefault("OMP_WAIT_POLICY", "passive")
            # The processes of an embedded cluster inherit the blocked signals, which therefore do not end them.
            with block_job_signals():
                if owns_cluster:
                    ray.init(
                        address="local", num_cpus=num_ranks, num_gpus=torch.cuda.device_count(),
                        include_dashboard=False, logging_level=logging.WARNING, log_to_driver=True,
                        _temp_dir=socket_folder, object_store_memory=_OBJECT_STORE_BYTES if actor_group else 128 << 20,
                    )  # fmt: skip
                else:
                    ray.init(logging_level=logging.WARNING, runtime_env={"env_vars": get_rank_environment()})
                signal.signal(signal.SIGTERM, sigterm_handler)  # restore the handler that `ray.init` replaced
            yield ray, owns_cluster, threads_per_actor
        finally:
            if owns_cluster:
                _kill_cluster_at_shutdown(ray)
            ray.shutdown()


def _kill_cluster_at_shutdown(ray: Any) -> None:
    """Let `ray.shutdown` kill the processes of an embedded cluster and their children at once. Otherwise it would send
    SIGTERM, which they block, wait a second for each of them, and leave the dashboard agent running for a minute."""
    if (ray_node := ray._private.worker._global_node) is None:
        return
    kill_all_processes = ray_node.kill_all_processes

    def kill_with_children(**kill_arguments: Any) -> None:
        node_pids = [each.process.pid for process_infos in ray_node.all_processes.values() for each in process_infos]
        child_processes: list[psutil.Process] = []
        for pid in node_pids:
            with suppress(psutil.Error):  # skip a process that has ended
                child_processes += psutil.Process(pid).children(recursive=True)
        kill_all_processes(**{**kill_arguments, "allow_graceful": False})
        for child_process in child_processes:
            with suppress(psutil.Error):
                child_process.kill()

    ray_node.kill_all_processes = kill_with_children


@contextmanager
def _make_socket_folder() -> Iterator[str | None]:
    """Yield None if the path of Ray's default folder is short enough for the sockets of an embedded cluster. Otherwise,
    for example with the long TMPDIR of a batch job, yield a temporary folder in /tmp."""
    default_ray_folder = os.path.join(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp", "ray")
    if len(os.fsencode(default_ray_folder)) <= _MAX_SOCKET_FOLDER_BYTES:
        yield None
        return
    socket_folder = locate_socket_folder(os.environ.get(ATTEMPT_VARIABLE) or secrets.token_hex(6))
    with make_locked_folder(socket_folder, parent_setting_text=""):
        yield str(socket_folder)


def split_threads(num_cores: int, num_ranks: int, num_actors: int, *, is_parallel: bool) -> tuple[int, int]:
    """Return the number of threads per rank and per actor process (rollout engine), on one machine with `num_cores` CPU
    cores. The ranks use all cores together, and so do the engines, because engines pause often. With `is_parallel`,
    engines compute while ranks compute; then they use half of the cores, because a second thread speeds up decoding
    little, but takes a core from a rank (docs/benchmarks.md)."""
    return max(1, num_cores // max(num_ranks, num_actors)), max(1, num_cores // max(1, num_actors * (1 + is_parallel)))


def _make_rank_starter(
    ray: Any, placements: list[Any], gpu_fraction: float
) -> Callable[[RankProgram], tuple[list[Any], list[Any]]]:
    """Return a function that starts a program on all ranks and returns two lists: the Ray actor of each rank, and the
    reference to its pending call. `placements` are Ray scheduling strategies, one per rank; `gpu_fraction` is the
    fraction of a GPU per rank, if there are GPUs."""
    num_ranks, gpus_per_rank = len(placements), gpu_fraction if ray.cluster_resources().get("GPU", 0) else 0
    untyped_ray_remote: Any = ray.remote  # untyped, because `ray.remote` is annotated for functions only
    rank_actor_class = untyped_ray_remote(num_cpus=1, num_gpus=gpus_per_rank, max_concurrency=2)(Rank)
    node_address = ray.util.get_node_ip_address()
    tcp_stores = []  # stores stay open, so that no other process reuses a port to which a dead rank may connect

    def start_program(program: RankProgram) -> tuple[list[Any], list[Any]]:
        rank_actors = [rank_actor_class.options(scheduling_strategy=each).remote() for each in placements]
        tcp_stores.append(create_tcp_store(node_address, num_ranks))
        # Each rank computes on device 0, because Ray makes one GPU visible to it.
        port = tcp_stores[-1].port
        return rank_actors, [
            rank_actor.run.remote(program, Rendezvous(rank, num_ranks, node_address, port, 0))
            for rank, rank_actor in enumerate(rank_actors)
        ]

    return start_program


def _restrict_ray_access() -> None:
    """Restrict the Ray clusters that this process starts to the loopback interface, and require an access token. Change
    both settings inside Ray too: it reads them only once, partly at import, and another library has perhaps imported
    Ray already."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # 0 restricts Ray to the loopback interface
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    from ray._private import ray_constants

    raylet_module: Any = importlib.import_module("ray._raylet")  # the extension module has no type annotations
    ray_constants.ENABLE_RAY_CLUSTER = False
    raylet_module.Config.initialize("")
    raylet_module.AuthenticationTokenLoader.instance().reset_cache()


def _wait_for_ranks(
    ray: Any,
    rank_actors: list[Any],
    run_refs: list[Any],
    should_stop: Callable[[], bool],
    actor_supervisor: Any | None,
    *,
    owns_cluster: bool,
) -> Any:
    """Wait until the program has ended on all ranks, and return its value on the first rank. Raises the first
    `CosmosError` that a rank raised, `RankFailed` if a rank died, and `StageFailed` if the embedded cluster has died,
    because ranks cannot be restarted then."""
    pending_refs, has_sent_stop, return_value, last_poll_time = list(run_refs), False, None, time.monotonic()
    first_rank_actor = rank_actors[0]
    if actor_supervisor is not None:
        first_rank_actor.set_actors.remote(actor_supervisor.actor_handles)
    while pending_refs:
        if should_stop() and not has_sent_stop:
            has_sent_stop = True
            for rank_actor in rank_actors:  # replies are not awaited, because a dead rank sends none
                rank_actor.stop.remote()
        if actor_supervisor is not None:
            actor_supervisor.resize(
                lambda handles: ray.wait([first_rank_actor.set_actors.remote(handles)], timeout=_REPLY_TIMEOUT_SECONDS)
            )
        finished_refs, _ = ray.wait(pending_refs, timeout=POLL_SECONDS)
        reply_refs = {run_ref: run_ref for run_ref in finished_refs}
        if not finished_refs and time.monotonic() - last_poll_time > _REPLY_TIMEOUT_SECONDS:
            if owns_cluster and _is_cluster_dead(ray):
                raise StageFailed("the Ray cluster that the stage started has died; a retry starts another one")
            reply_refs = {ref: rank_actors[run_refs.index(ref)].read_run_result.remote() for ref in pending_refs}
            last_poll_time = time.monotonic()
        for run_ref, reply_ref in reply_refs.items():
            try:
                run_result = ray.get(reply_ref, timeout=_REPLY_TIMEOUT_SECONDS)
            except ray.exceptions.GetTimeoutError:
                continue
            except _get_death_errors(ray) as error:
                raise _make_death_error(run_refs.index(run_ref), error) from error
            if run_result is not None:
                pending_refs.remove(run_ref)
                has_run_succeeded, value_or_error = run_result
                if not has_run_succeeded:
                    # Give the first rank time to close its metric sinks.
                    ray.wait(run_refs[:1], timeout=_REPLY_TIMEOUT_SECONDS)
                    raise value_or_error
                return_value = value_or_error if run_ref is run_refs[0] else return_value
    return return_value


def _get_death_errors(ray: Any) -> tuple[type[Exception], ...]:
    """Return the classes of the errors with which a call of a dead rank fails. One of them is `OutOfMemoryError`,
    because Ray kills processes if a machine runs out of memory."""
    return ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError


def _is_cluster_dead(ray: Any) -> bool:
    """Return True if the Ray cluster reports that no machine is alive; return False if the cluster does not respond."""
    ray_nodes: list[Any] = []
    # `ray.nodes()` may block forever, so it runs in a thread that is abandoned after a timeout.
    node_query_thread = threading.Thread(target=lambda: ray_nodes.extend(ray.nodes()), daemon=True)
    node_query_thread.start()
    node_query_thread.join(_REPLY_TIMEOUT_SECONDS)
    return bool(ray_nodes) and not any(ray_node["Alive"] for ray_node in ray_nodes)


def _find_dead_rank(ray: Any, run_refs: list[Any]) -> RankFailed | None:
    """Return an error that names a rank whose process has died, according to Ray's results for the calls `run_refs`,
    one per rank; None: no rank has died."""
    deadline, pending_refs = time.monotonic() + _DEATH_REPORT_TIMEOUT_SECONDS, list(run_refs)
    while pending_refs and time.monotonic() < deadline:
        finished_refs, pending_refs = ray.wait(pending_refs, timeout=POLL_SECONDS)
        for run_ref in finished_refs:
            try:
                ray.get(run_ref)
            except _get_death_errors(ray) as error:
                return _make_death_error(run_refs.index(run_ref), error)
    return None


def _make_death_error(rank: int, error: Exception) -> RankFailed:
    return RankFailed(f"rank {rank} died: {first_line(error)}")
