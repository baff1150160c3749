"""Ray actors that run alongside the ranks of a worker group, such as rollout engines. A dead actor is restarted."""

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
from cosmos_core.job_signals import ignore_job_signals, unblock_job_signals

logger = logging.getLogger(__name__)

_SHARED_GPU_FRACTION = 0.5  # fraction of a GPU that an actor gets if a rank has the other half
_MAX_CONCURRENT_CALLS = 32
"""Maximum number of concurrent calls per actor. It is large, because some calls return only after another call has
ended."""


@dataclass(frozen=True)
class ActorGroup:
    """Settings of the Ray actors, such as rollout engines, that run alongside the ranks of a `WorkerGroup`."""

    make_object: Callable[[], Any]
    """Picklable function that creates an actor's object, whose methods are called remotely. It runs at each start of
    the actor's process."""
    get_target_size: Callable[[], int]
    """Function that returns the number of actors that should run now."""
    name: str = "Actor"
    """Name of the actors' processes in `ps` and Ray: `ray::NAME`."""
    shares_gpus: bool = False
    """Whether an actor with n processes uses the GPUs of n ranks instead of additional GPUs."""
    processes_per_actor: int = 1
    """Number of processes with which one actor computes, each on its own GPU of one machine. The process of the actor
    itself counts if it computes too."""
    is_concurrent_with_ranks: bool = True
    """Whether the actors compute at the same time as the ranks; False: only while the ranks wait."""


class _ObjectActor:
    """Ray actor that holds one object, created by `make_object`, and calls its methods. The process uses `num_threads`
    CPU threads (0: the default) and the GPUs `visible_devices` (empty: the GPUs that Ray makes visible)."""

    def __init__(self, make_object: Callable[[], Any], num_threads: int, visible_devices: str = "") -> None:
        if visible_devices:  # show the GPUs of the ranks, which Ray hides from an actor without GPUs of its own
            os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices
        if num_threads:
            # Child processes inherit the variable; `torch.set_num_threads` sets the number of threads of this process.
            os.environ["OMP_NUM_THREADS"] = str(num_threads)
            torch.set_num_threads(num_threads)
        ignore_job_signals()
        self._held_object = make_object()

    def call(self, method: str, arguments: tuple[Any, ...], kwargs: dict[str, Any], shared_value: Any = None) -> Any:
        """Call the method named `method` of the object. Its positional arguments are `arguments`, followed by
        `shared_value` unless it is None."""
        unblock_job_signals()
        return getattr(self._held_object, method)(
            *arguments, *([] if shared_value is None else [shared_value]), **kwargs
        )


@dataclass(frozen=True)
class ActorHandle:
    """Handle with which any process of the cluster can call methods of the object in an actor."""

    actor: Any

    def call(self, method: str, *arguments: Any, shared_value: Any = None, **kwargs: Any) -> Future[Any]:
        """Call a method of the object and return a future of its result. The future raises `ConnectionError` if the
        actor's process has died, or `ConnectionRefusedError` if the process is not available yet, for example during a
        restart. `shared_value`, a reference from `put`, is passed as the last argument."""
        result_future: Future[Any] = Future()

        def complete_future(actor_future: Future[Any]) -> None:
            error = actor_future.exception()
            if error is None:
                result_future.set_result(actor_future.result())
            elif isinstance(error, RayTaskError):
                # Keep the text of Ray's error as a note, because it has the traceback from the actor's process.
                error.cause.add_note(str(error))
                result_future.set_exception(error.cause)
            elif isinstance(error, RayError):  # the actor died, was killed for lack of memory, or its machine was lost
                error_class = ConnectionRefusedError if isinstance(error, ActorUnavailableError) else ConnectionError
                result_future.set_exception(error_class(first_line(error)))
            else:
                result_future.set_exception(error)

        self.actor.call.remote(method, arguments, kwargs, shared_value).future().add_done_callback(complete_future)
        return result_future

    def put(self, shared_value: Any) -> Any:
        """Store a value for all actors and return a reference to it for `call`; actors on this machine do not copy the
        arrays in the value."""
        return ray.put(shared_value)

    def kill(self) -> None:
        """Kill the process of the actor, which Ray then restarts."""
        ray.kill(self.actor, no_restart=False)


class ActorSupervisor:
    """Supervisor that starts the actors described by an `ActorGroup`, and changes their number while the ranks run."""

    def __init__(
        self, actor_group: ActorGroup, *, owns_cluster: bool, num_threads: int = 0, placements: Sequence[Any] = ()
    ) -> None:
        """Start the actors that `actor_group` describes, each with `num_threads` CPU threads (0: the default).
        `owns_cluster`: whether this process has started the Ray cluster. `placements`: Ray scheduling strategies that
        put the first actors into reserved resource bundles; if actors share the GPUs of ranks, there are at most as
        many actors as `placements`."""
        self._actor_group, self._num_threads = actor_group, num_threads
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        shares_gpus = has_gpus and actor_group.shares_gpus
        gpus_per_actor = _SHARED_GPU_FRACTION if shares_gpus else float(actor_group.processes_per_actor * has_gpus)
        self._placements = placements if has_gpus or not actor_group.shares_gpus else ()
        self._max_actors = len(placements) if shares_gpus else math.inf
        self._visible_devices = [""] * len(placements)
        untyped_ray_remote: Any = ray.remote  # untyped, because `ray.remote` is annotated for functions only
        if shares_gpus and actor_group.processes_per_actor > 1:
            # Ray cannot allocate fractions of several GPUs to an actor. So allocate none, and set CUDA_VISIBLE_DEVICES
            # of each actor to the GPUs of the training ranks with which it shares them.
            gpus_per_actor, gpu_options = 0.0, {"num_cpus": 0, "num_gpus": actor_group.processes_per_actor}
            read_gpu_ids = untyped_ray_remote(**gpu_options)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
            gpu_id_refs = [read_gpu_ids.options(scheduling_strategy=each).remote() for each in placements]
            self._visible_devices = ray.get(gpu_id_refs)
        # On an embedded cluster actors reserve no CPU cores, so that more actors can start later.
        cpus_per_actor = 0 if owns_cluster else actor_group.processes_per_actor
        self._remote_actor_class = untyped_ray_remote(
            num_cpus=cpus_per_actor, num_gpus=gpus_per_actor, max_restarts=-1, max_concurrency=_MAX_CONCURRENT_CALLS
        )(type(actor_group.name, (_ObjectActor,), {}))
        self.actor_handles: list[ActorHandle] = []
        self._num_requested_actors = 0
        self.resize(lambda handles: None)

    def resize(self, on_resize: Callable[[list[ActorHandle]], object]) -> None:
        """Start or kill actors until there are as many as `ActorGroup.get_target_size` returns. If their number
        changes, `on_resize` is called with the handles of all remaining actors, to pass them to the ranks. Surplus
        actors are killed after it has returned."""
        num_requested_actors, num_previous_actors = max(0, self._actor_group.get_target_size()), len(self.actor_handles)
        num_target_actors = int(min(num_requested_actors, self._max_actors))
        if num_requested_actors > num_target_actors and num_requested_actors != self._num_requested_actors:
            warning_template = "%d processes are asked for; each shares GPUs of ranks, so there are %d"
            logger.warning(warning_template, num_requested_actors, num_target_actors)
        self._num_requested_actors = num_requested_actors
        if num_target_actors == num_previous_actors:
            return
        for index in range(num_previous_actors, num_target_actors):
            has_reserved_bundle, make_object = index < len(self._placements), self._actor_group.make_object
            actor_options = {"scheduling_strategy": self._placements[index]} if has_reserved_bundle else {}
            actor_args = (make_object, self._num_threads, self._visible_devices[index] if has_reserved_bundle else "")
            self.actor_handles.append(
                ActorHandle(self._remote_actor_class.options(**actor_options).remote(*actor_args))
            )
        surplus_handles = self.actor_handles[num_target_actors:]
        self.actor_handles = self.actor_handles[:num_target_actors]
        on_resize(self.actor_handles)
        for handle in surplus_handles:
            ray.kill(handle.actor, no_restart=True)
        if num_previous_actors:
            logger.info("%d processes beside the ranks in place of %d", num_target_actors, num_previous_actors)
