"""Keys of the order and number of steps: which rows each optimizer step of supervised training sees."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.train.feeds import SequenceFeed
from tests.effects.change import SFT, Change, changes

SMALL = {**SFT, "train.train_batch_per_replica": 4}
IN_FILE = {**SMALL, "train.train_policy.dataloader_shuffle": False}


class Rows:
    """Ten rows of one token: their number."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.array([index]), np.ones(1, dtype=np.uint8)


def steps(recipe: Recipe) -> list[list[int]]:
    """The rows of each step."""
    rows: Any = Rows()
    feed = SequenceFeed(rows, recipe)
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


@changes(Change("train.train_policy.dataloader_seed", 1, {**SMALL, "train.train_batch_per_replica": 2}))
def test_it_changes_the_order_of_the_rows(change: Change) -> None:
    before, after = steps(change.before), steps(change.after)
    assert before != after
    assert sorted(chain(*before)) == sorted(chain(*after)) == list(range(10))
