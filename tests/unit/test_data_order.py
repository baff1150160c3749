"""The order of rows as a pure function, and padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cosmos_core.data.batch import collate_rows
from cosmos_core.data.order import batch_row_numbers, batches_per_epoch, epoch_order
from cosmos_core.errors import DataError


def test_an_epoch_has_each_row_once_and_epochs_and_seeds_differ():
    orders = [epoch_order(seed, epoch, 50, True).tolist() for seed in (0, 1, -1) for epoch in (0, 1, 2)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 9
    assert epoch_order(0, 5, 4, False).tolist() == [0, 1, 2, 3]


def test_the_order_never_changes_between_versions():
    # From a plain loop over numpy's raw PCG64 stream, whose values numpy promises to keep.
    generator = np.random.PCG64(np.random.SeedSequence((7, 3)))
    draws = [int(generator.random_raw()) for _ in range(6)]
    assert epoch_order(7, 3, 6, True).tolist() == sorted(range(6), key=lambda i: draws[i])
    assert epoch_order(7, 3, 6, True).tolist() == [2, 4, 3, 5, 1, 0]


def test_every_position_of_the_rows_is_drawn_equally_often():
    firsts = np.bincount([epoch_order(seed, 0, 8, True)[0] for seed in range(4000)], minlength=8)
    assert abs(firsts - 500).max() < 5 * np.sqrt(500)


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [3, 3, 3]), (False, [3, 3, 3, 1])])
def test_batches_of_an_epoch_are_disjoint_and_steps_go_on_into_the_next(drop_last, sizes):
    steps = len(sizes)
    assert batches_per_epoch(3, 10, drop_last) == steps
    for epoch in range(3):
        batches = [batch_row_numbers(0, epoch * steps + i, 3, 10, True, drop_last) for i in range(steps)]
        assert [len(batch) for batch in batches] == sizes
        joined = np.concatenate(batches).tolist()
        assert joined == epoch_order(0, epoch, 10, True)[: sum(sizes)].tolist()
        assert len(set(joined)) == sum(sizes)


def test_a_step_is_the_same_whatever_was_asked_before():
    forwards = [batch_row_numbers(3, step, 4, 11, True).tolist() for step in range(12)]
    epoch_order.cache_clear()
    backwards = [batch_row_numbers(3, step, 4, 11, True).tolist() for step in reversed(range(12))]
    assert forwards == backwards[::-1]


def test_fewer_rows_than_a_batch_is_an_error_with_the_remedy():
    with pytest.raises(DataError, match=r"has 3 rows, fewer than one batch of 4; lower train\.train_batch_per_replica"):
        batch_row_numbers(0, 0, 4, 3, True)
    assert batch_row_numbers(0, 0, 4, 3, False, drop_last=False).tolist() == [0, 1, 2]


def test_rows_are_padded_on_the_right():
    inputs, starts = collate_rows([np.array([5, 6, 7]), np.array([8])], 9, is_packed=False)
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [8, 9, 9]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert starts == [0, 2], "two predicted tokens a row"


def test_packed_rows_lie_end_to_end_and_count_their_own_positions():
    inputs, starts = collate_rows([np.array([5, 6, 7]), np.array([8]), np.array([2, 3])], 9, is_packed=True)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 2, 3]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32 and inputs["max_length_q"] == inputs["max_length_k"] == 3
    ends = inputs["sequence_bounds"].boundaries
    assert ends.tolist() == [0, 3, 4, 6] and isinstance(ends, np.ndarray), "on the host"
    assert starts == [0, 3, 4], "place 0 of the flat grid is token 6, place 4 is token 3"
    assert "attention_mask" not in inputs
