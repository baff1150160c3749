"""Rollouts on several ranks: each has an engine for some of the prompts, and all ranks get all groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from cosmos_core.parallel.mesh import all_gather_object, num_ranks, rank_number
from cosmos_core.rollout.base import Bucket, Engine, Loaded
from cosmos_core.types import Group, Prompt, Sampling


class DataParallel:
    """An `Engine` whose methods all ranks call together, with the same prompts and the same weights."""

    def __init__(self, own: Engine) -> None:
        self._own = own
        self.name, self.weight_format, self.ranks_per_engine = own.name, own.weight_format, own.ranks_per_engine

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """See `Engine.submit`; which rank completes a prompt does not change its random numbers."""
        num_engines = num_ranks() // self.ranks_per_engine
        own = prompts[rank_number() // self.ranks_per_engine :: num_engines]
        if own:
            self._own.submit(own, sampling, step)

    def completed(self) -> list[Group]:
        """See `Engine.completed`; each rank drains its engine first, so that all exchange groups only once."""
        own: list[Group] = []
        while groups := self._own.completed():
            own += groups
        return [group for groups in all_gather_object(own)[:: self.ranks_per_engine] for group in groups]

    def load_weights(self, version: int, buckets: Iterable[Bucket]) -> Loaded:
        """See `Engine.load_weights`."""
        return self._own.load_weights(version, buckets)

    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Engine.logprobs`."""
        return self._own.logprobs(token_ids)

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """See `Engine.sleep`."""
        self._own.sleep(level)

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._own.wake()

    def close(self) -> None:
        """See `Engine.close`."""
        self._own.close()
