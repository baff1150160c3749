"""Sources of samples for a train step: rows of a dataset, or rollouts scored by rewards.

SFT and RL differ only in their feed. What the feeds of this module return at a step is a pure function of (seed, step)
and, for rollouts, of the weights and the state of the group source, so a resumed run continues with the same samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from cosmos_core.algorithms.base import Update
from cosmos_core.algorithms.data_term import sft_term
from cosmos_core.algorithms.kto import swap_responses
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.supervised import SupervisedConfig
from cosmos_core.data.balance import BalancedSteps, Budget
from cosmos_core.data.flow_sample import Draws, FlowSample, seed_of
from cosmos_core.data.media_rows import MediaRows
from cosmos_core.data.order import batch_positions, batches_per_epoch, epoch_order, left_over
from cosmos_core.data.prepared import Pairs, Sequences
from cosmos_core.data.sample import Sample, within_budget
from cosmos_core.errors import DataError
from cosmos_core.models.base import ModelAdapter

_DATA_TERM = 0x64617461
"""Offset of the seed, so that the order of the data term's rows differs from the order of the prompts."""
_HELD_OUT = -1
"""The value that replaces the step number in the seeds of held-out rows."""


class Feed:
    """Source of the samples of consecutive train steps; subclasses implement `samples`."""

    total_steps: int | None
    """Number of train steps until the data ends; None if it is not known in advance."""
    steps_per_epoch: int
    notice = ""
    """Message about rows that no step of an epoch trains on; empty if there are none."""
    step = 0
    """Number of the next train step, counted from 0."""

    def next(self) -> tuple[list[Any], dict[str, float]] | None:
        """Return the samples of the next train step and metrics about them; None if the data has ended."""
        if self.total_steps is not None and self.step >= self.total_steps:
            return None
        batch = self.samples(self.step)
        self.step += 1
        return batch

    def samples(self, step: int) -> tuple[list[Any], dict[str, float]]:
        """Return the samples of train step `step`, counted from 0, and metrics about them."""
        raise NotImplementedError(type(self).__name__)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to checkpoint, as JSON values: the next step, and whatever was read ahead."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self.step = int(state["step"])


def total_steps(recipe: Recipe, num_rows: int) -> int:
    """Return the number of train steps of a run: those of its epochs, at most `max_num_steps`.

    Raises:
        DataError: the rows do not fill one step.
    """
    train = recipe.train
    if recipe.spreads_groups:  # the last prompts of an epoch share a step with the first ones of the next
        steps = -(-train.epoch * num_rows * recipe.rollout.n_generation // train.train_batch_per_replica)
    else:
        steps = train.epoch * batches_per_epoch(rows_per_step(recipe), num_rows, train.train_policy.drops_last)
    return min(steps, train.max_num_steps or steps)


def rows_per_step(recipe: Recipe) -> int:
    """Return the number of dataset rows that a train step reads.

    For rollouts these are prompts, each with `n_generation` completions; the result is rounded up.
    """
    size = recipe.train.train_batch_per_replica
    return -(-size // recipe.rollout.n_generation) if recipe.train.train_policy.has_rollouts else size


def unused_rows(recipe: Recipe, num_rows: int) -> str:
    """Return a message about the rows at the end of an epoch that fill no train step; empty if there are none.

    Raises:
        DataError: the rows do not fill one step.
    """
    return left_over(recipe.train, 1 if recipe.spreads_groups else rows_per_step(recipe), num_rows)


def balanced_steps(rows: Sequences | Pairs | MediaRows, recipe: Recipe) -> BalancedSteps | None:
    """Return train steps whose micro-batches are filled up to a number of tokens; None if a batch is a number of
    rows."""
    train, policy = recipe.train, recipe.train.train_policy
    if not policy.balances_tokens:
        return None
    # the schema requires it
    assert isinstance(policy, SupervisedConfig) and not isinstance(rows, MediaRows) and train.max_num_steps is not None
    # None (the model decides) counts as padded, which needs at least as many tokens
    is_packed = bool(train.sequence_packing)
    return BalancedSteps(
        _pair_lengths(rows, is_packed=is_packed) if isinstance(rows, Pairs) else rows.lengths,
        lambda epoch: epoch_order(train.order_seed, epoch, len(rows), policy.dataloader_shuffle),
        Budget(
            micro_batch_tokens(recipe),
            policy.load_balanced_pool_size,
            is_packed=is_packed,
            prefers_closest=policy.load_balanced_batching_strategy == "prefer_closest",
        ),
        batches_per_step=policy.load_balanced_batches_per_optimizer_step,
        num_epochs=train.epoch,
        max_steps=train.max_num_steps,
    )


def _pair_lengths(pairs: Pairs, *, is_packed: bool) -> np.ndarray:
    """Return the tokens of each pair in a micro-batch: packed, the sum of both; padded, twice the longer response."""
    lengths = np.stack([pairs.chosen.lengths, pairs.rejected.lengths])
    return lengths.sum(0) if is_packed else 2 * lengths.max(0)


def micro_batch_tokens(recipe: Recipe) -> int:
    """Return the maximum number of tokens in a micro-batch that is filled by tokens."""
    policy = recipe.train.train_policy
    assert isinstance(policy, SupervisedConfig)
    rows = policy.mini_batch * policy.sequences_per_row
    return policy.load_balanced_max_tokens_for_batch or rows * recipe.policy.model_max_length


class RowFeed(Feed):
    """Feed of prepared rows, in an order that is a pure function of seed, epoch and position."""

    def __init__(self, rows: Sequences | Pairs | MediaRows, recipe: Recipe) -> None:
        self._rows, self._recipe = rows, recipe
        self._batch = recipe.train.train_batch_per_replica
        self._balanced = balanced_steps(rows, recipe)
        if self._balanced:
            self.steps_per_epoch, self.total_steps = self._balanced.steps_per_epoch, self._balanced.total_steps
            return
        self.notice = unused_rows(recipe, len(rows))
        self.steps_per_epoch = batches_per_epoch(self._batch, len(rows), recipe.train.train_policy.drops_last)
        self.total_steps = total_steps(recipe, len(rows))

    def positions(self, step: int) -> np.ndarray:
        """Return the row numbers of a train step, for batches of a fixed number of rows."""
        train = self._recipe.train
        return batch_positions(
            train.order_seed, step, self._batch, len(self._rows),
            train.train_policy.dataloader_shuffle, train.train_policy.drops_last,
        )  # fmt: skip

    def _epoch(self, step: int) -> dict[str, float]:
        return {"epoch": self._balanced.epochs_done(step) if self._balanced else (step + 1) / self.steps_per_epoch}


class SequenceFeed(RowFeed):
    """Feed of prepared sequences, with one sample for each sequence."""

    _rows: Sequences

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Return the sequences of train step `step` as samples, and metrics about them."""
        if self._balanced:
            batches = enumerate(self._balanced.micro_batches(step))
            samples = [sequence_sample(self._rows, i, micro_batch=number) for number, batch in batches for i in batch]
        else:
            samples = [sequence_sample(self._rows, int(i)) for i in self.positions(step)]
        return samples, self._epoch(step)


class PairFeed(RowFeed):
    """Feed of prepared pairs: the chosen sample, then the rejected one, in the same micro-batch."""

    _rows: Pairs

    def __init__(self, pairs: Pairs, recipe: Recipe) -> None:
        super().__init__(pairs, recipe)
        self._lengths = _pair_lengths(pairs, is_packed=False)
        self.reference: np.ndarray | None = None
        """Log-probabilities of the chosen and the rejected response of each pair under the reference policy, or
        None."""

    @property
    def trained(self) -> np.ndarray:
        """Return the sorted numbers of the pairs that at least one train step uses."""
        steps = range(self.total_steps or 0)
        return np.unique([i for step in steps for batch in self._micro_batches(step) for i in batch])

    def samples(self, step: int) -> tuple[list[Sample], dict[str, float]]:
        """Return the samples of the pairs of train step `step`, and metrics about them."""
        samples = [
            sample
            for number, batch in enumerate(self._micro_batches(step))
            for i in batch
            for sample in pair_samples(self._rows, i, self.reference, micro_batch=number)
        ]
        return samples, self._epoch(step)

    def _micro_batches(self, step: int) -> list[list[int]]:
        """Return the pairs of a step in micro-batches of similar length.

        Each micro-batch is small enough that every data-parallel rank gets one. All pairs in a micro-batch have the
        same number of images.
        """
        if self._balanced:
            return self._balanced.micro_batches(step)
        policy, mesh = self._recipe.train.train_policy, self._recipe.policy.parallelism
        ordered = sorted(self.positions(step).tolist(), key=lambda i: -self._lengths[i])
        num_ranks = mesh.dp_replicate_size * abs(mesh.dp_shard_size)
        size = min(policy.mini_batch, -(-len(ordered) // num_ranks))
        num_images = self._rows.chosen.num_images
        groups = [[i for i in ordered if num_images[i] == count] for count in np.unique(num_images[ordered])]
        return [rows[start : start + size] for rows in groups for start in range(0, len(rows), size)]


class MediaFeed(RowFeed):
    """Feed of prepared images or clips, each at a noise level that is drawn anew for each step.

    Reading a row and drawing its noise takes milliseconds for large latents, so a thread prefetches the next step while
    the current one is trained.
    """

    _rows: MediaRows

    def __init__(self, rows: MediaRows, recipe: Recipe, adapter: ModelAdapter) -> None:
        super().__init__(rows, recipe)
        self._draws = draws_of(rows, recipe, adapter)
        self._thread = ThreadPoolExecutor(1, "media-feed")
        self._ahead: tuple[int, Future[list[FlowSample]]] | None = None

    def samples(self, step: int) -> tuple[list[FlowSample], dict[str, float]]:
        """Return the images or clips of train step `step`, with their noise, and metrics about them."""
        prefetched, self._ahead = self._ahead, None
        samples = prefetched[1].result() if prefetched and prefetched[0] == step else self._drawn(step)
        if step + 1 != self.total_steps:
            self._ahead = step + 1, self._thread.submit(self._drawn, step + 1)
        return samples, self._epoch(step)

    def _drawn(self, step: int) -> list[FlowSample]:
        seed = self._recipe.train.order_seed
        return [self._draws.sample(self._rows[i], seed_of(seed, step, i)) for i in self.positions(step).tolist()]


def sft_rows(rows: Sequences, recipe: Recipe) -> Callable[[int], Update]:
    """Return a function that builds the data term of an optimizer step from rows in a seeded order of their own.

    Raises:
        DataError: there are fewer rows than one optimizer step needs.
    """
    train, term = recipe.train, recipe.train.train_policy.real_rows
    assert term is not None
    if len(rows) < term.batch_size:
        raise DataError(
            f"train.train_policy.data_term has {len(rows)} rows, fewer than batch_size = {term.batch_size}; lower it, "
            f"or give more rows"
        )
    most_tokens = getattr(train.train_policy, "max_token_len_per_mini_batch", None)

    def update(number: int) -> Update:
        positions = batch_positions(train.order_seed + _DATA_TERM, number, term.batch_size, len(rows), shuffle=True)
        samples = [sequence_sample(rows, int(i)) for i in positions]
        return sft_term(within_budget(samples, most_tokens), term.weight)

    return update


def draws_of(rows: MediaRows, recipe: Recipe, adapter: Any) -> Draws:
    """Return the generator of noise levels, noise and dropped captions for the rows that a diffusion model trains
    on."""
    family = adapter.family
    return Draws(recipe.policy.diffusers, family.dropped_text(rows.null_text), family.train_shift, family.max_given)


def held_out_sample(rows: MediaRows, i: int, draws: Draws) -> FlowSample:
    """Return row `i` with its caption, and with noise and a noise level that are the same at every call."""
    return draws.sample(rows[i], seed_of(_HELD_OUT, i), dropout=0.0)


def sequence_sample(rows: Sequences, i: int, micro_batch: int | None = None) -> Sample:
    """Return prepared sequence `i` as a sample; its reward is the row's label, or 0 without labels."""
    reward = 0.0 if rows.labels is None else float(rows.labels[i])
    return Sample(*rows[i], reward=reward, images=rows.images(i), micro_batch=micro_batch)


def labelled_samples(
    rows: Sequences, positions: Sequence[int], reference: np.ndarray | None, max_tokens: int
) -> list[Sample]:
    """Return two samples of each row at `positions`: its own, and its prompt with the response of another of them.

    `reference` holds the log-probabilities of both under the reference policy, shape (rows, 2).
    """
    own = [sequence_sample(rows, i) for i in positions]
    both = [sample for pair in zip(own, swap_responses(own, max_tokens), strict=True) for sample in pair]
    logprobs = np.zeros(len(both)) if reference is None else reference[list(positions)].ravel()
    return [replace(sample, reference_logprob=float(value)) for sample, value in zip(both, logprobs, strict=True)]


def pair_samples(
    pairs: Pairs, i: int, reference: np.ndarray | None, micro_batch: int | None = None
) -> tuple[Sample, Sample]:
    """Return the chosen and the rejected sample of prepared pair `i`.

    `reference` holds the log-probabilities of all pairs under the reference policy, shape (pairs, 2).
    """
    chosen, rejected = (0.0, 0.0) if reference is None else reference[i].tolist()
    images = pairs.chosen.images(i)  # the images are in the prompt, which both responses share
    return (
        Sample(*pairs.chosen[i], reference_logprob=chosen, images=images, micro_batch=micro_batch),
        Sample(*pairs.rejected[i], reference_logprob=rejected, images=images, micro_batch=micro_batch),
    )
