"""Data-parallel rollouts: each rank's engine completes some of the prompts, and all ranks get all groups."""

from collections.abc import Sequence

from cosmos_core.parallel.mesh import all_gather_object, num_ranks, rank_number
from cosmos_core.rollout.base import EngineWrapper
from cosmos_core.types import Group, Prompt, Sampling


class DataParallel(EngineWrapper):
    """`Engine` whose methods all ranks call together, with the same prompts and the same weights."""

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        """Submit this rank's share of the prompts to its engine, with unchanged seeds; see `Engine.submit`."""
        num_engines = num_ranks() // self.ranks_per_engine
        local_prompts = prompts[rank_number() // self.ranks_per_engine :: num_engines]
        if local_prompts:
            self._inner.submit(local_prompts, sampling, step)

    def completed(self) -> list[Group]:
        """Wait for all groups of this rank's engine, then gather the groups of all ranks; see `Engine.completed`."""
        local_groups: list[Group] = []
        while groups := self._inner.completed():
            local_groups += groups
        return [group for groups in all_gather_object(local_groups)[:: self.ranks_per_engine] for group in groups]
