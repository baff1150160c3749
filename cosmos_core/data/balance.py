"""Micro-batches that are filled up to a token budget instead of a number of rows, planned one epoch at a time.

As in `order.py`, the rows of a step are a pure function of seed, step and row lengths. Each row occurs once per epoch.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np


@dataclass(frozen=True)
class Budget:
    """Rules for filling a micro-batch with rows."""

    max_tokens: int
    """Maximum number of tokens of a micro-batch, with padding unless packed; a longer row is a separate micro-batch."""
    pool_size: int
    """Number of upcoming rows, in training order, among which the next row of a micro-batch is chosen."""
    is_packed: bool
    prefers_closest: bool
    """Whether, of several rows that fit equally well, the row closest in length to the longest row of the micro-batch
    is chosen; False: the first row."""


def fill_batches(lengths: Sequence[int], order: Sequence[int], budget: Budget) -> list[list[int]]:
    """Divide the rows of `order` into micro-batches, each row once. A micro-batch starts with the first row of the
    pool. While rows fit into the token budget, the row is added that leaves the micro-batch with the fewest tokens."""
    waiting = iter(order)
    pool = list(islice(waiting, budget.pool_size))
    batches = []
    while pool:
        batch = [pool.pop(0)]
        while (position := _next_position(lengths, batch, pool, budget)) is not None:
            batch.append(pool.pop(position))
        batches.append(batch)
        pool += islice(waiting, budget.pool_size - len(pool))
    return batches


def _next_position(lengths: Sequence[int], batch: list[int], pool: list[int], budget: Budget) -> int | None:
    longest, total = max(lengths[row] for row in batch), sum(lengths[row] for row in batch)
    best: tuple[int, int, int] | None = None
    for position, row in enumerate(pool):
        length = lengths[row]
        cost = total + length if budget.is_packed else max(longest, length) * (len(batch) + 1)
        candidate = (cost, abs(longest - length) if budget.prefers_closest else 0, position)
        if cost <= budget.max_tokens and (best is None or candidate < best):
            best = candidate
    return None if best is None else best[2]


class BalancedStepPlan:
    """Plan of the micro-batches of each optimizer step; the last step of an epoch may have fewer micro-batches."""

    def __init__(
        self,
        lengths: np.ndarray,
        order_of: Callable[[int], np.ndarray],
        budget: Budget,
        *,
        batches_per_step: int,
        num_epochs: int,
        max_steps: int,
    ) -> None:
        """Plan at most `max_steps` steps; `order_of(epoch)` returns the row numbers of an epoch in training order."""
        self._lengths: list[int] = lengths.tolist()
        self._order_of, self._budget, self._batches_per_step = order_of, budget, batches_per_step
        self._newest_step: tuple[int, list[list[int]]] = (-1, [])
        self._first_positions = [0]
        """Number of the first step of each epoch, and of the step after the last epoch."""
        for epoch in range(num_epochs):
            self._first_positions.append(self._first_positions[-1] + -(-len(self._batches(epoch)) // batches_per_step))
            if self._first_positions[-1] >= max_steps:
                break
        self.steps_per_epoch = self._first_positions[1]
        """Number of steps in the first epoch; the order of a later epoch can give another number of micro-batches."""
        self.total_steps = min(self._first_positions[-1], max_steps)

    def micro_batches(self, step: int) -> list[list[int]]:
        """Return the row numbers of each micro-batch of step `step`, counted from 0 over all epochs."""
        epoch = bisect_right(self._first_positions, step) - 1
        first = (step - self._first_positions[epoch]) * self._batches_per_step
        return self._batches(epoch)[first : first + self._batches_per_step]

    def epochs_done(self, step: int) -> float:
        """Return the number of epochs completed after step `step`, including the fraction of the current one."""
        epoch = bisect_right(self._first_positions, step) - 1
        start, end = self._first_positions[epoch : epoch + 2]
        return epoch + (step + 1 - start) / (end - start)

    def _batches(self, epoch: int) -> list[list[int]]:
        if self._newest_step[0] != epoch:
            self._newest_step = (epoch, fill_batches(self._lengths, self._order_of(epoch).tolist(), self._budget))
        return self._newest_step[1]
