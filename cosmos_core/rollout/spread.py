"""Rollouts on several ranks: each has an engine of its own for a share of the prompts, and all get all answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from cosmos_core.parallel.mesh import all_gather_object, num_ranks, rank_number
from cosmos_core.rollout.base import Engine
from cosmos_core.types import Group, Prompt, Sampling


class SpreadEngine:
    """An `Engine` whose methods all ranks call together, with the same prompts and the same weights."""

    def __init__(self, own: Engine, ranks_each: int = 1) -> None:
        """`own` is this rank's; `ranks_each` neighbours have one together, and ask it for the same."""
        self._own, self.name, self._ranks_each = own, own.name, ranks_each

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> list[Group]:
        """See `Engine.generate`; which rank answers a prompt does not change its random numbers."""
        size = num_ranks() // self._ranks_each
        share = prompts[rank_number() // self._ranks_each :: size]
        parts = all_gather_object(self._own.generate(share, sampling, step) if share else [])[:: self._ranks_each]
        return [parts[i % size][i // size] for i in range(len(prompts))]

    def load_weights(self, version: int, weights: Iterable[tuple[str, Tensor]]) -> str:
        """See `Engine.load_weights`."""
        return self._own.load_weights(version, weights)

    def sleep(self) -> None:
        """See `Engine.sleep`."""
        self._own.sleep()

    def wake(self) -> None:
        """See `Engine.wake`."""
        self._own.wake()

    def close(self) -> None:
        """See `Engine.close`."""
        self._own.close()
