"""Order of the training rows: a pure function of seed and step, so that a resumed run needs no saved iterator.

An iterator would have a state to save with the weights. No function of this module reads data.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import DataError

_SEED_MODULUS = 2**64


def shuffled_indices(num_rows: int, *seeds: int) -> np.ndarray:
    """Return a permutation of `range(num_rows)`, int64, that depends only on the seeds and not on the NumPy version."""
    # Do not use Generator.permutation: only the raw random numbers are the same in all versions of NumPy.
    bit_generator = np.random.PCG64(np.random.SeedSequence([seed % _SEED_MODULUS for seed in seeds]))
    return np.argsort(bit_generator.random_raw(num_rows), kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Mixture:
    """Rows of several data sets, one data set after the other, that are mixed by weight."""

    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of rows of each data set."""
    weights: tuple[float, ...]

    def get_source_label(self, row: int) -> str:
        """Return the name of the data set that has the row with number `row`."""
        return self.labels[bisect_right(list(accumulate(self.sizes)), row)]

    def epoch_order(self, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
        """Return the row numbers of one epoch, which has as many rows as the data sets have together.

        The weights of the data sets divide these rows, and the rows of each data set are spread evenly over the epoch.
        A data set that gets fewer rows than it has continues in the next epoch with its other rows; one that gets more
        begins another pass over its rows, in a new order.
        """
        rows_by_pass, fractional_positions, row_offset = [], [], 0
        epoch_rows_by_source = divide_in_proportion(sum(self.sizes), self.weights)
        for source_index, (size, rows_per_epoch) in enumerate(zip(self.sizes, epoch_rows_by_source, strict=True)):
            epoch_positions = np.arange(rows_per_epoch, dtype=np.int64)
            pass_number_by_position, positions_in_pass = np.divmod(epoch_positions + epoch * rows_per_epoch, size)
            for pass_number in np.unique(pass_number_by_position).tolist():
                pass_order = shuffled_indices(size, seed, pass_number, source_index) if shuffle else np.arange(size)
                rows_by_pass.append(row_offset + pass_order[positions_in_pass[pass_number_by_position == pass_number]])
            fractional_positions.append((epoch_positions + 0.5) / max(1, rows_per_epoch))
            row_offset += size
        return np.concatenate(rows_by_pass)[np.argsort(np.concatenate(fractional_positions), kind="stable")]


def divide_in_proportion(total_size: int, weights: Sequence[float]) -> list[int]:
    """Return integers whose sum is `total_size`, in proportion to `weights`: exact shares are rounded down, and those
    with the largest remainders are rounded up."""
    exact_shares = [total_size * weight / sum(weights) for weight in weights]
    rounded_shares = [int(exact_size) for exact_size in exact_shares]
    indices_by_rounding_error = sorted(range(len(exact_shares)), key=lambda i: (rounded_shares[i] - exact_shares[i], i))
    for i in indices_by_rounding_error[: total_size - sum(rounded_shares)]:
        rounded_shares[i] += 1
    return rounded_shares


def mixture_or_num_rows(rows: Any) -> int | Mixture:
    """Return the mixture of prepared rows, or the number of rows if all rows are from one data set."""
    return getattr(rows, "mixture", None) or len(rows)


@lru_cache(maxsize=4)  # called for every row, so keep the order of two epochs of prompts and two of supervised rows
def epoch_order(seed: int, epoch: int, rows: int | Mixture, shuffle: bool) -> np.ndarray:
    """Return the row numbers of one epoch in training order, int64, read-only (see `Mixture.epoch_order`)."""
    if isinstance(rows, Mixture):
        row_order = rows.epoch_order(seed, epoch, shuffle)
    else:
        row_order = shuffled_indices(rows, seed, epoch) if shuffle else np.arange(rows, dtype=np.int64)
    row_order.flags.writeable = False
    return row_order


def batches_per_epoch(batch_size: int, num_rows: int, drop_last: bool = True) -> int:
    """Return the number of optimizer steps in one pass over the rows; with `drop_last` the rows that do not fill a
    batch are left out of the epoch. Raise DataError if this number would be 0."""
    if num_rows < (batch_size if drop_last else 1):
        remedy = "lower train.train_batch_per_replica or give more rows"
        raise DataError(f"the data set has {num_rows} rows, fewer than one batch of {batch_size}; {remedy}")
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def unused_rows_notice(train_config: TrainConfig, batch_size: int, num_rows: int) -> str:
    """Return a notice about the rows at the end of an epoch that fill no batch and are left out; empty if there are
    none. Raise DataError if the rows fill no batch at all."""
    algorithm = train_config.train_policy
    if algorithm.has_token_based_batches or batch_size < 1:
        return ""
    batches_per_epoch(batch_size, num_rows, algorithm.drops_last_rows)
    num_unused_rows = num_rows % batch_size if algorithm.drops_last_rows else 0
    if not num_unused_rows or (train_config.max_num_steps or math.inf) * batch_size <= num_rows - num_unused_rows:
        return ""
    is_reshuffled_each_epoch = algorithm.dataloader_shuffle and train_config.epoch > 1
    which_rows_text = "others in each epoch" if is_reshuffled_each_epoch else "the same ones"
    remedy = "lower train.train_batch_per_replica"
    if not algorithm.has_rollouts:
        remedy = "train.train_policy.dataloader_drop_last = false learns them in a smaller batch"
    return (
        f"{num_unused_rows:,} of {num_rows:,} rows fill no batch of {batch_size} and are left out of an epoch "
        f"({which_rows_text}); {remedy}"
    )


def batch_row_numbers(
    seed: int, step: int, batch_size: int, rows: int | Mixture, shuffle: bool, drop_last: bool = True
) -> np.ndarray:
    """Return the `batch_size` row numbers (int64) of optimizer step `step`, counted from 0 over all epochs. Without
    `drop_last`, the last batch of an epoch has the remaining rows. Raise DataError if the rows do not fill one
    batch."""
    num_rows = sum(rows.sizes) if isinstance(rows, Mixture) else rows
    epoch, batch_index_in_epoch = divmod(step, batches_per_epoch(batch_size, num_rows, drop_last))
    epoch_rows = epoch_order(seed, epoch, rows, shuffle)
    return epoch_rows[batch_index_in_epoch * batch_size : (batch_index_in_epoch + 1) * batch_size]


def rows_at_positions(seed: int, positions: Sequence[int], rows: int | Mixture, shuffle: bool) -> list[int]:
    """Return the row numbers at `positions`, which count all rows of all epochs, in training order, from 0."""
    num_rows = sum(rows.sizes) if isinstance(rows, Mixture) else rows
    return [int(epoch_order(seed, position // num_rows, rows, shuffle)[position % num_rows]) for position in positions]
