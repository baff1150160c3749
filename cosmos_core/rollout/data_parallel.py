"""Rollouts on several ranks: each has an engine for some of the prompts, and all ranks get all groups."""

from __future__ import annotations

from collections.abc import Sequence

from cosmos_core.parallel.mesh import all_gather_object, num_ranks, rank_number
from cosmos_core.rollout.base import Around
from cosmos_core.types import Group, Prompt, Sampling


class DataParallel(Around):
    """An `Engine` whose methods all ranks call together, with the same prompts and the same weights."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """See `Engine.submit`; which rank completes a prompt does not change its random numbers."""
        num_engines = num_ranks() // self.ranks_per_engine
        own = prompts[rank_number() // self.ranks_per_engine :: num_engines]
        if own:
            self._inner.submit(own, sampling, step)

    def completed(self) -> list[Group]:
        """See `Engine.completed`; each rank drains its engine first, so that all exchange groups only once."""
        own: list[Group] = []
        while groups := self._inner.completed():
            own += groups
        return [group for groups in all_gather_object(own)[:: self.ranks_per_engine] for group in groups]
