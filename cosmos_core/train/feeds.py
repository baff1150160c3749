"""Sources of samples for a train step: rows of a dataset, or rollouts scored by rewards.

The samples of a step are a pure function of seed and step and, for rollouts, of the weights and of the state of the
source that generates them, so a resumed run continues with the same samples.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_core.algorithms.base import Update
from cosmos_core.algorithms.data_term import make_sft_update
from cosmos_core.config.schema.data_term import DataTermConfig
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.balance import BalancedBatchPlan, BatchingSettings
from cosmos_core.data.kinds.base import PreparedRows
from cosmos_core.data.order import (
    batch_row_numbers,
    batches_per_epoch,
    epoch_order,
    mixture_or_num_rows,
    rows_at_positions,
    unused_rows_notice,
)
from cosmos_core.data.sample import batch_within_token_limit
from cosmos_core.errors import DataError

DATA_TERM_SEED_OFFSET = 0x64617461
"""Offset added to the run's seed for a supervised loss that is added to an RL loss, so that the rows of the supervised
loss are drawn with other random numbers than the prompts."""


class SampleFeed:
    """Source of the samples of consecutive train steps; subclasses implement `samples`."""

    total_steps: int
    """Number of train steps until the data ends. It is a maximum for rollouts: if groups of completions are dropped,
    the prompts can end earlier."""
    steps_per_epoch: int
    unused_rows_notice = ""
    """Message about rows that no step of an epoch trains on; empty if all rows are used."""
    step = 0
    """Number of the next train step, counted from 0."""

    def find_max_sample_tokens(self) -> int | None:
        """Return the maximum number of tokens of a sample; None: unknown, or all samples have equally many."""
        return None

    def next_samples(self) -> tuple[list[Any], dict[str, float]] | None:
        """Return the samples of the next train step and their metrics; None if the data has ended."""
        if self.step >= self.total_steps:
            return None
        samples_and_metrics = self.samples(self.step)
        self.step += 1
        return samples_and_metrics

    def samples(self, step: int) -> tuple[list[Any], dict[str, float]]:
        """Return the samples of train step `step`, counted from 0, and their metrics."""
        raise NotImplementedError(type(self).__name__)

    def write_pass_rates(self, stage_folder: Path) -> None:
        """Write the pass rates of prompts to `stage_folder` after training; do nothing if the feed has no rollouts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the feed's state for a checkpoint, as JSON values and tensors. This class saves only the next step."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the feed's state, which `state_dict` returned."""
        self.step = int(state["step"])


def total_steps(train: TrainConfig, group_size: int, num_rows: int) -> int:
    """Return the number of train steps of all epochs, at most `max_num_steps`; raise DataError if it is 0.
    `group_size`: number of samples per row, which is the number of completions of a prompt, or 1 without rollouts."""
    if train.train_batch_per_replica % group_size:  # a step may span two epochs, so round up the sum over all epochs
        num_steps = -(-train.epoch * num_rows * group_size // train.train_batch_per_replica)
    else:
        batch_size, drops_last_rows = rows_per_step(train, group_size), train.train_policy.drops_last_rows
        num_steps = train.epoch * batches_per_epoch(batch_size, num_rows, drops_last_rows)
    return min(num_steps, train.max_num_steps or num_steps)


def rows_per_step(train: TrainConfig, group_size: int) -> int:
    """Return the number of rows that a train step reads; in RL, the number of prompts, rounded up."""
    return -(-train.train_batch_per_replica // group_size)


def unused_rows_message(train: TrainConfig, group_size: int, num_rows: int) -> str:
    """Return a message if an epoch has rows that no step uses, else ""; raise DataError if the rows fill no step.
    `group_size`: number of samples per row."""
    splits_groups = train.train_batch_per_replica % group_size != 0
    unused_rows_text = unused_rows_notice(train, 1 if splits_groups else rows_per_step(train, group_size), num_rows)
    # With dynamic sampling no prompt is left over, because a train step may use prompts of two epochs.
    return unused_rows_text if train.train_policy.dynamic_sampling is None else ""


def plan_balanced_steps(rows: PreparedRows, train_config: TrainConfig, max_length: int) -> BalancedBatchPlan | None:
    """Return the plan of the micro-batches of all train steps if micro-batches are filled up to a token budget; None if
    each step has a fixed number of rows. `max_length`: maximum number of tokens of a sequence."""
    policy = train_config.train_policy
    if not policy.has_token_based_batches:
        return None
    # The schema requires `max_num_steps` if batches are filled by tokens.
    assert isinstance(policy, SupervisedConfig) and train_config.max_num_steps is not None
    # If `sequence_packing` is None (the model decides), plan for padding, which needs at least as many tokens.
    is_packed = bool(train_config.sequence_packing)
    return BalancedBatchPlan(
        rows.token_counts(is_packed=is_packed),
        lambda epoch: epoch_order(train_config.order_seed, epoch, mixture_or_num_rows(rows), policy.dataloader_shuffle),
        BatchingSettings(
            micro_batch_tokens(train_config, max_length),
            policy.load_balanced_pool_size,
            is_packed=is_packed,
            prefers_closest_length=policy.load_balanced_batching_strategy == "prefer_closest",
        ),
        micro_batches_per_step=policy.load_balanced_batches_per_optimizer_step,
        num_epochs=train_config.epoch,
        max_steps=train_config.max_num_steps,
    )


def micro_batch_tokens(train: TrainConfig, max_length: int) -> int:
    """Return the maximum number of tokens of a micro-batch. `max_length`: maximum number of tokens of a sequence."""
    algorithm_config = train.train_policy
    assert isinstance(algorithm_config, SupervisedConfig)
    max_padded_tokens = train.rows_per_pass * algorithm_config.num_sequences_per_row * max_length
    return algorithm_config.load_balanced_max_tokens_for_batch or max_padded_tokens


class RowFeed(SampleFeed):
    """Source of training samples from prepared rows, in an order that is a pure function of seed, epoch and position.
    Rows that take long to read are read one step in advance, in a thread."""

    def __init__(self, rows: PreparedRows, train: TrainConfig, max_length: int, num_dp_ranks: int) -> None:
        """Build the feed; `max_length`: maximum number of tokens of a sequence, `num_dp_ranks`: number of data-parallel
        ranks, each of which gets a micro-batch."""
        self._rows, self._train_config, self._num_dp_ranks = rows, train, num_dp_ranks
        self._batch_size = train.train_batch_per_replica
        self._prefetch_executor = ThreadPoolExecutor(1, "row-feed") if rows.is_prefetched else None
        self._prefetched_step_and_samples: tuple[int, Future[list[Any]]] | None = None
        self._balanced_plan = plan_balanced_steps(rows, train, max_length)
        self.rows_per_pass = train.rows_per_pass
        """Number of rows that the feed puts into a micro-batch."""
        if plan := self._balanced_plan:
            self.steps_per_epoch, self.total_steps = plan.steps_per_epoch, plan.total_steps
            return
        self.unused_rows_notice = unused_rows_message(train, 1, len(rows))
        self.steps_per_epoch = batches_per_epoch(self._batch_size, len(rows), train.train_policy.drops_last_rows)
        self.total_steps = total_steps(train, 1, len(rows))

    def find_max_sample_tokens(self) -> int | None:
        try:
            token_counts = self._rows.token_counts(is_packed=False)
        except NotImplementedError:  # rows of images or videos have no token counts
            return None
        return int(token_counts.max(initial=0)) // self._train_config.train_policy.num_sequences_per_row

    @property
    def trained_row_numbers(self) -> np.ndarray:
        """Return the sorted numbers of the rows that at least one train step of the training uses."""
        steps = range(self.total_steps)
        return np.unique([i for step in steps for batch in self.micro_batches(step).values() for i in batch])

    def samples(self, step: int) -> tuple[list[Any], dict[str, float]]:
        prefetched, self._prefetched_step_and_samples = self._prefetched_step_and_samples, None
        samples = prefetched[1].result() if prefetched and prefetched[0] == step else self._read_samples(step)
        if self._prefetch_executor and step + 1 != self.total_steps:
            self._prefetched_step_and_samples = step + 1, self._prefetch_executor.submit(self._read_samples, step + 1)
        epoch = self._balanced_plan.num_epochs_done(step) if self._balanced_plan else (step + 1) / self.steps_per_epoch
        return samples, {"epoch": epoch}

    def set_rows_per_pass(self, rows_per_pass: int) -> None:
        """From now on, put `rows_per_pass` rows into each micro-batch."""
        if rows_per_pass != self.rows_per_pass:
            self.rows_per_pass, self._prefetched_step_and_samples = rows_per_pass, None

    def reread_newest_samples(self) -> list[Any]:
        """Read the samples of the newest step again, divided into micro-batches of the current size."""
        return self._read_samples(self.step - 1)

    def _read_samples(self, step: int) -> list[Any]:
        seed_and_step, micro_batches = (self._train_config.order_seed, step), self.micro_batches(step)
        return [sample for i, batch in micro_batches.items() for sample in self._rows.samples(batch, seed_and_step, i)]

    def micro_batches(self, step: int) -> dict[int | None, Sequence[int]]:
        """Return the row numbers of each micro-batch of train step `step`, by the index of the micro-batch. If the
        trainer forms the micro-batches, return the numbers of all rows of the step under the key None."""
        if self._balanced_plan:
            return dict(enumerate(self._balanced_plan.micro_batches(step)))
        train = self._train_config
        row_positions = batch_row_numbers(
            train.order_seed, step, self._batch_size, mixture_or_num_rows(self._rows),
            train.train_policy.dataloader_shuffle, train.train_policy.drops_last_rows
        )  # fmt: skip
        # Limit the micro-batch size so that every data-parallel rank gets a micro-batch.
        max_batch_rows = min(self.rows_per_pass, -(-len(row_positions) // self._num_dp_ranks))
        micro_batches = self._rows.micro_batches(row_positions, max_batch_rows)
        return {None: row_positions.tolist()} if micro_batches is None else dict(enumerate(micro_batches))


def check_data_term_rows(data_term_config: DataTermConfig, num_rows: int) -> None:
    """Raise DataError if `num_rows`, the number of rows of a supervised loss that is added to an RL loss, is less than
    the number of rows of one optimizer step."""
    if num_rows < data_term_config.batch_size:
        raise DataError(
            f"train.train_policy.data_term has {num_rows} rows, fewer than batch_size = {data_term_config.batch_size}; "
            f"lower it, or give more rows"
        )


def make_sft_loss(rows: PreparedRows, train_config: TrainConfig, data_term: DataTermConfig) -> Callable[[int], Update]:
    """Return a function that builds, from the number of an optimizer step, the supervised loss that is added to its RL
    loss. Raise DataError if `rows` are too few for one step."""
    check_data_term_rows(data_term, len(rows))
    max_batch_tokens = getattr(train_config.train_policy, "max_token_len_per_mini_batch", None)

    def make_update(update_index: int) -> Update:
        seed, batch_size = train_config.order_seed + DATA_TERM_SEED_OFFSET, data_term.batch_size
        row_positions = range(update_index * batch_size, (update_index + 1) * batch_size)
        samples = rows.samples(rows_at_positions(seed, row_positions, len(rows), shuffle=True))
        return make_sft_update(batch_within_token_limit(samples, max_batch_tokens), data_term.weight)

    return make_update
