"""Engines in processes of their own beside the ranks: the training is that of engines inside, whoever is killed. Ranks
in Ray are those of a stage that a user runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.run.files import read_json, write_json
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import ENGINES_FILE, Stage, load_stage
from tests.distributed import members
from tests.distributed.stages import make_task, stage_of
from tests.local_ranks import LocalGroup

REWARD = f"{Path(__file__).with_name('reward.py')}:variety"
HELD = """
import time
from pathlib import Path

def variety(completion, reference):
    while not Path(__file__).with_suffix(".released").exists():
        time.sleep(0.02)
    time.sleep(0.05)
    return len(set(completion)) / 5
"""
"""The same reward, but slow, and the training waits for it while a file is not there."""
STEPS = 6
SECONDS = 1000


def recipe(engines: int, *, ranks: int = 2, **policy: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "mode": "disaggregated" if engines else "colocated",
            "policy": {"model_max_length": 32, "parallelism": {"dp_shard_size": ranks}},
            "train": {
                "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "train_batch_per_replica": 12,
                "max_num_steps": STEPS, "epoch": 9, "ckpt": {"enable_checkpoint": True, "save_freq": 1},
                "train_policy": {
                    "type": "grpo", "mini_batch": 3, "reward_function": REWARD, "allowed_outdated_steps": 0, **policy
                },
            },
            "rollout": {
                "backend": "hf", "n_generation": 4, "batch_size": 2, "max_response_length": 5,
                "parallelism": {"n_init_replicas": max(1, engines)}, "weight_transfer": "delta",
            },
            "validation": {"enable": True, "freq": 2, "val_before_train": True, "n_generation": 2, "temperature": 1.0},
        }
    )  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_task(tmp_path_factory.mktemp("task"), recipe(0))


def rl(task: Path, path: Path, config: Recipe) -> Stage:
    stage_of(path, "rl", config, task / "task/model", task / "rows/data").save()
    return load_stage(path)


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The same training with an engine inside each rank, without Ray."""
    folder = tmp_path_factory.mktemp("alone")
    done = rl(task, folder / "rl", recipe(0))
    LocalGroup(2).run(partial(members.train, done, None, folder))
    return done


def worker(stage: Stage, disturb: Mapping[int, Callable[[psutil.Process], None]]) -> str:
    """Run the stage's worker and disturb it once a step is done; return its log. Nothing may be left of it."""
    with open(stage.path / "log", "w") as log:
        command = [sys.executable, "-m", "cosmos_core.worker", str(stage.path)]
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2],
            env={**os.environ, "RAY_DEDUP_LOGS": "0"},
        )  # fmt: skip
    tree = psutil.Process(process.pid)
    left, deadline, family, turns = dict(disturb), time.monotonic() + SECONDS, set[psutil.Process](), 0
    while process.poll() is None and time.monotonic() < deadline:
        step = max((line["step"] for line in metrics(stage)), default=0)
        for due in [at for at in left if at <= step]:
            left.pop(due)(tree)
        if turns % 8 == 0:  # it reads all of /proc
            with suppress(psutil.NoSuchProcess):
                family |= set(tree.children(recursive=True))
        turns += 1
        time.sleep(0.05)
    text = (stage.path / "log").read_text()
    if process.poll() is None:
        process.kill()
    assert process.wait() == 0, text[-6000:]
    assert not left, f"never disturbed at {left}"
    psutil.wait_procs(list(family), timeout=20)
    assert [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    return text


def told(stage: Stage, tree: psutil.Process, text: str, times: int) -> None:
    """Wait until the log says something so many times."""
    deadline = time.monotonic() + SECONDS
    while (log := (stage.path / "log").read_text()).count(text) < times:
        assert tree.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline, log[-6000:]
        time.sleep(0.05)


def metrics(stage: Stage) -> list[dict[str, Any]]:
    path = stage.path / "metrics.jsonl"
    return list(read_metrics(path)) if path.exists() else []


def actors(tree: psutil.Process, name: str) -> list[psutil.Process]:
    """The processes of Ray that run an actor of this name."""
    return [each for each in tree.children(recursive=True) if f"ray::{name}" in _title(each)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # also one that has ended and was not waited for
        return ""


def kill(name: str) -> Callable[[psutil.Process], None]:
    return lambda tree: os.kill(actors(tree, name)[0].pid, signal.SIGKILL)


def steps(stage: Stage) -> list[dict[str, Any]]:
    """The lines about train steps."""
    return [line for line in metrics(stage) if "loss" in line]


def validated(stage: Stage) -> list[tuple[int, dict[str, float]]]:
    """What was measured on held-out prompts, by step, in the order in which it was told."""
    lines = [(line["step"], {k: v for k, v in line.items() if k.startswith("validation/")}) for line in metrics(stage)]
    return [(step, line) for step, line in lines if line]


def trained(stage: Stage) -> dict[str, Any]:
    return load_file(stage.path / f"safetensors/step_{STEPS}/model.safetensors")


def test_a_training_whose_engine_and_rank_are_killed_ends_with_the_bits_of_one_with_engines_inside(
    task: Path, alone: Stage, tmp_path: Path
) -> None:
    held = tmp_path / "held.py"
    held.write_text(HELD)
    released = held.with_suffix(".released")
    stage = rl(task, tmp_path / "rl", recipe(2, reward_function=f"{held}:variety", reward_timeout_seconds=SECONDS))

    def kill_engine(tree: psutil.Process) -> None:
        told(stage, tree, "is open", 2)
        kill("RolloutEngine")(tree)
        told(stage, tree, "an engine died", 1)
        released.touch()

    def kill_rank_and_end_an_engine(tree: psutil.Process) -> None:
        released.unlink()
        told(stage, tree, "is open", 3)
        engines = {each.pid for each in actors(tree, "RolloutEngine")}
        kill("Rank")(tree)
        told(stage, tree, "is open", 5)
        assert {each.pid for each in actors(tree, "RolloutEngine")} == engines, "the engines did not outlive the rank"
        write_json(stage.path / ENGINES_FILE, 1)
        released.touch()

    log = worker(stage, {0: kill_engine, 2: kill_rank_and_end_an_engine})
    assert "the ranks start again from their newest checkpoint" in log
    same = ("step", "loss", "reward/mean", "tokens")  # first, since it names the step that differs
    assert [[m[k] for k in same] for m in steps(stage)] == [[m[k] for k in same] for m in steps(alone)]
    expected, found = trained(alone), trained(stage)
    assert [name for name in expected if not (expected[name] == found[name]).all()] == []
    # The training went on while engines measured; what they found is what they find when it waits for them.
    assert [step for step, _ in validated(alone)] == [0, 2, 4, 6]
    assert validated(stage) == validated(alone)
    assert [line["step"] for line in metrics(stage) if "validation/reward" in line and "loss" not in line] == [0, 2, 4]
    assert read_json(stage.path / "best.json") == read_json(alone.path / "best.json")
    assert all(line["rollout/logprob_difference_max"] < 1e-4 for line in steps(alone)), "a rank has other weights"


@pytest.mark.full
def test_two_ranks_and_engines_that_run_ahead_train_on_every_prompt_once(task: Path, tmp_path: Path) -> None:
    stage = rl(task, tmp_path / "rl", recipe(2, allowed_outdated_steps=2))
    worker(stage, {2: kill("RolloutEngine")})
    found = steps(stage)
    assert [m["step"] for m in found] == list(range(1, STEPS + 1))
    assert [step for step, _ in validated(stage)] == [0, 2, 4, 6]
    assert {m["rollout/version_lag"] for m in found} <= {0.0, 1.0, 2.0} and found[-1]["rollout/version_lag"] > 0
    assert all(m["rollout/outdated"] == 0 for m in found)


@pytest.mark.full
def test_an_engine_with_ranks_of_its_own_is_replaced_as_a_whole_when_one_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    config = recipe(1, ranks=1)
    task = make_task(tmp_path / "inputs", config, hidden_size=128)
    rollout = config.rollout.copy_with(backend="vllm", parallelism=config.rollout.parallelism.copy_with(tp_size=2))
    stage = rl(task, tmp_path / "rl", config.copy_with(rollout=rollout))

    def kill_rank(tree: psutil.Process) -> None:
        ranks = [each for each in tree.children(recursive=True) if "VLLM::Worker" in " ".join(each.cmdline())]
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)

    log = worker(stage, {2: kill_rank})
    assert "an engine died" in log
    found = steps(stage)
    assert [m["step"] for m in found] == list(range(1, STEPS + 1))
    assert all(m["rollout/logprob_difference_max"] < 1e-4 for m in found)
    assert sum(m["rollout/restarts"] for m in found) == 1
