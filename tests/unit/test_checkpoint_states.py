"""Named weights, and the states of feed and algorithm, in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.test_checkpoint import make_state, open_checkpoints, train_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_named_weights_and_the_states_of_feed_and_algorithm_come_back(tmp_path: Path) -> None:
    state = make_state()
    train_step(state)
    names = [name for name, _ in state.model.named_parameters()]
    weights = dict(state.model.named_parameters())
    state.named_weights = {
        which: {name: torch.full_like(weights[name], value) for name in names}
        for which, value in (("old", 2.0), ("reference", 3.0))
    }
    state.feed = {"frontier": [4, 7], "buffered": [{"reward": 0.5, "ids": torch.tensor([5, 6])}]}
    state.algorithm = {"baseline": torch.tensor(0.25, dtype=torch.float64), "seen": 3}
    open_checkpoints(tmp_path).save(1, state)

    fresh = make_state()
    sets = ("ema", "old", "reference", "teacher")
    fresh.named_weights = {which: {name: torch.full_like(weights[name], 9.0) for name in names} for which in sets}
    assert open_checkpoints(tmp_path).load_latest(fresh) == 1
    values = {"old": 2.0, "reference": 3.0, "teacher": 9.0}  # a teacher that was not saved stays as it was loaded
    for name in names:
        for which, value in values.items():
            assert (fresh.named_weights[which][name] == value).all(), (which, name)
        assert torch.equal(fresh.named_weights["ema"][name], weights[name])  # begins at the weights
    assert fresh.feed["frontier"] == [4, 7] and fresh.feed["buffered"][0]["reward"] == 0.5
    assert fresh.feed["buffered"][0]["ids"].tolist() == [5, 6]
    assert fresh.algorithm["seen"] == 3 and fresh.algorithm["baseline"].item() == 0.25
    assert fresh.algorithm["baseline"].dtype == torch.float64 and fresh.extra == {}
