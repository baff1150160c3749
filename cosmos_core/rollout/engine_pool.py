"""Pool of rollout engines in separate processes, and the thread of the first rank that communicates with the engines.

The thread sends prompts to the least loaded engines, collects groups, kills engines that hang, and reassigns requests
of dead engines. A dead engine is restarted by the process that started it, and gets no prompts until it has weights
again.
"""

import logging
import math
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cosmos_core.errors import ConfigError, StageFailed, first_line
from cosmos_core.rollout.replica import EngineDescription
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_ENGINE_OPEN_TIMEOUT_SECONDS = 1200.0
"""Time limit for opening an engine, which can read a large model from a slow disk, and for restarting the only
engine."""
_RETRY_INTERVAL_SECONDS = 0.5
_MAX_ENGINE_DEATHS = 3
"""Maximum number of times in succession that an engine can die without returning a group; one more death fails the
stage."""


class WeightsUnavailable(StageFailed):
    """Error raised if no engine still has the version of the weights that a request needs."""


class EngineHandle(Protocol):
    """Remote handle of a `replica.EngineReplica`, a rollout engine in a separate process."""

    def call(self, method: str, *arguments: Any, shared_value: Any = None, **kwargs: Any) -> Future[Any]:
        """Call a method of the replica; a `ConnectionError` of the returned future means that its process has died.
        `shared_value`, a reference that `put` returned, is the last argument of the method; None: no such argument."""

    def put(self, value: Any) -> Any:
        """Return a reference to `value`, for the `shared_value` of `call`, so that `value` is transferred only once."""

    def kill(self) -> None:
        """Kill the replica's process, which the process manager then restarts."""


@dataclass(frozen=True)
class _GroupRequest:
    """Request for one group of completions."""

    prompt: Prompt
    sampling: Sampling
    step: int
    group_future: Future[Group] = field(compare=False)
    version: int | None = None
    """Version of the weights that must generate the group; None: any version."""

    @property
    def group_key(self) -> tuple[int, int, int]:
        """Return the key that matches a group with its request; requests that differ only in seeds have equal keys."""
        return self.step, self.prompt.id, self.sampling.num_completions


@dataclass
class PooledEngine:
    """State of one rollout engine, stored on the first rank."""

    handle: EngineHandle
    description: EngineDescription | None = None
    """Description of the engine; None until it is open."""
    version: int | None = None
    """Version of the engine's weights; None: the engine has no weights from the trainer yet."""
    num_process_deaths: int = 0
    """Number of deaths of the engine's process since the engine last returned a group."""
    requests: dict[tuple[int, int, int], _GroupRequest] = field(default_factory=dict)
    """Requests that the engine is generating, by key; a second request with the same key waits in the queue."""
    pending_reply: Future[Any] | None = None
    """Pending reply to `begin_session` or `completed`; None: the engine was unreachable and will be called again."""
    last_death_time: float = -math.inf
    """Monotonic time in seconds when the engine was last seen dead; -inf: never."""
    connection_error: ConnectionError | None = None
    """Error of a call in another thread that shows that the engine is dead; None: no such error since it was opened."""
    num_forward_passes: int = 0
    last_progress_time: float = 0.0
    """Monotonic time in seconds of the last observed progress of the engine."""


class EnginePool:
    """Pool of rollout engines in separate processes. `max_groups`: maximum number of groups in flight in one engine. An
    engine is killed if it makes no forward pass for `timeout_seconds`. `send_heartbeat` is called during waits to
    report that the stage is alive."""

    def __init__(
        self,
        get_handles: Callable[[], Sequence[EngineHandle]],
        max_groups: int,
        timeout_seconds: float,
        send_heartbeat: Callable[[], None],
    ) -> None:
        self._get_handles, self._max_groups, self._send_heartbeat = get_handles, max_groups, send_heartbeat
        self.timeout_seconds = timeout_seconds
        self._session_id = uuid.uuid4().hex
        self._waiting_requests: deque[_GroupRequest] = deque()
        self._versioned_requests: deque[_GroupRequest] = deque()
        """Queue of requests that need a particular version of the weights; they are sent after all other requests."""
        self._failed_submissions = queue.SimpleQueue[tuple[PooledEngine, EngineDescription | None, ConnectionError]]()
        """Queue of engines to which prompts could not be submitted, each with its description at that time and the
        error."""
        self._thread_error: Exception | None = None
        self.lock = threading.RLock()
        self.engines: dict[EngineHandle, PooledEngine] = {}
        self.is_loading_weights = False
        """Whether engines are loading weights and therefore make no forward passes."""
        self.is_closed = False
        self.num_restarts = 0
        """Number of times that engines died or hung since the pool was started."""

    def start_thread(self) -> None:
        """Start the thread that communicates with the rollout engines."""
        threading.Thread(target=self._communicate_with_engines, daemon=True, name="fleet").start()

    def raise_thread_error(self) -> None:
        """Raise the error that ended the thread that communicates with the rollout engines, if any."""
        if self._thread_error is not None:
            raise self._thread_error

    def request(
        self, prompt: Prompt, sampling: Sampling, step: int, *, is_urgent: bool = False, version: int | None = None
    ) -> Future[Group]:
        """Request one group, from any thread; an urgent request is queued before all other requests. The future raises
        `WeightsUnavailable` if no engine has `version`, the required version of the weights, any more; the caller must
        not load other weights before the group is done."""
        request = _GroupRequest(prompt, sampling, step, Future(), version)
        with self.lock:
            if self._thread_error is not None:
                request.group_future.set_exception(self._thread_error)
            elif version is not None:
                self._versioned_requests.append(request)
            else:
                (self._waiting_requests.appendleft if is_urgent else self._waiting_requests.append)(request)
        return request.group_future

    def open_engines(self) -> list[PooledEngine]:
        """Return the rollout engines that are open and not known to be dead."""
        with self.lock:
            return [engine for engine in self.engines.values() if engine.description and not engine.connection_error]

    def get_loaded_engines(self) -> list[PooledEngine]:
        """Return the rollout engines that have weights from the trainer and are not known to be dead."""
        with self.lock:
            return [e for e in self.engines.values() if e.version is not None and not e.connection_error]

    def mark_engine_dead(
        self, engine: PooledEngine, description: EngineDescription | None, error: ConnectionError
    ) -> None:
        """Stop using an engine whose process has died, because a call in another thread failed with `error`.
        `description` identifies the process that was called, which a new process can have replaced meanwhile."""
        with self.lock:
            if engine.description is description and description is not None:
                engine.connection_error = error

    def await_replies(self, replies: Sequence[tuple[PooledEngine, Future[Any]]]) -> None:
        """Wait until each rollout engine in `replies` has replied or failed; kill engines without progress for
        `timeout_seconds`."""
        last_progress_by_id = {id(engine): (time.monotonic(), engine.num_forward_passes) for engine, _ in replies}
        while pending_replies := [(engine, reply) for engine, reply in replies if not reply.done()]:
            self.raise_thread_error()
            wait([reply for _, reply in pending_replies], timeout=POLL_SECONDS)
            self._send_heartbeat()
            current_time = time.monotonic()
            for engine, reply in pending_replies:
                last_progress_time, num_forward_passes = last_progress_by_id[id(engine)]
                is_timed_out = current_time - last_progress_time > self.timeout_seconds and not reply.done()
                if engine.num_forward_passes == num_forward_passes and is_timed_out:
                    warning_message = "an engine did not reply for %.0f s; it is ended and started again"
                    logger.warning(warning_message, self.timeout_seconds)
                    engine.handle.kill()
                if engine.num_forward_passes != num_forward_passes or is_timed_out:
                    last_progress_by_id[id(engine)] = current_time, engine.num_forward_passes

    def _communicate_with_engines(self) -> None:
        try:
            while not self.is_closed:
                with self.lock:
                    while not self._failed_submissions.empty():
                        self.mark_engine_dead(*self._failed_submissions.get())
                    self._update_engines()
                    for engine in list(self.engines.values()):
                        self._handle_engine_reply(engine)
                    self._send_requests()
                time.sleep(0.005)
        except Exception as error:
            logger.exception("the thread that talks to the engines has ended")
            with self.lock:
                self._thread_error = error
                sent_requests = (request for engine in self.engines.values() for request in engine.requests.values())
                _fail_requests((*self._waiting_requests, *self._versioned_requests, *sent_requests), error)

    def _update_engines(self) -> None:
        """Add rollout engines with new handles to the pool, and remove engines whose handles were removed."""
        current_handles = list(self._get_handles())
        for handle in current_handles:
            if handle not in self.engines:
                self.engines[handle] = PooledEngine(handle)
                self._open_engine(self.engines[handle])
        for handle in [handle for handle in self.engines if handle not in current_handles]:
            self._requeue_requests(self.engines.pop(handle))

    def _open_engine(self, engine: PooledEngine) -> None:
        engine.description, engine.version, engine.num_forward_passes, engine.connection_error = None, None, 0, None
        engine.last_progress_time = time.monotonic()
        engine.pending_reply = engine.handle.call("begin_session", self._session_id)

    def _requeue_requests(self, engine: PooledEngine) -> None:
        """Move the requests in flight of a dead or removed engine back to the front of their queues."""
        reversed_requests = list(reversed(engine.requests.values()))
        self._waiting_requests.extendleft(request for request in reversed_requests if request.version is None)
        self._versioned_requests.extendleft(request for request in reversed_requests if request.version is not None)
        engine.requests = {}

    def _handle_engine_reply(self, engine: PooledEngine) -> None:
        current_time = time.monotonic()
        if engine.pending_reply is None:
            if current_time - engine.last_progress_time > _RETRY_INTERVAL_SECONDS:
                self._open_engine(engine)
            return
        if not engine.pending_reply.done():
            timeout_seconds = math.inf  # engines that do not generate have no time limit
            if engine.description is None:
                timeout_seconds = _ENGINE_OPEN_TIMEOUT_SECONDS
            elif engine.requests and not self.is_loading_weights:
                timeout_seconds = self.timeout_seconds
            if current_time - engine.last_progress_time > timeout_seconds:
                logger.warning("an engine did nothing for %.0f s; it is ended and started again", timeout_seconds)
                engine.handle.kill()
                engine.last_progress_time = current_time
            return
        try:
            engine_reply = engine.pending_reply.result()
        except ConnectionError as error:
            was_connection_refused = isinstance(error, ConnectionRefusedError) and engine.description is None
            if was_connection_refused and (
                current_time - engine.last_death_time < _ENGINE_OPEN_TIMEOUT_SECONDS or self.open_engines()
            ):
                engine.pending_reply, engine.last_progress_time = None, current_time
                return
            self._reopen_dead_engine(engine, error)
            return
        except ConfigError as error:
            if engine.description is not None or engine.last_death_time == -math.inf:
                raise
            # Raise no ConfigError: the engine was open before, so its settings are valid, but the GPU may now be full.
            raise StageFailed(f"an engine that died cannot be opened again: {error}") from error
        if engine.description is None:
            engine.description, engine.last_progress_time = engine_reply, current_time
            logger.info("rollout engine %s, process %d, is open", engine_reply.name, engine_reply.pid)
        else:
            finished_groups, num_forward_passes = engine_reply
            if num_forward_passes != engine.num_forward_passes or finished_groups or not engine.requests:
                engine.num_forward_passes, engine.last_progress_time = num_forward_passes, current_time
            elif not self.is_loading_weights and current_time - engine.last_progress_time > self.timeout_seconds:
                engine.handle.kill()
            for group in finished_groups:
                group_key = (group.step, group.prompt.id, len(group.completions))
                if (request := engine.requests.pop(group_key, None)) is not None:
                    engine.num_process_deaths = 0
                    request.group_future.set_result(group)
            if engine.connection_error is not None:
                self._reopen_dead_engine(engine, engine.connection_error)
                return
        engine.pending_reply = engine.handle.call("completed", self._session_id, POLL_SECONDS)

    def _reopen_dead_engine(self, engine: PooledEngine, error: ConnectionError) -> None:
        """Open an engine again after its process died; the process manager starts the new process. Raise `StageFailed`
        if the engine has died too often."""
        engine.last_death_time = time.monotonic()
        self.num_restarts, engine.num_process_deaths = self.num_restarts + 1, engine.num_process_deaths + 1
        if engine.num_process_deaths > _MAX_ENGINE_DEATHS:
            raise StageFailed(
                f"an engine died {engine.num_process_deaths} times and gave nothing: {first_line(error)}"
            ) from error
        logger.warning("an engine died (%s); its %d groups go to others", first_line(error), len(engine.requests))
        self._requeue_requests(engine)
        self._open_engine(engine)

    def _send_requests(self) -> None:
        ready_engines = self.get_loaded_engines()
        self._send_to_engines(ready_engines, self._waiting_requests)
        if not self._versioned_requests or self.is_loading_weights:
            return
        version = self._versioned_requests[0].version or 0
        matching_engines = [engine for engine in ready_engines if engine.version == version]
        self._send_to_engines(matching_engines, self._versioned_requests)
        # Fail requests only if an engine has newer weights: with older ones, the next load has the requested version.
        if not matching_engines and any((engine.version or 0) > version for engine in ready_engines):
            while self._versioned_requests:
                request = self._versioned_requests.popleft()
                error_message = f"the engines with the weights of step {request.version} have died"
                _fail_requests([request], WeightsUnavailable(error_message))

    def _send_to_engines(self, ready_engines: Sequence[PooledEngine], request_queue: deque[_GroupRequest]) -> None:
        while request_queue and ready_engines:
            eligible_engines = [engine for engine in ready_engines if request_queue[0].group_key not in engine.requests]
            engine = min(eligible_engines, key=lambda engine: len(engine.requests), default=None)
            if engine is None or len(engine.requests) >= self._max_groups:
                return
            max_batch_size = min(self._max_groups - len(engine.requests), -(-len(request_queue) // len(ready_engines)))
            if not engine.requests:
                engine.last_progress_time = time.monotonic()
            batch = _take_request_batch(request_queue, max_batch_size, engine.requests)
            prompts, sampling, step = [request.prompt for request in batch], batch[0].sampling, batch[0].step
            submit_reply = engine.handle.call("submit", self._session_id, prompts, sampling, step)
            submit_reply.add_done_callback(partial(self._handle_submit_reply, engine, engine.description, batch))

    def _handle_submit_reply(
        self,
        engine: PooledEngine,
        description: EngineDescription | None,
        batch: Sequence[_GroupRequest],
        reply: Future[Any],
    ) -> None:
        """Handle a failed submission: queue the engine if its process has died, else set the error on the requests'
        futures. This method runs in a thread of Ray, and must not acquire the pool's lock: `kill` can wait for this
        thread while another thread holds the lock."""
        error = reply.exception()
        if isinstance(error, ConnectionError):
            self._failed_submissions.put((engine, description, error))
        elif error is not None:
            _fail_requests(batch, error)


def _fail_requests(requests: Iterable[_GroupRequest], error: BaseException) -> None:
    """Set an error on the futures of those requests whose groups of completions are not complete."""
    for request in requests:
        if not request.group_future.done():
            request.group_future.set_exception(error)


def _take_request_batch(
    request_queue: deque[_GroupRequest], max_groups: int, requests_by_key: dict[tuple[int, int, int], _GroupRequest]
) -> list[_GroupRequest]:
    """Move requests of equal train step and sampling settings, which an engine can generate as one batch, from the
    queue into `requests_by_key`. Return the moved requests, at most `max_groups`."""
    step, sampling = request_queue[0].step, request_queue[0].sampling
    request_batch: list[_GroupRequest] = []
    while request_queue and len(request_batch) < max_groups and request_queue[0].group_key not in requests_by_key:
        if (request_queue[0].step, request_queue[0].sampling) != (step, sampling):
            break
        request = request_queue.popleft()
        request_batch.append(request)
        requests_by_key[request.group_key] = request
    return request_batch
