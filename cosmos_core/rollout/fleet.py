"""Several rollout engines in processes of their own, as one: they generate while the ranks train.

The first rank alone talks to the engines (`members`). The others take part in what all ranks do together: gathering
weights, and waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple

import torch

from cosmos_core.errors import BY_NAME, CosmosError, StageFailed, by_name
from cosmos_core.parallel.mesh import broadcast_object, is_first
from cosmos_core.rollout.base import Bucket, Loaded, WeightFormat
from cosmos_core.rollout.members import POLL_SECONDS, Handle, Member, Members
from cosmos_core.rollout.replica import Description, packed
from cosmos_core.types import Group, Prompt, Sampling

logger = logging.getLogger(__name__)


class _Process(NamedTuple):
    """The process of a member that a load began with."""

    member: Member
    description: Description | None

    @property
    def is_alive(self) -> bool:
        """Return whether no other has taken its place."""
        return self.member.description is self.description


class _Reply(NamedTuple):
    process: _Process
    value: Any


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
        self._swap, self._takes_turns, self._beat = swap, takes_turns, beat
        self._members = Members(handles, most_groups, patience, beat)
        self._own: list[tuple[Prompt, Future[Group]]] = []
        self._only_new = False
        self.has_new = False
        """Whether the newest weights were the first of an engine."""
        self.slept = 0
        """1: engines that take turns with the trainer have slept since the last load."""
        self.version = -1
        """Of the oldest weights that an engine with any has."""
        self.resync: Callable[[], object] = lambda: None
        """Sends the weights that were sent last to the engines that have none; called on all ranks together."""
        if is_first():
            self._members.start()
        name, self.weight_format, failed = broadcast_object(self._first_description() if is_first() else None)  # type: ignore[misc]
        self._raise(failed)
        self.name = f"{name}, in processes of their own"

    def request(
        self, prompt: Prompt, sampling: Sampling, step: int, *, is_urgent: bool = False, version: int | None = None
    ) -> Future[Group]:
        """Ask for one group, before all others or behind them; on the first rank, from any thread. `version`: see
        `Members.request`; whoever asks for one loads no other before it is there."""
        return self._members.request(prompt, sampling, step, is_urgent=is_urgent, version=version)

    @property
    def is_stale(self) -> bool:
        """Return whether an engine waits for weights, so that it can be given prompts."""
        return any(member.version is None for member in self._members.opened())

    @property
    def num_restarts(self) -> int:
        """Return how many engines died or hung since the start."""
        return self._members.num_restarts

    def check(self) -> None:
        """Raise what ended the thread that talks to the engines, if anything did."""
        self._members.check()

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
        """See `Engine.completed`: all that were submitted, so that ranks wait for each other once. An engine that dies
        meanwhile gets the weights again."""
        while True:  # ranks meet at each look: none waits for another longer than a collective may take
            groups, failed, is_stale = broadcast_object(self._own_done() if is_first() else None)  # type: ignore[misc]
            self._raise(failed)
            if groups is not None:
                return groups
            if is_stale:
                self.resync()

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        """See `Engine.load_weights`: every engine that is open takes them. One that dies meanwhile is left out."""
        self._leave_memory()
        num_sent, loads = 0, self._begin_load(version) if is_first() else []
        has_new = any(process.member.version is None for process in loads)
        for bucket in buckets:
            num_sent += len(bucket)
            if loads:
                value = loads[0].member.handle.put(packed(bucket))
                loads = [reply.process for reply in self._ask(loads, "bucket", shared=value)]
        if is_first():
            self._end_load(version, loads, num_sent)
        versions = [member.version for member in self._members.ready() if member.version is not None]
        self.version, self.has_new = broadcast_object((min(versions, default=version), has_new))
        self.slept = 0
        return Loaded(version, num_sent)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.logprobs`: of one engine."""
        return next(iter(self.all_logprobs(token_ids)))

    def all_logprobs(self, token_ids: Sequence[int], version: int | None = None) -> list[list[float]]:
        """Return the log-probabilities by each engine that has weights, which may be none; `version`: these weights."""
        found: list[list[float]] = []
        if is_first():
            asked = [member for member in self._members.ready() if version in {None, member.version}]
            replies = [member.handle.ask("logprobs", member.version, token_ids) for member in asked]
            self._members.await_all(list(zip(asked, replies, strict=True)))
            for reply in replies:
                with suppress(ConnectionError):  # the thread that talks to it sees that too
                    found.append(reply.result())
        return broadcast_object(found)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `Engine.sleep`; engines that generate while others train stay awake."""
        self.slept = max(self.slept, int(self._takes_turns))
        self._tell_all("sleep")

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._leave_memory()
        self._tell_all("wake")

    def _leave_memory(self) -> None:
        """Give back what torch has cached of GPUs that the engines share."""
        if self._takes_turns:
            torch.cuda.empty_cache()

    def close(self) -> None:
        """See `Engine.close`; the processes are left to who started them."""
        self._members.is_closed = True

    def _raise(self, failed: tuple[str, str] | None) -> None:
        """Raise on all ranks what the first one met, there as it was."""
        if failed is not None:
            self.check()
            name, message = failed
            raise BY_NAME[name](message)

    # What follows runs on the first rank.

    def _own_done(self) -> tuple[list[Group] | None, tuple[str, str] | None, bool]:
        """Return the groups that were submitted, None while some are not there; or what went wrong; and whether an
        engine waits for weights."""
        try:
            wait([reply for _, reply in self._own], POLL_SECONDS, FIRST_EXCEPTION)
            self._members.check()
            self._beat()
            done = [reply for _, reply in self._own if reply.done()]
            groups = [reply.result() for reply in done]
            if len(done) < len(self._own):
                return None, None, self.is_stale
        except Exception as error:
            if not isinstance(error, CosmosError):
                logger.exception("an engine refused what it was asked")
            self._own = []
            return [], by_name(error), False
        self._own = []
        return groups, None, False

    def _tell_all(self, method: str) -> None:
        if not (self._takes_turns and is_first()):
            return
        self._ask([_Process(member, member.description) for member in self._members.ready()], method)

    def _first_description(self) -> tuple[str, WeightFormat, tuple[str, str] | None]:
        """Return name and format of the first engine that is open; or what went wrong."""
        try:
            while not (opened := self._members.opened()):
                self._beat()
                self.check()
                time.sleep(0.05)
        except Exception as error:  # noqa: BLE001 - all ranks have to hear of it
            return "", "checkpoint", by_name(error)
        assert opened[0].description is not None
        return opened[0].description.name, opened[0].description.weight_format, None

    def _ask(self, processes: Sequence[_Process], method: str, *arguments: Any, **keywords: Any) -> list[_Reply]:
        """Return the replies of those that are alive; those that died are left to the thread that talks to them."""
        asked = [(process, process.member.handle.ask(method, *arguments, **keywords)) for process in processes]
        self._members.await_all([(process.member, reply) for process, reply in asked])
        replies = []
        for process, reply in asked:
            try:
                replies.append(_Reply(process, reply.result()))
            except ConnectionError as error:
                self._members.lose(*process, error)
        return replies

    def _begin_load(self, version: int) -> list[_Process]:
        self._members.is_loading = True
        members = [m for m in self._members.opened() if m.version is None or not self._only_new]
        processes = [_Process(member, member.description) for member in members]
        keywords = {"background": self._swap != "disabled", "patience": self._members.patience}
        return [reply.process for reply in self._ask(processes, "begin_load", version, **keywords)]

    def _end_load(self, version: int, processes: Sequence[_Process], num_sent: int) -> None:
        keywords = {"background": self._swap != "disabled", "waits": self._swap == "generation"}
        try:
            for process, loaded in self._ask(processes, "end_load", version, **keywords):
                if loaded != Loaded(version, num_sent):
                    raise StageFailed(
                        f"weight sync: an engine acknowledges {loaded.num_tensors} tensors of version "
                        f"{loaded.version}, not {num_sent} of version {version}"
                    )
                with self._members.lock:
                    if process.is_alive:
                        process.member.version, process.member.moved = version, time.monotonic()
        finally:
            with self._members.lock:
                self._members.is_loading = False
                for member in self._members.known.values():
                    member.moved = time.monotonic()
