"""Pool of rollout engines in separate processes, and the thread of the first rank that communicates with the engines.

The thread sends prompts to the least loaded engines, collects groups, kills engines that hang, and reassigns requests
of dead engines. The process that started an engine restarts it; a restarted engine gets no prompts until it has
weights.
"""

import logging
import math
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from cosmos_core.errors import StageFailed, first_line
from cosmos_core.rollout.replica import Description
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
_OPEN_SECONDS = 1200.0
"""Time limit for opening an engine, which may read a large model from a slow disk, and for restarting the only
engine."""
_RETRY_SECONDS = 0.5
_MAX_DEATHS = 3
"""Maximum number of times that an engine may die without returning a group; one more death fails the stage."""


class WeightsUnavailable(StageFailed):
    """Error raised if no engine holds the version of the weights that a request needs any more."""


class EngineHandle(Protocol):
    """Remote handle of a `replica.Replica`, a rollout engine in a separate process."""

    def call(self, method: str, *arguments: Any, shared: Any = None, **keywords: Any) -> Future[Any]:
        """Call a method of the replica; a `ConnectionError` in the future means that its process has died.

        `shared` is a value that `put` returned, passed as the last argument of the method; None: no such argument.
        """
        ...

    def put(self, value: Any) -> Any:
        """Return a reference to `value`, the argument `shared` of `call`, so that the value is transferred once instead
        of once per replica."""
        ...

    def kill(self) -> None:
        """Kill the replica's process, which the process manager then restarts."""
        ...


@dataclass(frozen=True)
class _Request:
    """Request for one group of completions."""

    prompt: Prompt
    sampling: Sampling
    step: int
    group: Future[Group] = field(compare=False)
    version: int | None = None
    """Version of the weights that must generate the group; None: any version."""

    @property
    def key(self) -> tuple[int, int, int]:
        """Return the key that matches a group with its request; requests that differ only in seeds have equal keys."""
        return self.step, self.prompt.id, self.sampling.num_completions


@dataclass
class PooledEngine:
    """State of one rollout engine, stored on the first rank."""

    handle: EngineHandle
    description: Description | None = None
    """Description of the engine; None until it is open."""
    version: int | None = None
    """Version of the engine's weights; None if no version was sent to it."""
    num_deaths: int = 0
    """Number of deaths since the engine last returned a group."""
    in_flight: dict[tuple[int, int, int], _Request] = field(default_factory=dict)
    """Requests that the engine is generating, by key; a second request with the same key waits in the queue."""
    reply: Future[Any] | None = None
    """Pending reply to `begin` or `completed`; None: the engine was unreachable and is contacted again later."""
    last_death: float = -math.inf
    """Monotonic time in seconds when the engine was last seen dead; -inf: never."""
    error: ConnectionError | None = None
    """Error with which a call in another thread found the engine dead; None: no error since the engine was opened."""
    num_passes: int = 0
    last_progress: float = 0.0
    """Monotonic time in seconds of the last observed progress of the engine."""


class EnginePool:
    """Pool of the engines of a fleet.

    `max_groups`: maximum number of groups in flight in one engine. An engine is killed if it makes no forward pass for
    `timeout_seconds`. `beat` is called during waits to report that the stage is alive.
    """

    def __init__(
        self,
        handles: Callable[[], Sequence[EngineHandle]],
        max_groups: int,
        timeout_seconds: float,
        beat: Callable[[], None],
    ) -> None:
        self._handles, self._max_groups, self._beat = handles, max_groups, beat
        self.timeout_seconds = timeout_seconds
        self._session = uuid.uuid4().hex
        self._waiting: deque[_Request] = deque()
        self._versioned: deque[_Request] = deque()
        """Queue of requests for one version of the weights, which are sent after all other requests."""
        self._failed_submissions = queue.SimpleQueue[tuple[PooledEngine, Description | None, ConnectionError]]()
        """Queue of engines that did not receive a submission, each with its description at that time and the error."""
        self._problem: Exception | None = None
        self.lock = threading.RLock()
        self.engines: dict[EngineHandle, PooledEngine] = {}
        self.is_loading = False
        """Whether engines are loading weights and therefore make no forward passes."""
        self.is_closed = False
        self.num_restarts = 0
        """Number of engines that died or hung since the start."""

    def start(self) -> None:
        """Start the thread that communicates with the engines."""
        threading.Thread(target=self._run, daemon=True, name="fleet").start()

    def check(self) -> None:
        """Raise the error that ended the communication thread, if any."""
        if self._problem is not None:
            raise self._problem

    def request(
        self, prompt: Prompt, sampling: Sampling, step: int, *, is_urgent: bool, version: int | None = None
    ) -> Future[Group]:
        """Request one group, from any thread; an urgent request is queued before all other requests.

        `version` is the version of the weights that must generate the group; the future raises `WeightsUnavailable` if
        no engine holds that version any more.
        """
        new_request = _Request(prompt, sampling, step, Future(), version)
        with self.lock:
            if self._problem is not None:
                new_request.group.set_exception(self._problem)
            elif version is not None:
                self._versioned.append(new_request)
            else:
                (self._waiting.appendleft if is_urgent else self._waiting.append)(new_request)
        return new_request.group

    def open_engines(self) -> list[PooledEngine]:
        """Return the engines that are open and not known to be dead."""
        with self.lock:
            return [member for member in self.engines.values() if member.description and not member.error]

    def loaded_engines(self) -> list[PooledEngine]:
        """Return the engines that have weights and are not known to be dead."""
        with self.lock:
            return [member for member in self.engines.values() if member.version is not None and not member.error]

    def mark_dead(self, member: PooledEngine, description: Description | None, error: ConnectionError) -> None:
        """Stop using the engine `member`, because a call in another thread showed by `error` that its process is dead.

        `description` identifies the process that was called, because a new process may have replaced it.
        """
        with self.lock:
            if member.description is description and description is not None:
                member.error = error

    def await_all(self, replies: Sequence[tuple[PooledEngine, Future[Any]]]) -> None:
        """Wait until each engine has replied or failed, and report during the wait that the stage is alive.

        An engine that neither replies nor makes a forward pass for `timeout_seconds` is killed.
        """
        progress = {id(member): (time.monotonic(), member.num_passes) for member, _ in replies}
        while waiting := [(member, reply) for member, reply in replies if not reply.done()]:
            self.check()
            wait([reply for _, reply in waiting], timeout=POLL_SECONDS)
            self._beat()
            now = time.monotonic()
            for member, reply in waiting:
                last_change, num_passes = progress[id(member)]
                if member.num_passes != num_passes:
                    progress[id(member)] = now, member.num_passes
                elif now - last_change > self.timeout_seconds and not reply.done():
                    logger.warning(
                        "an engine did not reply for %.0f s; it is ended and started again", self.timeout_seconds
                    )
                    member.handle.kill()
                    progress[id(member)] = now, num_passes

    def _run(self) -> None:
        try:
            while not self.is_closed:
                with self.lock:
                    while not self._failed_submissions.empty():
                        self.mark_dead(*self._failed_submissions.get())
                    self._update_members()
                    for member in list(self.engines.values()):
                        self._listen(member)
                    self._send_requests()
                time.sleep(0.005)
        except Exception as error:
            logger.exception("the thread that talks to the engines has ended")
            with self.lock:
                self._problem = error
                in_flight = (request for member in self.engines.values() for request in member.in_flight.values())
                for request in (*self._waiting, *self._versioned, *in_flight):
                    if not request.group.done():
                        request.group.set_exception(error)

    def _update_members(self) -> None:
        """Add engines with new handles to the pool, and remove engines whose handles were removed."""
        current_handles = list(self._handles())
        for handle in current_handles:
            if handle not in self.engines:
                self.engines[handle] = PooledEngine(handle)
                self._open(self.engines[handle])
        for handle in [handle for handle in self.engines if handle not in current_handles]:
            self._requeue(self.engines.pop(handle))

    def _open(self, member: PooledEngine) -> None:
        member.description, member.version, member.num_passes, member.error = None, None, 0, None
        member.last_progress = time.monotonic()
        member.reply = member.handle.call("begin", self._session)

    def _requeue(self, member: PooledEngine) -> None:
        """Move the requests in flight of an engine back to the front of their queues."""
        requests = list(reversed(member.in_flight.values()))
        self._waiting.extendleft(each for each in requests if each.version is None)
        self._versioned.extendleft(each for each in requests if each.version is not None)
        member.in_flight = {}

    def _listen(self, member: PooledEngine) -> None:
        now = time.monotonic()
        if member.reply is None:
            if now - member.last_progress > _RETRY_SECONDS:
                self._open(member)
            return
        if not member.reply.done():
            seconds = math.inf  # no limit for an engine that does not generate
            if member.description is None:
                seconds = _OPEN_SECONDS
            elif member.in_flight and not self.is_loading:
                seconds = self.timeout_seconds
            if now - member.last_progress > seconds:
                logger.warning("an engine did nothing for %.0f s; it is ended and started again", seconds)
                member.handle.kill()
                member.last_progress = now
            return
        try:
            result = member.reply.result()
        except ConnectionError as error:
            is_starting = isinstance(error, ConnectionRefusedError) and member.description is None
            if is_starting and (now - member.last_death < _OPEN_SECONDS or self.open_engines()):
                member.reply, member.last_progress = None, now
                return
            self._replace(member, error)
            return
        if member.description is None:
            member.description, member.last_progress = result, now
            logger.info("rollout engine %s, process %d, is open", result.name, result.pid)
        else:
            groups, num_passes = result
            if num_passes != member.num_passes or groups or not member.in_flight:
                member.num_passes, member.last_progress = num_passes, now
            elif not self.is_loading and now - member.last_progress > self.timeout_seconds:
                member.handle.kill()
            for group in groups:
                key = (group.step, group.prompt.id, len(group.completions))
                if (request := member.in_flight.pop(key, None)) is not None:
                    member.num_deaths = 0
                    request.group.set_result(group)
            if member.error is not None:
                self._replace(member, member.error)
                return
        member.reply = member.handle.call("completed", self._session, POLL_SECONDS)

    def _replace(self, member: PooledEngine, error: ConnectionError) -> None:
        """Open an engine again after its process died; the process manager starts the new process."""
        member.last_death = time.monotonic()
        self.num_restarts, member.num_deaths = self.num_restarts + 1, member.num_deaths + 1
        if member.num_deaths > _MAX_DEATHS:
            message = f"an engine died {member.num_deaths} times and gave nothing: {first_line(error)}"
            raise StageFailed(message) from error
        logger.warning("an engine died (%s); its %d groups go to others", first_line(error), len(member.in_flight))
        self._requeue(member)
        self._open(member)

    def _send_requests(self) -> None:
        """Send waiting requests to the least loaded engines."""
        ready = self.loaded_engines()
        self._send_to_engines(ready, self._waiting)
        if not self._versioned or self.is_loading:
            return
        matching = [member for member in ready if member.version == self._versioned[0].version]
        self._send_to_engines(matching, self._versioned)
        # Without an engine with newer weights the requests wait, because the next engine loads the requested version.
        if not matching and any((member.version or 0) > (self._versioned[0].version or 0) for member in ready):
            while self._versioned:
                lost = self._versioned.popleft()
                error = WeightsUnavailable(f"the engines with the weights of step {lost.version} have died")
                lost.group.set_exception(error)

    def _send_to_engines(self, ready: Sequence[PooledEngine], queue: deque[_Request]) -> None:
        while queue and ready:
            candidates = [member for member in ready if queue[0].key not in member.in_flight]
            member = min(candidates, key=lambda member: len(member.in_flight), default=None)
            if member is None or len(member.in_flight) >= self._max_groups:
                return
            max_groups = min(self._max_groups - len(member.in_flight), -(-len(queue) // len(ready)))
            if not member.in_flight:
                member.last_progress = time.monotonic()
            batch = _take_batch(queue, max_groups, member.in_flight)
            prompts, sampling, step = [request.prompt for request in batch], batch[0].sampling, batch[0].step
            submission = member.handle.call("submit", self._session, prompts, sampling, step)
            submission.add_done_callback(partial(self._refuse, member, member.description, batch))

    def _refuse(
        self, member: PooledEngine, description: Description | None, batch: Sequence[_Request], reply: Future[Any]
    ) -> None:
        """Set the error of a failed submission on the futures of its requests.

        This method must not take the pool's lock: it runs in a thread of Ray, for which `kill` waits under the lock.
        """
        error = reply.exception()
        if isinstance(error, ConnectionError):
            self._failed_submissions.put((member, description, error))
        elif error is not None:
            for request in batch:
                if not request.group.done():
                    request.group.set_exception(error)


def _take_batch(
    queue: deque[_Request], max_groups: int, in_flight: dict[tuple[int, int, int], _Request]
) -> list[_Request]:
    """Move requests that can be submitted together from the queue into `in_flight`, and return them.

    All moved requests have the same step and sampling, because some engines generate a submission as one batch.
    """
    first = queue[0]
    batch: list[_Request] = []
    while queue and len(batch) < max_groups and queue[0].key not in in_flight:
        if (queue[0].step, queue[0].sampling) != (first.step, first.sampling):
            break
        request = queue.popleft()
        batch.append(request)
        in_flight[request.key] = request
    return batch
