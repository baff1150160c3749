"""Trainings killed with SIGKILL at random steps: the same weights on the same mesh, the same curve on another."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.distributed import killed

ONE: dict[str, int] = {}
TWO = {"dp_shard_size": 2}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    killed.make_task(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert killed.train_with_kills(task, folder, [ONE], random.Random()) == []
    return folder


@pytest.mark.full
def test_the_record_notices_what_it_looks_for(undisturbed: Path) -> None:
    rows = killed.rows_of_steps(undisturbed)
    assert killed.problems(rows) == []
    twice = [*rows[:3], rows[2], *rows[4:]]
    assert killed.problems(twice) != []


@pytest.mark.full
def test_the_same_bits_on_the_same_mesh(task: Path, undisturbed: Path, tmp_path: Path) -> None:
    kills = killed.train_with_kills(task, tmp_path, [ONE] * 3, random.Random(1))
    assert any(kill.checkpoint for kill in kills)
    assert killed.weights(tmp_path) == killed.weights(undisturbed)
    assert killed.losses(tmp_path) == killed.losses(undisturbed)
    assert killed.rows_of_steps(tmp_path) == killed.rows_of_steps(undisturbed)


@pytest.mark.full
def test_the_same_curve_on_changing_meshes(task: Path, undisturbed: Path, tmp_path: Path) -> None:
    kills = killed.train_with_kills(task, tmp_path, [TWO, ONE, TWO], random.Random(2), saved=True)
    assert 0 < kills[0].checkpoint < kills[1].checkpoint
    assert killed.losses(tmp_path) == pytest.approx(killed.losses(undisturbed), rel=1e-5)
    assert killed.rows_of_steps(tmp_path) == killed.rows_of_steps(undisturbed)
