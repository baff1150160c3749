"""The random generators in a checkpoint: continued where they were, or begun anew on another number of ranks."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_core.checkpoint.state import capture_rng, restore_rng, seed_rng
from tests.unit.test_checkpoint import fill, make_state, open_checkpoints, train_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # pytest drops our own filter


def test_random_generators_of_python_numpy_and_torch_continue_where_they_were() -> None:
    np.random.standard_normal()  # leaves a second normal number in NumPy's cache
    captured = json.loads(json.dumps(capture_rng()))
    drawn = [random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(5).tolist()]
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    restore_rng(captured)
    assert drawn == [
        random.random(),
        random.gauss(0, 1),
        np.random.standard_normal(3).tolist(),
        torch.randn(5).tolist(),
    ]


def test_random_generators_begin_anew_at_a_place_that_the_numbers_choose() -> None:
    def drawn(*numbers: int) -> list[object]:
        seed_rng(*numbers)
        return [random.random(), float(np.random.standard_normal()), torch.rand(()).item()]

    assert drawn(42, 3, 0) == drawn(42, 3, 0)
    others = [drawn(42, 3, 0), drawn(42, 3, 1), drawn(42, 4, 0), drawn(43, 3, 0)]
    assert [len({str(each[i]) for each in others}) for i in range(3)] == [3, 3, 4], "a rank's own draw dropout"


def test_what_another_number_of_ranks_saved_comes_without_their_random_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state()
    train_step(state)
    fill(state, 3.0)
    state.extra = {"rng": capture_rng(), "value": 3.0}
    open_checkpoints(tmp_path).save(1, state)
    manifest = tmp_path / "step_1/policy/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"ranks": 4}))
    loaded = make_state()
    with caplog.at_level(logging.INFO):
        assert open_checkpoints(tmp_path).load_latest(loaded) == 1
    assert loaded.extra == {"rng": None, "value": 3.0}
    assert "was saved by 4 ranks, here are 1: random numbers begin anew" in caplog.text
    assert all(bool((weight == 3.0).all()) for weight in loaded.model.parameters())
