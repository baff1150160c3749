"""Which rows a step trains on: a pure function of seed and step, so that a resumed run needs no saved iterator.

An iterator with state has to be saved, restored and kept in step with the weights; a function of the step number
cannot get out of step. Nothing here reads data.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.errors import DataError

_WORD = 2**64


def shuffled(num_rows: int, *seeds: int) -> np.ndarray:
    """Return a permutation of `range(num_rows)`, int64, that depends only on the seeds and not on the NumPy version."""
    # Sort raw random numbers instead of Generator.permutation, since NumPy versions share only the raw stream.
    draws = np.random.PCG64(np.random.SeedSequence([seed % _WORD for seed in seeds])).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)


@lru_cache(maxsize=4)  # a train step may span two epochs, of prompts and of supervised rows
def epoch_order(seed: int, epoch: int, num_rows: int, shuffle: bool) -> np.ndarray:
    """Return the row numbers of one epoch in training order: int64, read-only, each of `range(num_rows)` once."""
    order = shuffled(num_rows, seed, epoch) if shuffle else np.arange(num_rows, dtype=np.int64)
    order.flags.writeable = False
    return order


def batches_per_epoch(batch_size: int, num_rows: int, drop_last: bool = True) -> int:
    """Return the number of optimizer steps in one pass over the rows.

    With `drop_last` the rows that do not fill a batch are left out of the epoch.

    Raises:
        DataError: the rows do not fill one batch.
    """
    if num_rows < (batch_size if drop_last else 1):
        raise DataError(
            f"the data set has {num_rows} rows, fewer than one batch of {batch_size}; "
            "lower train.train_batch_per_replica or give more rows"
        )
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def left_over(train: TrainConfig, size: int, num_rows: int) -> str:
    """Return a notice about rows at the end of an epoch that do not fill a batch of `size`; empty if all rows do.

    Raises:
        DataError: the rows do not fill one step.
    """
    if train.train_policy.balances_tokens or size < 1:
        return ""
    batches_per_epoch(size, num_rows, train.train_policy.drops_last)
    count = num_rows % size if train.train_policy.drops_last else 0
    if not count or (train.max_num_steps or math.inf) * size <= num_rows - count:
        return ""
    which = "others in each epoch" if train.train_policy.dataloader_shuffle and train.epoch > 1 else "the same ones"
    remedy = "lower train.train_batch_per_replica" if train.train_policy.has_rollouts else (
        "train.train_policy.dataloader_drop_last = false learns them in a smaller batch"
    )  # fmt: skip
    return f"{count:,} of {num_rows:,} rows fill no batch of {size} and are left out of an epoch ({which}); {remedy}"


def batch_positions(
    seed: int, step: int, batch_size: int, num_rows: int, shuffle: bool, drop_last: bool = True
) -> np.ndarray:
    """Return the `batch_size` row numbers (int64) of optimizer step `step`, counted from 0 over all epochs.

    Without `drop_last` the last batch of an epoch may be smaller.

    Raises:
        DataError: the rows do not fill one batch.
    """
    epoch, position = divmod(step, batches_per_epoch(batch_size, num_rows, drop_last))
    order = epoch_order(seed, epoch, num_rows, shuffle)
    return order[position * batch_size : (position + 1) * batch_size]
