"""Micro-batches that are filled up to a token budget instead of a number of rows, planned one epoch at a time.

The rows of an optimizer step are a pure function of seed, step and row lengths, so that a resumed run needs no saved
state (see `order.py`). Each row occurs once per epoch.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np


@dataclass(frozen=True)
class BatchingSettings:
    """Settings for dividing rows into micro-batches up to a token budget."""

    max_tokens: int
    """Maximum number of tokens per micro-batch, padding included; a longer row is alone in its micro-batch."""
    pool_size: int
    """Number of upcoming rows, in training order, among which the next row of a micro-batch is chosen."""
    is_packed: bool
    prefers_closest_length: bool
    """Whether the row whose length is closest to the micro-batch's longest row is chosen if several rows would give the
    micro-batch equally many tokens; False: the first of these rows is chosen."""


def fill_micro_batches(lengths: Sequence[int], row_order: Sequence[int], settings: BatchingSettings) -> list[list[int]]:
    """Divide rows into micro-batches of at most `settings.max_tokens` tokens, and return the numbers of the rows of
    each. `lengths`: number of tokens of each row of the data set; `row_order`: numbers of the rows in training order.
    The candidates for a micro-batch are the first `settings.pool_size` remaining rows. The first candidate starts the
    micro-batch. Then the candidate with which it has the fewest tokens, padding included, is added until none fits."""
    remaining_rows = iter(row_order)
    row_candidates = list(islice(remaining_rows, settings.pool_size))
    micro_batches = []
    while row_candidates:
        micro_batch = [row_candidates.pop(0)]
        while (candidate_index := _select_next_row(lengths, micro_batch, row_candidates, settings)) is not None:
            micro_batch.append(row_candidates.pop(candidate_index))
        micro_batches.append(micro_batch)
        row_candidates += islice(remaining_rows, settings.pool_size - len(row_candidates))
    return micro_batches


def _select_next_row(
    row_lengths: Sequence[int], micro_batch: list[int], candidate_rows: list[int], settings: BatchingSettings
) -> int | None:
    micro_batch_lengths = [row_lengths[row_index] for row_index in micro_batch]
    max_length, sum_of_lengths = max(micro_batch_lengths), sum(micro_batch_lengths)
    fitting_row_candidates = []
    for candidate_index, row_index in enumerate(candidate_rows):
        length = row_lengths[row_index]
        num_tokens = sum_of_lengths + length if settings.is_packed else max(max_length, length) * (len(micro_batch) + 1)
        if num_tokens <= settings.max_tokens:
            length_difference = abs(max_length - length) if settings.prefers_closest_length else 0
            fitting_row_candidates.append((num_tokens, length_difference, candidate_index))
    return min(fitting_row_candidates)[2] if fitting_row_candidates else None


class BalancedBatchPlan:
    """Plan of the micro-batches of each optimizer step. Each step has the same number of micro-batches, except that
    the last step of an epoch can have fewer."""

    def __init__(
        self,
        row_lengths: np.ndarray,
        epoch_order_fn: Callable[[int], np.ndarray],
        settings: BatchingSettings,
        *,
        micro_batches_per_step: int,
        num_epochs: int,
        max_steps: int,
    ) -> None:
        """Plan the micro-batches of `num_epochs` epochs, for at most `max_steps` optimizer steps. `row_lengths`: number
        of tokens of each row. `epoch_order_fn(epoch)` returns the row numbers of an epoch in training order."""
        self._row_lengths: list[int] = row_lengths.tolist()
        self._epoch_order_fn, self._settings = epoch_order_fn, settings
        self._micro_batches_per_step = micro_batches_per_step
        self._last_planned_epoch: tuple[int, list[list[int]]] = (-1, [])
        self._epoch_start_steps = [0]
        """Number of the first optimizer step of each epoch, and as last element the number of the step after the last
        planned epoch."""
        for epoch in range(num_epochs):
            num_steps_in_epoch = -(-len(self._plan_micro_batches(epoch)) // micro_batches_per_step)
            self._epoch_start_steps.append(self._epoch_start_steps[-1] + num_steps_in_epoch)
            if self._epoch_start_steps[-1] >= max_steps:
                break
        self.steps_per_epoch = self._epoch_start_steps[1]
        """Number of optimizer steps in the first epoch. A later epoch can have another number of steps, because its
        order of rows can give another number of micro-batches."""
        self.total_steps = min(self._epoch_start_steps[-1], max_steps)

    def micro_batches(self, step: int) -> list[list[int]]:
        """Return the row numbers of each micro-batch of step `step`, counted from 0 over all epochs."""
        epoch = bisect_right(self._epoch_start_steps, step) - 1
        first_micro_batch = (step - self._epoch_start_steps[epoch]) * self._micro_batches_per_step
        return self._plan_micro_batches(epoch)[first_micro_batch : first_micro_batch + self._micro_batches_per_step]

    def num_epochs_done(self, step: int) -> float:
        """Return the number of epochs completed after step `step`, including the fraction of the current one."""
        epoch = bisect_right(self._epoch_start_steps, step) - 1
        epoch_start_step, next_epoch_start_step = self._epoch_start_steps[epoch : epoch + 2]
        return epoch + (step + 1 - epoch_start_step) / (next_epoch_start_step - epoch_start_step)

    def _plan_micro_batches(self, epoch: int) -> list[list[int]]:
        if self._last_planned_epoch[0] != epoch:
            row_order = self._epoch_order_fn(epoch).tolist()
            self._last_planned_epoch = epoch, fill_micro_batches(self._row_lengths, row_order, self._settings)
        return self._last_planned_epoch[1]
