"""Objects beside the ranks, each a Ray actor: started by the process that starts the ranks, and again when it dies."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from cosmos_core.errors import first_line

logger = logging.getLogger(__name__)

SHARED = 0.5
"""Of a GPU, for a rank and an actor on it each."""
_CALLS_AT_ONCE = 32
"""Some calls wait for others to end."""


@dataclass(frozen=True)
class ActorGroup:
    """What there is beside the ranks of a group."""

    make: Callable[[], Any]
    """Called in each actor's process, and again when it died; picklable."""
    wanted: Callable[[], int]
    """How many there should be now."""
    name: str = "Actor"
    """What processes are called: `ray::NAME`."""
    shares_gpus: bool = False
    """Each is on the GPUs of as many ranks as it has processes; otherwise on GPUs of its own."""
    processes: int = 1
    """That each starts and that compute, itself if it is one, on a GPU each; all on one machine."""
    overlaps: bool = True
    """They compute while the ranks do, and not only while these wait."""


class _Host:
    """An object in a process of its own."""

    def __init__(self, make: Callable[[], Any], threads: int, gpus: str = "") -> None:
        if gpus:  # which Ray has given to ranks
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that it starts
            torch.set_num_threads(threads)
        self._object = make()

    def call(self, method: str, arguments: tuple[Any, ...], keywords: dict[str, Any], shared: Any = None) -> Any:
        """Call a method of the object."""
        return getattr(self._object, method)(*arguments, *([] if shared is None else [shared]), **keywords)


@dataclass(frozen=True)
class ActorHandle:
    """How the object in an actor is reached, from any process of the cluster."""

    actor: Any

    def __hash__(self) -> int:
        return hash(self.actor._actor_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and self.actor._actor_id == other.actor._actor_id

    def ask(self, method: str, *arguments: Any, shared: Any = None, **keywords: Any) -> Future[Any]:
        """Call a method; a `ConnectionError` says that the process has died, a `ConnectionRefusedError` that it may be
        on its way, as one that is started again is. `shared`: what `put` returned, handed over as the last argument."""
        reply: Future[Any] = Future()

        def tell(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                reply.set_result(done.result())
            elif isinstance(error, RayTaskError):
                error.cause.add_note(str(error))  # where in the other process it was raised
                reply.set_exception(error.cause)
            elif isinstance(error, RayError):  # also that its memory was taken, or its reply lost with a machine
                kind = ConnectionRefusedError if isinstance(error, ActorUnavailableError) else ConnectionError
                reply.set_exception(kind(first_line(error)))
            else:
                reply.set_exception(error)

        self.actor.call.remote(method, arguments, keywords, shared).future().add_done_callback(tell)
        return reply

    def put(self, value: Any) -> Any:
        """Put a value where all actors find it: those of this machine read its arrays without a copy."""
        return ray.put(value)

    def kill(self) -> None:
        """End the process; another one takes its place."""
        ray.kill(self.actor, no_restart=False)


def _gpus_of(rooms: Sequence[Any], count: int) -> list[str]:
    """Return the `count` GPUs of each bundle, which nothing has yet, as `CUDA_VISIBLE_DEVICES` names them."""
    remote: Any = ray.remote
    visible = remote(num_cpus=0, num_gpus=count)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    found: list[str] = ray.get([visible.options(scheduling_strategy=room).remote() for room in rooms])
    return found


class Actors:
    """The actors of a group, as the process that starts them has them."""

    def __init__(self, group: ActorGroup, *, is_embedded: bool, threads: int = 0, rooms: Sequence[Any] = ()) -> None:
        """`threads`: of each process; 0: as many as it finds. `rooms`: Ray's strategies for the first of them; for all,
        where they share the GPUs of ranks."""
        self._group, self._threads = group, threads
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        gpus = 0.0
        if has_gpus:
            gpus = SHARED if group.shares_gpus else float(group.processes)
        self._rooms = rooms if has_gpus or not group.shares_gpus else ()
        self._most = len(rooms) if has_gpus and group.shares_gpus else math.inf
        self._gpus = [""] * len(rooms)
        if has_gpus and group.shares_gpus and group.processes > 1:
            # Ray gives parts of one GPU and not of several: ranks have them whole, and actors are told which they are.
            gpus, self._gpus = 0.0, _gpus_of(rooms, group.processes)
        remote: Any = ray.remote  # its types know functions alone
        # Of the cluster that this process starts, cores are not counted: there may be more actors later.
        self._actor = remote(
            num_cpus=0 if is_embedded else group.processes,
            num_gpus=gpus,
            max_concurrency=_CALLS_AT_ONCE,
            max_restarts=-1,
        )(type(group.name, (_Host,), {}))
        self.handles: list[ActorHandle] = []
        self._asked = 0
        self.adjust(lambda handles: None)

    def adjust(self, tell: Callable[[list[ActorHandle]], object]) -> None:
        """Start or end actors until there are as many as wanted. If that changes anything, `tell` says to who uses them
        which there are, and is through with it before one of the others ends."""
        asked, before = max(0, self._group.wanted()), len(self.handles)
        wanted = int(min(asked, self._most))
        if asked > wanted and asked != self._asked:
            logger.warning("%d processes are asked for; each shares GPUs of ranks, so there are %d", asked, wanted)
        self._asked = asked
        if wanted == before:
            return
        while (number := len(self.handles)) < wanted:
            where: dict[str, Any] = {}
            own = ""
            if number < len(self._rooms):
                where, own = {"scheduling_strategy": self._rooms[number]}, self._gpus[number]
            self.handles.append(ActorHandle(self._actor.options(**where).remote(self._group.make, self._threads, own)))
        others, self.handles = self.handles[wanted:], self.handles[:wanted]
        tell(self.handles)
        for handle in others:
            ray.kill(handle.actor, no_restart=True)
        if before:
            logger.info("%d processes beside the ranks in place of %d", wanted, before)
