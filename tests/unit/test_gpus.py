"""GPUs of one machine are divided among stages that run at once."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import Preempted
from cosmos_core.launch import gpus
from cosmos_core.launch.gpus import count_local_gpus, hold_gpus
from cosmos_core.run.manifest import Result
from tasks import stage
from tasks.kinds import all_kinds
from tests.unit.run_folder import load_recipe
from tests.unit.test_artifact_store import begun

VISIBLE = "CUDA_VISIBLE_DEVICES"


class Waited(Exception):
    """Somebody has to wait."""


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gpus, "map_device_entries_to_uuids", lambda: {"3": "GPU-1-2", "GPU-7": "GPU-7-8"})
    yield


def refuse(reason: str) -> None:
    raise Waited(reason)


def test_stages_that_run_at_once_have_gpus_of_their_own() -> None:
    with hold_gpus(1, refuse) as (first, _), hold_gpus(1, refuse) as (second, _):
        assert (first, second) == ({VISIBLE: "3"}, {VISIBLE: "GPU-7"})
        with pytest.raises(Waited, match="waits for 1 of the 2 GPUs of this machine"), hold_gpus(1, refuse):
            pass
    with hold_gpus(2, refuse) as (both, _):
        assert both == {VISIBLE: "3,GPU-7"}
        with hold_gpus(0, refuse) as nothing:
            assert nothing == ({}, ())


def test_a_training_whose_engines_may_become_more_takes_all_that_are_free() -> None:
    with hold_gpus(1, refuse) as (one, _), hold_gpus(1, refuse, should_hold_all_free=True) as (rest, _):
        assert (one, rest) == ({VISIBLE: "3"}, {VISIBLE: "GPU-7"})
    with hold_gpus(1, refuse, should_hold_all_free=True) as (all_, _), pytest.raises(Waited), hold_gpus(1, refuse):
        assert all_ == {VISIBLE: "3,GPU-7"}


def test_a_stage_that_needs_several_takes_none_while_it_waits() -> None:
    waits: list[str] = []

    def let_go(reason: str) -> None:
        waits.append(reason)
        with hold_gpus(1, refuse) as (free, _):
            assert free == {VISIBLE: "GPU-7"}
        one.__exit__(None, None, None)

    one = hold_gpus(1, refuse)
    one.__enter__()
    with hold_gpus(2, let_go) as (both, _):
        assert both == {VISIBLE: "3,GPU-7"} and len(waits) == 1


def test_where_there_are_fewer_than_it_needs_it_has_all_and_without_any_it_waits_for_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with hold_gpus(8, refuse) as (all_, _):
        assert all_ == {VISIBLE: "3,GPU-7"}
    (tmp_path / "cache" / "cosmos-posttrain").rename(tmp_path / "away")
    (tmp_path / "cache" / "cosmos-posttrain").write_text("no folder")
    with hold_gpus(1, refuse) as nothing:
        assert nothing == ({}, ()), "a lock cannot be made here"
    monkeypatch.setattr(gpus, "map_device_entries_to_uuids", dict)
    with hold_gpus(1, refuse) as nothing:
        assert nothing == ({}, ())


def test_without_locks_in_the_cache_folder_a_stage_still_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with hold_gpus(1, refuse) as nothing:
        assert nothing == ({}, ())
    assert "stages that run at once may take the same GPUs" in caplog.text and "cosmos-posttrain/gpus: " in caplog.text


def test_they_are_taken_as_long_as_the_worker_lives_whatever_becomes_of_its_flow() -> None:
    with hold_gpus(2, refuse) as (_, locks):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=locks)
    try:
        with pytest.raises(Waited), hold_gpus(1, refuse):
            pass
    finally:
        child.kill()
        child.wait()
    with hold_gpus(2, refuse):
        pass


def test_a_stage_needs_what_its_ranks_and_engines_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, mesh = all_kinds(), "policy.parallelism.dp_shard_size=2"
    recipe = load_recipe(tmp_path, mesh).recipes["sft"]
    assert [count_local_gpus(kinds[name], recipe) for name in ("sft", "validate", "export", "prepare")] == [2, 2, 0, 0]
    parallelism = recipe.rollout.parallelism.model_copy(update={"n_init_replicas": 3, "tp_size": 2})
    rollout = recipe.rollout.model_copy(update={"parallelism": parallelism})
    apart = recipe.model_copy(update={"mode": "disaggregated", "rollout": rollout})
    assert [count_local_gpus(kinds[name], apart) for name in ("rl", "validate")] == [8, 2]
    monkeypatch.setenv("RAY_ADDRESS", "cluster:6379")
    assert count_local_gpus(kinds["sft"], recipe) == 0, "Ray gives them"
    shared = load_recipe(tmp_path).recipes["sft"].model_copy(update={"mode": "colocated_separated"})
    assert count_local_gpus(kinds["rl"], shared) == 0, "engines apart make actors of one rank too"
    assert count_local_gpus(kinds["sft"], load_recipe(tmp_path).recipes["sft"]) == 1, "one rank is no actor"


def test_a_worker_sees_its_own_and_a_stage_that_waits_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, launched = begun(tmp_path, "", "here"), []

    def launch(found: Any) -> Result:
        launched.append(found)
        raise Preempted("enough")

    monkeypatch.setattr(gpus, "count_local_gpus", lambda kind, recipe: 1)
    monkeypatch.setattr(stage.worker, "run_attempt", launch)
    with hold_gpus(1, refuse), pytest.raises(Preempted, match="enough"):
        stage.run_stage(run, "first")
    assert launched[0].environment[VISIBLE] == "GPU-7" and len(launched[0].lock_descriptors) == 3

    def stop(seconds: float) -> None:
        said.append(stage.read_state(run.stage_path("first")))
        raise Preempted("stopped")

    said: list[Any] = []
    monkeypatch.setattr(gpus, "sleep_unless_stopping", stop)
    with hold_gpus(2, refuse), pytest.raises(Preempted, match="stopped"):
        stage.run_stage(run, "first")
    assert said[0].state == "waiting" and said[0].error.startswith("waits for 1 of the 2 GPUs")
