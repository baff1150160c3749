"""Keys of the order and number of steps: which rows each optimizer step of supervised training sees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.base import PreparedRows
from cosmos_core.data.sample import Sample
from cosmos_core.train.feeds import make_sft_loss
from tests.effects.change import GRPO, SFT, Change, Settings, changes
from tests.feeds import row_feed
from tests.unit.trainers import micro_batch

TERM = "train.train_policy.data_term"
BESIDE = {**GRPO, f"{TERM}.name": "rows", f"{TERM}.weight": 0.1, f"{TERM}.batch_size": 4}
SMALL = {**SFT, "train.train_batch_per_replica": 4}
IN_FILE = {**SMALL, "train.train_policy.dataloader_shuffle": False}


# A budget of 16 tokens, in the order of the file.
TOKENS = {**IN_FILE, "train.max_num_steps": 9, "policy.model_max_length": 8, "train.train_policy.mini_batch": 2}
BALANCED = {**TOKENS, "train.train_policy.enable_dp_load_balancing": True}


class Rows(PreparedRows):
    """Rows that repeat their number, ten of one token unless said otherwise."""

    def __init__(self, lengths: Sequence[int] = (1,) * 10) -> None:
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def token_counts(self, *, is_packed: bool) -> np.ndarray:
        return self.lengths

    def samples(self, positions: Any, seed: Any = None, micro_batch: int | None = None) -> list[Sample]:
        each = [(np.full(self.lengths[i], i), np.ones(self.lengths[i], dtype=np.uint8)) for i in positions]
        return [Sample(ids, mask, micro_batch=micro_batch) for ids, mask in each]


def micro_batches(recipe: Recipe) -> list[dict[int | None, list[int]]]:
    """The rows of each micro-batch of each step."""
    rows: Any = Rows([4, 1, 3, 8, 2, 5, 4, 4])
    feed = row_feed(rows, recipe)
    found: list[dict[int | None, list[int]]] = []
    for step in range(feed.total_steps):
        found.append({})
        for sample in feed.samples(step)[0]:
            found[-1].setdefault(sample.micro_batch, []).append(int(sample.input_ids[0]))
    return found


def steps(recipe: Recipe) -> list[list[int]]:
    """The rows of each step."""
    rows: Any = Rows()
    feed = row_feed(rows, recipe)
    return [[int(sample.input_ids[0]) for sample in feed.samples(step)[0]] for step in range(feed.total_steps)]


@changes(
    (Change("train.train_policy.dataloader_shuffle", False, SMALL), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    (Change("train.train_policy.dataloader_drop_last", False, IN_FILE), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    (Change("train.train_batch_per_replica", 2, IN_FILE), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
    (Change("train.epoch", 2, IN_FILE), [[0, 1, 2, 3], [4, 5, 6, 7]] * 2),
    (Change("train.max_num_steps", 1, IN_FILE), [[0, 1, 2, 3]]),
)
def test_it_changes_the_rows_of_the_steps(change: Change, expected: list[list[int]]) -> None:
    assert steps(change.after) == expected
    assert steps(change.before) != expected


def key(name: str, value: Any, base: Settings = BALANCED) -> Change:
    return Change(f"train.train_policy.{name}", value, base)


@changes(
    (key("enable_dp_load_balancing", True, TOKENS), [{0: [0, 6, 7, 2]}, {0: [1, 4, 5]}, {0: [3]}]),
    (key("load_balanced_pool_size", 2), [{0: [0, 1]}, {0: [2, 3]}, {0: [4, 5]}, {0: [6, 7]}]),
    (key("load_balanced_max_tokens_for_batch", 8), [{0: [0, 6]}, {0: [1, 4]}, {0: [2, 7]}, {0: [3]}, {0: [5]}]),
    (key("load_balanced_batching_strategy", "prefer_first"), [{0: [0, 1, 2, 4]}, {0: [3, 5]}, {0: [6, 7]}]),
    (key("load_balanced_batches_per_optimizer_step", 2), [{0: [0, 6, 7, 2], 1: [1, 4, 5]}, {0: [3]}]),
)
def test_it_changes_the_micro_batches(change: Change, expected: list[dict[int | None, list[int]]]) -> None:
    assert micro_batches(change.after) == expected
    assert micro_batches(change.before) != expected


@changes(Change("train.train_policy.dataloader_seed", 1, {**SMALL, "train.train_batch_per_replica": 2}))
def test_it_changes_the_order_of_the_rows(change: Change) -> None:
    before, after = steps(change.before), steps(change.after)
    assert before != after
    assert sorted(chain(*before)) == sorted(chain(*after)) == list(range(10))


@changes(
    (Change(f"{TERM}.batch_size", 5, BESIDE), (5, 1.0)),
    (Change(f"{TERM}.weight", 0.3, BESIDE), (4, 3.0)),
)
def test_it_changes_what_is_learned_beside_rollouts(change: Change, expected: tuple[int, float]) -> None:
    rows: Any = Rows((2,) * 10)
    found = []
    for recipe in (change.before, change.after):
        term = recipe.train.train_policy.supervised_rows
        assert term is not None
        update = make_sft_loss(rows, recipe.train, term)(0)
        logprobs_BS = torch.full((len(update.samples), 1), -2.0)
        micro = micro_batch(update.samples, logprobs_BS, torch.ones_like(logprobs_BS))
        found.append((len(update.samples), update.loss(micro).value.item()))
    assert found[0] == (4, pytest.approx(0.2))
    assert found[1] == (expected[0], pytest.approx(0.2 * expected[1]))
