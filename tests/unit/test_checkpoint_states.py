"""Named weights, the states of feed and algorithm, and the random generators in a checkpoint."""

from __future__ import annotations

import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cosmos_core.checkpoint.state import capture_rng, restore_rng, seed_rng
from tests.unit.test_checkpoint import fill, make_state, open_checkpoints, train_step

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_named_weights_and_the_states_of_feed_and_algorithm_come_back(tmp_path: Path) -> None:
    state = make_state()
    train_step(state)
    names = [name for name, _ in state.model.named_parameters()]
    weights = dict(state.model.named_parameters())
    state.weight_sets = {
        which: {name: torch.full_like(weights[name], value) for name in names}
        for which, value in (("old", 2.0), ("reference", 3.0))
    }
    buffered = {"reward": 0.5, "ids": torch.tensor([5, 6]), "logprobs": torch.zeros(0)}
    state.feed = {"frontier": [4, 7], "buffered": [buffered]}
    state.algorithm = {"baseline": torch.tensor(0.25, dtype=torch.float64), "seen": np.int64(3)}
    open_checkpoints(tmp_path).save(1, state)

    fresh = make_state()
    sets = ("ema", "old", "reference", "teacher")
    fresh.weight_sets = {which: {name: torch.full_like(weights[name], 9.0) for name in names} for which in sets}
    assert open_checkpoints(tmp_path).load_latest(fresh) == 1
    values = {"old": 2.0, "reference": 3.0, "teacher": 9.0}  # a teacher that was not saved stays as it was loaded
    for name in names:
        for which, value in values.items():
            assert (fresh.weight_sets[which][name] == value).all(), (which, name)
        assert torch.equal(fresh.weight_sets["ema"][name], weights[name])  # begins at the weights
    assert fresh.feed["frontier"] == [4, 7] and fresh.feed["buffered"][0]["reward"] == 0.5
    assert fresh.feed["buffered"][0]["ids"].tolist() == [5, 6]
    assert fresh.feed["buffered"][0]["logprobs"].shape == (0,)
    assert fresh.algorithm["seen"] == 3 and fresh.algorithm["baseline"].item() == 0.25
    assert fresh.algorithm["baseline"].dtype == torch.float64 and fresh.loop_state == {}


@pytest.mark.parametrize(("saved", "loaded"), [("Muon", "AdamW"), ("AdamW", "Muon"), ("AdamW8bit", "AdamW")])
@torch.compiler.set_stance("force_eager")
def test_moments_of_another_optimizer_begin_anew(
    tmp_path: Path, saved: str, loaded: str, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torchao", reason="needs the package torchao")
    state, other = make_state(name=saved, width=128), make_state(name=loaded, width=128)
    train_step(state)
    open_checkpoints(tmp_path).save(1, state)
    assert open_checkpoints(tmp_path).load_latest(other) == 1
    train_step(other)
    assert "the checkpoint has moments of another optm_name" in caplog.text
    for slots in other.optimizer.state.values():
        assert slots.keys() in ({"momentum_buffer"}, {"step", "exp_avg", "exp_avg_sq"})


def test_the_checkpoint_that_was_loaded_is_not_hashed_again(tmp_path: Path) -> None:
    open_checkpoints(tmp_path).save(1, make_state())
    resumed = open_checkpoints(tmp_path)
    assert resumed.load_latest(make_state()) == 1
    [file] = tmp_path.glob("step_1/policy/*.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert resumed.latest_step() == 1 and open_checkpoints(tmp_path).latest_step() is None


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state, checkpoints = make_state(), open_checkpoints(tmp_path, max_keep=1)
    checkpoints.save(1, state)
    busy = tmp_path / f".step_1.{os.getpid()}.tmp/file"
    busy.parent.mkdir()
    busy.touch()
    checkpoints.save(2, state)
    assert f"checkpoint step_1 in {tmp_path} cannot be deleted: " in caplog.text and checkpoints.latest_step() == 2


def test_random_generators_of_python_numpy_and_torch_continue_where_they_were() -> None:
    def draw() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.randn(5).tolist()]

    np.random.standard_normal()  # leaves a second normal number in NumPy's cache
    captured = json.loads(json.dumps(capture_rng()))
    drawn = draw()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    restore_rng(captured)
    assert draw() == drawn


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
    state.loop_state = {"rng": capture_rng(), "value": 3.0}
    open_checkpoints(tmp_path).save(1, state)
    manifest = tmp_path / "step_1/policy/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"ranks": 4}))
    loaded = make_state()
    with caplog.at_level(logging.INFO):
        assert open_checkpoints(tmp_path).load_latest(loaded) == 1
    assert loaded.loop_state == {"rng": None, "value": 3.0}
    assert "was saved by 4 ranks, here are 1: random numbers begin anew" in caplog.text
    assert all(bool((weight == 3.0).all()) for weight in loaded.model.parameters())
