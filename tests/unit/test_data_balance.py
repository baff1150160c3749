"""Micro-batches by a budget of tokens: worked by hand, against a plain search, and as a pure function of the step."""

from __future__ import annotations

from functools import partial
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_core.data.balance import BalancedBatchPlan, BatchingSettings, fill_micro_batches
from cosmos_core.data.order import epoch_order


def budget(max_tokens: int, pool_size: int = 32, *, packed: bool = False, closest: bool = False) -> BatchingSettings:
    return BatchingSettings(max_tokens, pool_size, packed, closest)


def test_a_batch_takes_what_makes_it_cheapest_until_nothing_fits():
    # 4 alone costs 4; with 3 or 2: 8, with 5: 10, with 9: 18. Rows 2, 1 and 3 make it 4 * 4 = 16; a fifth row: 20.
    lengths = [4, 3, 2, 4, 5, 9]
    assert fill_micro_batches(lengths, range(6), budget(16)) == [[0, 1, 2, 3], [4], [5]]
    assert fill_micro_batches(lengths, range(6), budget(16, closest=True)) == [[0, 3, 1, 2], [4], [5]]


def test_strategies_differ_in_rows_that_cost_the_same():
    lengths = [6, 1, 5, 2]
    assert fill_micro_batches(lengths, range(4), budget(12)) == [[0, 1], [2, 3]]
    assert fill_micro_batches(lengths, range(4), budget(12, closest=True)) == [[0, 2], [1, 3]]


def test_packed_rows_cost_their_sum():
    lengths = [6, 5, 3, 4]
    assert fill_micro_batches(lengths, range(4), budget(12, packed=True)) == [[0, 2], [1, 3]]
    assert fill_micro_batches(lengths, range(4), budget(13, packed=True)) == [[0, 2, 3], [1]]


def test_only_the_rows_of_the_pool_are_looked_at():
    lengths = [4, 9, 9, 4]
    assert fill_micro_batches(lengths, range(4), budget(18, pool_size=4)) == [[0, 3], [1, 2]]
    assert fill_micro_batches(lengths, range(4), budget(8, pool_size=4)) == [[0, 3], [1], [2]]
    assert fill_micro_batches(lengths, range(4), budget(8, pool_size=3)) == [[0], [1], [2], [3]]


def test_a_row_above_the_budget_stands_alone():
    assert fill_micro_batches([9, 20, 1, 10], range(4), budget(10)) == [[0], [1], [2], [3]]
    assert fill_micro_batches([9, 20, 1, 10], range(4), budget(10, packed=True)) == [[0, 2], [1], [3]]


def cost(lengths: list[int], is_packed: bool) -> int:
    return sum(lengths) if is_packed else len(lengths) * max(lengths)


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    max_tokens=st.integers(1, 120),
    pool_size=st.integers(1, 12),
    is_packed=st.booleans(),
    closest=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_each_row_is_there_once_and_no_batch_is_dearer_than_its_budget(
    lengths: list[int], max_tokens: int, pool_size: int, is_packed: bool, closest: bool
) -> None:
    limits = BatchingSettings(max_tokens, pool_size, is_packed, closest)
    batches = fill_micro_batches(lengths, range(len(lengths)), limits)
    assert sorted(chain(*batches)) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or cost([lengths[row] for row in batch], is_packed) <= max_tokens
    # The row that starts a batch waited longest of all that are left.
    firsts = [batch[0] for batch in batches]
    assert firsts == sorted(firsts)
    # Nothing that was in the pool when a batch was closed would have fitted.
    left = list(range(len(lengths)))
    for batch in batches:
        pool = [row for row in left[:pool_size] if row not in batch]
        together = [lengths[row] for row in batch]
        assert all(cost([*together, lengths[row]], is_packed) > max_tokens for row in pool)
        left = [row for row in left if row not in batch]


LENGTHS = np.random.default_rng(0).integers(1, 200, 97)


def steps(seed: int = 3, batches_per_step: int = 3, num_epochs: int = 3, max_steps: int = 10**6) -> BalancedBatchPlan:
    return BalancedBatchPlan(
        LENGTHS, partial(epoch_order, seed, rows=len(LENGTHS), shuffle=True), budget(400),
        micro_batches_per_step=batches_per_step, num_epochs=num_epochs, max_steps=max_steps,
    )  # fmt: skip


def test_every_epoch_has_every_row_once_in_steps_of_so_many_batches():
    plan = steps()
    whole = [plan.micro_batches(step) for step in range(plan.total_steps)]
    ends = [step for step in range(plan.total_steps) if plan.num_epochs_done(step) == int(plan.num_epochs_done(step))]
    assert len(ends) == 3 and ends[0] + 1 == plan.steps_per_epoch and ends[2] + 1 == plan.total_steps
    for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        epoch = whole[first : last + 1]
        assert sorted(chain.from_iterable(chain.from_iterable(epoch))) == list(range(97))
        assert {len(batches) for batches in epoch[:-1]} == {3} and 1 <= len(epoch[-1]) <= 3
    assert whole[0] != whole[plan.steps_per_epoch]


def test_a_step_is_the_same_whatever_was_asked_before():
    plan = steps()
    forwards = [plan.micro_batches(step) for step in range(plan.total_steps)]
    again = steps()
    assert [again.micro_batches(step) for step in reversed(range(plan.total_steps))] == forwards[::-1]
    assert steps(seed=4).micro_batches(0) != forwards[0]


def test_no_more_is_planned_than_asked_for():
    plan = steps(max_steps=2)
    assert (plan.total_steps, plan.micro_batches(1)) == (2, steps().micro_batches(1))
    assert plan.num_epochs_done(1) == pytest.approx(2 / plan.steps_per_epoch)


def test_padding_is_a_small_part_of_what_random_batches_have():
    rows = epoch_order(0, 0, len(LENGTHS), True)
    filled = fill_micro_batches(LENGTHS.tolist(), rows.tolist(), budget(800, closest=True))
    size = round(len(rows) / len(filled))
    random = [rows[start : start + size].tolist() for start in range(0, len(rows), size)]
    padding = [sum(cost([int(LENGTHS[row]) for row in batch], False) for batch in plan) - int(LENGTHS.sum())
               for plan in (filled, random)]  # fmt: skip
    assert padding[0] < 0.5 * padding[1]
