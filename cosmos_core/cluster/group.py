"""Run one function on several ranks, each a process with a torch process group, as if it were a call.

Ranks are Ray actors in a placement group, on an embedded cluster or on that of `RAY_ADDRESS`; or plain processes
of this machine. An error on one rank ends all, and is raised here with its own class.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing as mp
import os
import secrets
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, Literal

import psutil
import torch
import torch.distributed as dist

from cosmos_core.cluster.facts import variables_of_ranks
from cosmos_core.cluster.join import joined
from cosmos_core.cluster.rank import Program, Rank, Rendezvous, Told
from cosmos_core.cluster.rooms import POLL_SECONDS, bundles, ranks_of_bundle, rooms_of
from cosmos_core.errors import CosmosError, ProgramError, StageFailed, first_line
from cosmos_core.transient import is_transient

if TYPE_CHECKING:
    from cosmos_core.cluster.actors import ActorGroup

logger = logging.getLogger(__name__)

_REPLY_SECONDS = 10.0
"""Between questions to ranks whether they have ended: the reply that says so can be lost with a connection."""
_STORE_BYTES = 1 << 30
"""Of shared memory: for two buckets of weights on their way to engines, and what was not read yet."""
_MOST_RESTARTS = 3
"""Of ranks, of which one has died, beside actors that live."""
_SLOW_TO_IMPORT = ["torch.distributed.fsdp", "torch.distributed.pipelining", "cosmos_core.train.setup"]
"""By the process that plain ranks are forked from, which computes nothing."""
_DEATH_SECONDS = 10.0
"""Until Ray tells of a dead rank, whose peers may have told of a broken connection before."""


class RankFailed(StageFailed):
    """A rank died, or met an error that is none of ours."""


class RankRaised(RankFailed, ProgramError):
    """A rank met an error that may not pass by itself."""


class RanksAgain(RankFailed):
    """What a program raises on every rank to be started again, from its newest checkpoint."""


@dataclass(frozen=True)
class WorkerGroup:
    """A group of `size` ranks on the accelerators there are, or on CPU with gloo."""

    size: int
    launcher: Literal["ray", "local"] = "ray"
    beside: ActorGroup | None = None
    """With Ray alone: actors beside the ranks. Ranks of which one dies are then started again, and the actors stay."""

    def run(
        self,
        program: Program,
        should_stop: Callable[[], bool] = lambda: False,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return what `program` returns on the first rank; the other ranks' outcomes are dropped. `while_waiting` is
        called while there is no room in the cluster.

        Raises:
            CosmosError: the first that any rank raised.
            StageFailed: a rank raised another error or died.
        """
        if self.launcher == "local":
            return _local_ranks(self.size, program, should_stop)
        return _ray_ranks(self.size, program, should_stop, while_waiting, self.beside)


@contextmanager
def process_group(rendezvous: Rendezvous) -> Iterator[None]:
    """Open a process group over all ranks for as long as the block runs."""
    os.environ |= {
        "RANK": str(rendezvous.rank), "WORLD_SIZE": str(rendezvous.size), "LOCAL_RANK": str(rendezvous.device),
        "MASTER_ADDR": rendezvous.address, "MASTER_PORT": str(rendezvous.port),
    }  # fmt: skip
    # Left to themselves both look the host's name up, which many images map to an address that no other machine has.
    if interface := interface_to(rendezvous.address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not ip_address(rendezvous.address).is_loopback:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rendezvous.device)
        backend = "cpu:gloo,cuda:nccl"
    store = dist.TCPStore(rendezvous.address, rendezvous.port, rendezvous.size)
    dist.init_process_group(backend, store=store, rank=rendezvous.rank, world_size=rendezvous.size)
    yield
    dist.destroy_process_group()  # not after an error: the others would fail of that before ours is told


def interface_to(address: str) -> str | None:
    """Return the network interface of this machine that has the way to an address; None: it cannot be told."""
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # nothing is sent
        except OSError:
            return None
        own = probe.getsockname()[0]
    addresses = psutil.net_if_addrs().items()
    return next((name for name, found in addresses if any(each.address.split("%")[0] == own for each in found)), None)


def open_store(address: str, size: int) -> dist.TCPStore:
    """Return where ranks meet, at a port that is held from now on; `address` is this machine's, and no other of its
    addresses can be used: the store believes whoever reaches it."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def outcome_of(program: Program, told: Told, rendezvous: Rendezvous) -> tuple[bool, Any]:
    """Run the program as one rank: True and its value, or False and its error."""
    try:
        with process_group(rendezvous):
            value = program(told)
    except Exception as error:  # noqa: BLE001 - the edge of a process: whatever it is has to reach the other side
        if not isinstance(error, CosmosError):
            traceback.print_exc()
            kind = RankFailed if is_transient(error) else RankRaised
            error = kind(f"rank {rendezvous.rank}: {type(error).__name__}: {error}")
        return False, error
    return True, value if rendezvous.rank == 0 else None


def _local_main(pipe: Connection, program: Program, rendezvous: Rendezvous, environment: Mapping[str, str]) -> None:
    os.environ.clear()  # it is that of the process that forks, as it was when that began
    os.environ |= environment
    told = Told()
    threading.Thread(target=_listen, args=(pipe, told), daemon=True).start()
    pipe.send(outcome_of(program, told, rendezvous))


def _listen(pipe: Connection, told: Told) -> None:
    try:
        pipe.recv()
    except EOFError:  # the other side is gone, and nobody waits for it
        os._exit(1)
    told.set()


def _local_ranks(size: int, program: Program, should_stop: Callable[[], bool]) -> Any:
    context, store = mp.get_context("forkserver"), open_store("127.0.0.1", size)
    context.set_forkserver_preload(_SLOW_TO_IMPORT)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        rendezvous = Rendezvous(rank, size, "127.0.0.1", store.port, rank)
        process = context.Process(target=_local_main, args=(theirs, program, rendezvous, dict(os.environ)))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    outcomes: dict[int, Any] = {}
    asked = False
    try:
        while len(outcomes) < size:
            if should_stop() and not asked:
                asked = True
                for pipe in pipes:
                    pipe.send("stop")
            ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in outcomes], POLL_SECONDS)
            for rank in [rank for rank, pipe in enumerate(pipes) if pipe in ready]:
                outcomes[rank] = _value(_received(pipes[rank], rank))
        return outcomes[0]
    finally:
        for process in processes:
            process.join(5 if len(outcomes) == size else 0)
            process.kill()
            process.join()


def _received(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        outcome: tuple[bool, Any] = pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, RankFailed(f"rank {rank} died")
    return outcome


def _value(outcome: tuple[bool, Any]) -> Any:
    done, value = outcome
    if not done:
        raise value
    return value


def _ray_ranks(
    size: int,
    program: Program,
    should_stop: Callable[[], bool],
    while_waiting: Callable[[], None],
    beside: ActorGroup | None,
) -> Any:
    with _cluster(size, beside) as (ray, is_embedded, of_actor):
        needed = bundles(ray, size, beside, is_embedded=is_embedded)
        rooms = rooms_of(ray, needed, should_stop, while_waiting)
        count = ranks_of_bundle(beside, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)
        of_ranks = [rooms[rank // count] for rank in range(size)]
        start = _starter(ray, of_ranks, share=0.5 if beside is not None and beside.shares_gpus and count == 1 else 1)
        actors = None
        if beside is not None:
            actors = importlib.import_module("cosmos_core.cluster.actors").Actors(
                beside, is_embedded=is_embedded, threads=of_actor, rooms=rooms if beside.shares_gpus else rooms[size:]
            )
        for number in range(_MOST_RESTARTS + 1):
            members, calls = start(program)
            try:
                return _followed(ray, members, calls, should_stop, actors, is_embedded=is_embedded)
            except RankFailed as error:
                is_wanted = isinstance(error, RanksAgain) or _has_died(ray, calls)
                if actors is None or number == _MOST_RESTARTS or not is_wanted:
                    raise
                logger.warning(
                    "%s; the ranks start again from their newest checkpoint, and those beside them stay", error
                )
                for member in members:
                    ray.kill(member)


@contextmanager
def _cluster(size: int, beside: ActorGroup | None) -> Iterator[tuple[Any, bool, int]]:
    """Be the driver of the cluster of `RAY_ADDRESS`, or of one of our own; yield Ray, whether it is our own, and the
    threads of each process beside the ranks, 0 where Ray's nodes say."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_embedded, of_actor = not os.environ.get("RAY_ADDRESS"), 0
    if is_embedded:
        _keep_ray_to_ourselves()
    import ray

    on_stop = signal.getsignal(signal.SIGTERM)
    with joined():
        try:
            if not is_embedded:
                ray.init(logging_level=logging.WARNING, runtime_env={"env_vars": variables_of_ranks()})
            else:
                if beside is not None and not beside.shares_gpus:
                    num_beside = beside.wanted() * beside.processes
                    of_rank, of_actor = threads_of(torch.get_num_threads(), size, num_beside, overlaps=beside.overlaps)
                    os.environ["OMP_NUM_THREADS"] = str(of_rank)  # processes inherit it
                    # A thread that waits must leave its core to the others at once.
                    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
                ray.init(
                    address="local", num_cpus=size, num_gpus=torch.cuda.device_count(), include_dashboard=False,
                    logging_level=logging.WARNING, object_store_memory=_STORE_BYTES if beside else 128 << 20,
                    log_to_driver=True,
                )  # fmt: skip
            signal.signal(signal.SIGTERM, on_stop)  # Ray has put in one that ends this process
            yield ray, is_embedded, of_actor
        finally:
            ray.shutdown()


def threads_of(cores: int, num_ranks: int, num_beside: int, *, overlaps: bool) -> tuple[int, int]:
    """Return the threads of a rank and of a process beside the ranks, on one machine.

    Ranks have all cores, since no engine computes without a pause, and so have engines that compute while ranks wait.
    Otherwise engines have half: decoding gains little from a second thread, and each operation of a rank waits for the
    core that such a thread takes. That made a training with ragged completions a fifth faster (docs/benchmarks.md).
    """
    return max(1, cores // max(num_ranks, num_beside)), max(1, cores // max(1, num_beside * (1 + overlaps)))


def _starter(ray: Any, rooms: list[Any], share: float) -> Callable[[Program], tuple[list[Any], list[Any]]]:
    """Return what starts a program on all ranks: their actors, each with that share of a GPU where there are any, and
    the calls that end with the program."""
    size, gpus = len(rooms), share if ray.cluster_resources().get("GPU", 0) else 0
    remote: Any = ray.remote  # its types know functions alone
    actor = remote(num_cpus=1, num_gpus=gpus, max_concurrency=2)(Rank)
    address = ray.util.get_node_ip_address()
    stores = []  # those of ranks that have died are held too: a late connection must not meet another process

    def start(program: Program) -> tuple[list[Any], list[Any]]:
        members = [actor.options(scheduling_strategy=room).remote() for room in rooms]
        stores.append(open_store(address, size))
        calls = [
            member.run.remote(program, Rendezvous(rank, size, address, stores[-1].port, 0))  # Ray shows it one GPU
            for rank, member in enumerate(members)
        ]
        return members, calls

    return start


def _keep_ray_to_ourselves() -> None:
    """Let the clusters that this process starts listen on the loopback interface alone, and ask for a token.

    Ray reads both settings once, some when it is imported, which another library may have done.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # how processes of Ray are told to keep to loopback
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    from ray._private import ray_constants

    core: Any = importlib.import_module("ray._raylet")  # an extension module without types
    ray_constants.ENABLE_RAY_CLUSTER = False
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()


def _followed(
    ray: Any,
    members: list[Any],
    calls: list[Any],
    should_stop: Callable[[], bool],
    actors: Any | None,
    *,
    is_embedded: bool,
) -> Any:
    """Return what the first rank returns, once all have ended.

    Raises:
        CosmosError: the first that any rank raised.
        RankFailed: a rank died.
        StageFailed: the embedded cluster has died, in which nothing can be started again.
    """
    waiting, asked, first, looked = list(calls), False, None, time.monotonic()
    if actors is not None:
        members[0].have.remote(actors.handles)
    while waiting:
        if should_stop() and not asked:
            asked = True
            for member in members:  # one that is dead is seen below
                member.stop.remote()
        if actors is not None:
            actors.adjust(lambda handles: ray.wait([members[0].have.remote(handles)], timeout=_REPLY_SECONDS))
        done, _ = ray.wait(waiting, timeout=POLL_SECONDS)
        found = {call: call for call in done}
        if not done and time.monotonic() - looked > _REPLY_SECONDS:
            if is_embedded and _is_dead(ray):
                raise StageFailed("the Ray cluster that the stage started has died; a retry starts another one")
            found = {call: members[calls.index(call)].ended.remote() for call in waiting}
            looked = time.monotonic()
        for call, reply in found.items():
            try:
                outcome = ray.get(reply, timeout=_REPLY_SECONDS)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayActorError as error:
                raise RankFailed(f"rank {calls.index(call)} died: {first_line(error)}") from error
            if outcome is not None:
                waiting.remove(call)
                value = _value(outcome)
                first = value if call is calls[0] else first
    return first


def _is_dead(ray: Any) -> bool:
    """Return whether the cluster says that none of its machines is alive; it may say nothing."""
    nodes: list[Any] = []
    thread = threading.Thread(target=lambda: nodes.extend(ray.nodes()), daemon=True)  # it waits without end
    thread.start()
    thread.join(_REPLY_SECONDS)
    return bool(nodes) and not any(node["Alive"] for node in nodes)


def _has_died(ray: Any, calls: list[Any]) -> bool:
    """Return whether a rank is dead, rather than one of them in error."""
    deadline, waiting = time.monotonic() + _DEATH_SECONDS, list(calls)
    while waiting and time.monotonic() < deadline:
        done, waiting = ray.wait(waiting, timeout=POLL_SECONDS)
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                return True
    return False
