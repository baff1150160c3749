"""Several rollout engines in processes of their own, as one: they generate while the ranks train.

The first rank talks to the engines, and one thread of it does: it hands out prompts, collects groups, and ends what
hangs. An engine that dies is started again by who started it; until it has the present weights it gets no prompts, and
what it had in flight goes to others. The other ranks take part in what all ranks do together: gathering weights, and
waiting.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from cosmos_core.errors import StageFailed
from cosmos_core.parallel.mesh import broadcast_object, is_first
from cosmos_core.rollout.base import Bucket, Loaded, WeightFormat
from cosmos_core.rollout.replica import Description, packed
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_MOST_DEATHS = 3
"""Of one engine, with no group between them; more are no accident."""


class Handle(Protocol):
    """How a replica is reached; see `Replica` for the methods."""

    def ask(self, method: str, *arguments: Any, shared: Any = None, **keywords: Any) -> Future[Any]:
        """Call a method of the replica; a `ConnectionError` says that its process has died. `shared`: what `put`
        returned, handed over as the last argument."""
        ...

    def put(self, value: Any) -> Any:
        """Return what stands for a value in `ask`, so that it is sent once and not to each replica."""
        ...

    def kill(self) -> None:
        """End the process; another one takes its place."""
        ...


@dataclass(frozen=True)
class _Request:
    """A group that somebody waits for."""

    prompt: Prompt
    sampling: Sampling
    step: int
    group: Future[Group] = field(compare=False)


@dataclass
class _Member:
    """An engine, as the first rank knows it."""

    handle: Handle
    description: Description | None = None
    """None: it is not open yet."""
    version: int | None = None
    """Of its weights; None: not one that was sent."""
    num_deaths: int = 0
    """Since it last gave a group."""
    in_flight: list[_Request] = field(default_factory=list)
    reply: Future[Any] | None = None
    """Of the question that it is asked now: what it is, or what is done."""
    passes: int = 0
    moved: float = 0.0
    """When it was last seen to do something."""


class Fleet:
    """An `Engine` made of many; all ranks call its methods together, but for `request`, `is_stale` and `check`.

    `handles` may grow and shrink while it runs. `most_groups` is what one engine gets at a time; an engine that makes
    no pass for `patience` seconds is ended.
    """

    weight_format: WeightFormat
    ranks_per_engine = 1

    def __init__(
        self,
        handles: Callable[[], Sequence[Handle]],
        *,
        most_groups: int,
        patience: float,
        swap: Literal["disabled", "generation", "inference"] = "disabled",
        takes_turns: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`swap`: see `rollout.async_r2r_sync`. `takes_turns`: engines sleep while nobody asks for groups, because they
        are on the trainer's GPUs.

        Raises:
            CosmosError: an engine cannot be opened.
        """
        self._handles, self._most_groups, self._patience, self._swap = handles, most_groups, patience, swap
        self._takes_turns, self._beat = takes_turns, beat
        self._session = uuid.uuid4().hex
        self._members: dict[Handle, _Member] = {}
        self._waiting: deque[_Request] = deque()
        self._own: list[tuple[Prompt, Future[Group]]] = []
        self._lock = threading.RLock()
        self._problem: Exception | None = None
        self._is_closed = False
        self._is_loading = self._only_new = False
        self.num_restarts = 0
        """Engines that died or hung since the start."""
        self.has_new = False
        """Whether the newest weights were the first of an engine."""
        self.version = -1
        """Of the newest weights that were sent."""
        if is_first():
            threading.Thread(target=self._run, daemon=True, name="fleet").start()
        described: Any = broadcast_object(self._first_description() if is_first() else None)
        if isinstance(described, str):
            raise self._problem or StageFailed(described)
        self.name, self.weight_format = f"{described[0]}, {len(self._handles()) or 'several'} apart", described[1]

    def request(self, prompt: Prompt, sampling: Sampling, step: int, *, is_urgent: bool = False) -> Future[Group]:
        """Ask for one group, before all others or behind them; on the first rank, from any thread."""
        asked = _Request(prompt, sampling, step, Future())
        with self._lock:
            (self._waiting.appendleft if is_urgent else self._waiting.append)(asked)
        return asked.group

    @property
    def is_stale(self) -> bool:
        """Return whether an engine waits for weights, so that it can be given prompts."""
        with self._lock:
            return any(member.description and member.version is None for member in self._members.values())

    def check(self) -> None:
        """Raise what ended the thread that talks to the engines, if anything did."""
        if self._problem is not None:
            raise self._problem

    @contextmanager
    def only_new(self) -> Iterator[None]:
        """Let loads inside the block reach only the engines that have no weights yet."""
        self._only_new = True
        try:
            yield
        finally:
            self._only_new = False

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """See `Engine.submit`."""
        if is_first():
            self._own += [(prompt, self.request(prompt, sampling, step, is_urgent=True)) for prompt in prompts]

    def completed(self) -> list[Group]:
        """See `Engine.completed`: all that were submitted, so that ranks wait for each other once."""
        groups, failed = [], ""
        try:
            while self._own:
                groups.append(self._awaited(self._own[0][1]))
                self._own.pop(0)
        except Exception as error:  # noqa: BLE001 - all ranks have to hear of it
            self._own, failed = [], str(error) or type(error).__name__
        groups, failed = broadcast_object((groups, failed))
        if failed:
            raise self._problem or StageFailed(failed)
        return groups

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        """See `Engine.load_weights`: every engine that is open takes them. One that dies meanwhile is left out."""
        num_sent, loads = 0, self._begin_load(version) if is_first() else []
        has_new = any(member.version is None for member in loads)
        for bucket in buckets:
            num_sent += len(bucket)
            if loads:
                value = loads[0].handle.put(packed(bucket))
                loads = self._replied(loads, [member.handle.ask("bucket", shared=value) for member in loads])
        if is_first():
            self._end_load(version, loads, num_sent)
        self.version, self.has_new = version, broadcast_object(has_new)
        return Loaded(version, num_sent)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.logprobs`: of one engine."""
        return next(iter(self.all_logprobs(token_ids)))

    def all_logprobs(self, token_ids: Sequence[int]) -> list[list[float]]:
        """Return the log-probabilities by each engine that has weights, which may be none."""
        found: list[list[float]] = []
        if is_first():
            with self._lock:
                asked = [member for member in self._members.values() if member.version is not None]
            replies = [member.handle.ask("logprobs", token_ids) for member in asked]
            for reply in replies:
                try:
                    found.append(self._awaited(reply))
                except ConnectionError:
                    continue  # the thread that talks to it sees that too
        return broadcast_object(found)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `Engine.sleep`; engines that generate while others train stay awake."""
        self._tell_all("sleep")

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._tell_all("wake")

    def close(self) -> None:
        """See `Engine.close`; the processes are left to who started them."""
        self._is_closed = True

    # What follows runs on the first rank.

    def _tell_all(self, method: str) -> None:
        if not (self._takes_turns and is_first()):
            return
        with self._lock:
            members = [member for member in self._members.values() if member.version is not None]
        self._replied(members, [member.handle.ask(method) for member in members])

    def _first_description(self) -> Any:
        while self._problem is None:
            self._beat()
            with self._lock:
                described = [member.description for member in self._members.values() if member.description]
            if described:
                return tuple(described[0])
            time.sleep(0.05)
        return str(self._problem)

    def _awaited(self, reply: Future[Any]) -> Any:
        """Return the reply, saying meanwhile that we are alive."""
        while True:
            self.check()
            try:
                return reply.result(timeout=_POLL_SECONDS)
            except TimeoutError:
                if reply.done():
                    raise
                self._beat()

    def _replied(self, members: list[_Member], replies: list[Future[Any]]) -> list[_Member]:
        """Return the members that have replied; those that died are left to the thread that talks to them."""
        alive = []
        for member, reply in zip(members, replies, strict=True):
            try:
                self._awaited(reply)
            except ConnectionError:
                continue
            alive.append(member)
        return alive

    def _begin_load(self, version: int) -> list[_Member]:
        with self._lock:
            self._is_loading = True
            members = [
                member
                for member in self._members.values()
                if member.description and not (self._only_new and member.version is not None)
            ]
        background = self._swap != "disabled"
        return self._replied(
            members, [member.handle.ask("begin_load", version, background=background) for member in members]
        )

    def _end_load(self, version: int, members: list[_Member], num_sent: int) -> None:
        keywords = {"background": self._swap != "disabled", "waits": self._swap == "generation"}
        try:
            for member, reply in [(m, m.handle.ask("end_load", version, **keywords)) for m in members]:
                try:
                    loaded: Loaded = self._awaited(reply)
                except ConnectionError:
                    continue
                if loaded != Loaded(version, num_sent):
                    raise StageFailed(
                        f"weight sync: an engine acknowledges {loaded.num_tensors} tensors of version "
                        f"{loaded.version}, not {num_sent} of version {version}"
                    )
                with self._lock:
                    member.version, member.moved = version, time.monotonic()
        finally:
            with self._lock:
                self._is_loading = False
                for member in self._members.values():
                    member.moved = time.monotonic()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                with self._lock:
                    self._adopt()
                    for member in list(self._members.values()):
                        self._listen(member)
                    self._hand_out()
                time.sleep(0.005)
        except Exception as error:
            logger.exception("the thread that talks to the engines has ended")
            self._problem = error

    def _adopt(self) -> None:
        """Begin to talk to engines that are new, and forget those that were taken away."""
        present = list(self._handles())
        for handle in present:
            if handle not in self._members:
                member = self._members[handle] = _Member(handle, moved=time.monotonic())
                self._open(member)
        for handle in [handle for handle in self._members if handle not in present]:
            self._put_back(self._members.pop(handle))

    def _open(self, member: _Member) -> None:
        member.description, member.version, member.passes = None, None, 0
        member.moved = time.monotonic()
        member.reply = member.handle.ask("begin", self._session)

    def _put_back(self, member: _Member) -> None:
        """Let others have what a member had in flight, before everything else."""
        self._waiting.extendleft(reversed(member.in_flight))
        member.in_flight = []

    def _listen(self, member: _Member) -> None:
        assert member.reply is not None
        now = time.monotonic()
        if not member.reply.done():
            is_working = member.description is not None and not self._is_loading
            if is_working and member.in_flight and now - member.moved > self._patience:
                logger.warning("an engine did nothing for %.0f s; it is ended and started again", self._patience)
                member.handle.kill()
                member.moved = now
            return
        try:
            found = member.reply.result()
        except ConnectionError as error:
            self.num_restarts, member.num_deaths = self.num_restarts + 1, member.num_deaths + 1
            if member.num_deaths > _MOST_DEATHS:
                raise StageFailed(
                    f"an engine died {member.num_deaths} times and gave nothing: {_one_line(error)}"
                ) from error
            logger.warning("an engine died (%s); its %d groups go to others", _one_line(error), len(member.in_flight))
            self._put_back(member)
            self._open(member)
            return
        if member.description is None:
            member.description, member.moved = found, now
            logger.info("rollout engine %s, process %d, is open", found.name, found.pid)
        else:
            groups, passes = found
            if passes != member.passes or groups or not member.in_flight:
                member.passes, member.moved = passes, now
            elif now - member.moved > self._patience:
                member.handle.kill()
            for group in groups:
                self._deliver(member, group)
        member.reply = member.handle.ask("completed", self._session, _POLL_SECONDS)

    def _deliver(self, member: _Member, group: Group) -> None:
        for i, request in enumerate(member.in_flight):
            if (request.step, request.prompt) == (group.step, group.prompt):
                del member.in_flight[i]
                member.num_deaths = 0
                request.group.set_result(group)
                return

    def _hand_out(self) -> None:
        """Give waiting prompts to the engines that have least to do."""
        ready = [member for member in self._members.values() if member.version is not None]
        while self._waiting and ready:
            member = min(ready, key=lambda member: len(member.in_flight))
            if len(member.in_flight) >= self._most_groups:
                return
            request = self._waiting.popleft()
            if not member.in_flight:
                member.moved = time.monotonic()
            member.in_flight.append(request)
            refused = member.handle.ask("submit", self._session, [request.prompt], request.sampling, request.step)
            refused.add_done_callback(partial(_refuse, request.group))


def _refuse(group: Future[Group], reply: Future[Any]) -> None:
    error = reply.exception()
    if error is not None and not isinstance(error, ConnectionError) and not group.done():
        group.set_exception(error)


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
