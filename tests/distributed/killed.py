"""A training that is killed again and again: `python -m tests.distributed.killed FOLDER MESH`, MESH in JSON."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.run.files import read_json, sha256
from cosmos_core.run.progress import MetricsWriter, ProgressWriter, read_metrics
from cosmos_core.train.feeds import RowFeed
from cosmos_core.train.setup import run
from cosmos_core.types import Outcome
from tests.distributed import stages
from tests.local_ranks import LocalGroup

ROWS, STEPS, BATCH = 72, 40, 8
"""Nine steps an epoch; the training ends within the fifth."""
SAVE_FREQ = 3
RECORD = "seen.jsonl"
_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Kill:
    """One end by SIGKILL."""

    mesh: Mapping[str, int]
    step: int
    """Complete steps at that moment."""
    checkpoint: int
    """That the next start can go on from; 0: none."""


def make_task(folder: Path) -> None:
    """A model and its prepared rows."""
    stages.make_task(folder, _recipe(), rows=ROWS)


def train_with_kills(
    task: Path, folder: Path, meshes: Sequence[Mapping[str, int]], generator: random.Random, *, saved: bool = False
) -> list[Kill]:
    """Train to the end; every mesh but the last is killed at a random step, with `saved` after a checkpoint of its
    own."""
    kills = []
    for number, mesh in enumerate(meshes):
        path = folder / "sft"
        begin = newest(path)
        is_last = number == len(meshes) - 1
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.killed", str(folder), str(task), json.dumps(mesh)],
                cwd=_REPOSITORY, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )  # fmt: skip
        try:
            if is_last:
                assert process.wait(600) == 0, (folder / "log.txt").read_text(encoding="utf-8")[-2000:]
                continue
            share = (STEPS - begin) // (len(meshes) - number)
            _wait_for_step(process, path, begin + generator.randint(1, max(1, 2 * share - 1)))
            while saved and newest(path) == begin and process.poll() is None:
                time.sleep(0.005)
            time.sleep(generator.uniform(0.0, 0.1))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # every rank is of its session
            process.wait()
        kills.append(Kill(mesh, _step(path), newest(path)))
    return kills


def newest(path: Path) -> int:
    """The newest checkpoint with a manifest."""
    found = (path / "checkpoints").glob("step_*/policy/manifest.json")
    return max((int(file.parent.parent.name.removeprefix("step_")) for file in found), default=0)


def weights(folder: Path) -> str:
    """The digest of the trained model."""
    return sha256(folder / f"sft/safetensors/step_{STEPS}/model.safetensors")


def losses(folder: Path) -> list[float]:
    """Of every step, in order.

    Raises:
        AssertionError: a step is missing or there twice.
    """
    lines = read_metrics(folder / "sft/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    return [line["loss"] for line in lines]


def rows_of_steps(folder: Path) -> list[list[str]]:
    """Digests of the rows of each step, as the ranks that took it for the last time read them.

    Raises:
        AssertionError: ranks or repetitions of a step disagree.
    """
    found: dict[int, list[str]] = {}
    for line in (folder / RECORD).read_text(encoding="utf-8").splitlines():
        step, rows = json.loads(line)
        assert found.setdefault(step, rows) == rows, f"step {step} was not the same for all"
    return [found[step] for step in range(STEPS)]


def problems(rows: Sequence[Sequence[str]]) -> list[str]:
    """Epochs in which a row is skipped or seen twice."""
    flat = [row for step in rows for row in step]
    everything = set(flat)
    wrong = [] if len(everything) == ROWS else [f"{len(everything)} of {ROWS} rows were seen"]
    for start in range(0, len(flat), ROWS):
        epoch = flat[start : start + ROWS]
        if len(set(epoch)) != len(epoch):
            wrong.append(f"epoch {start // ROWS + 1} has a row twice")
    return wrong


def _wait_for_step(process: subprocess.Popen[bytes], path: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while _step(path) < min(step, STEPS - 1):
        assert process.poll() is None, "the training ended before it was killed"
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def _step(path: Path) -> int:
    progress = read_json(path / "progress.json")
    return int(progress["step"] or 0) if isinstance(progress, dict) else 0


def _recipe(**mesh: int) -> Recipe:
    policy = {"type": "sft", "mini_batch": 2, "conversation_column_name": "messages"}
    train = {
        "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "train_batch_per_replica": BATCH, "epoch": 100,
        "max_num_steps": STEPS, "train_policy": policy,
        "ckpt": {"enable_checkpoint": True, "save_freq": SAVE_FREQ, "save_mode": "async", "max_keep": 2},
    }  # fmt: skip
    return Recipe.model_validate({"policy": {"model_max_length": 32, "parallelism": mesh}, "train": train})


def _train(folder: Path, task: Path, mesh: dict[str, int], stop: threading.Event) -> Outcome:
    """One rank; every step's rows are noted."""
    torch.set_num_threads(1)
    stage = stages.stage_of(folder / "sft", "sft", _recipe(**mesh), task / "task/model", task / "rows/data")
    read = RowFeed.samples

    def noted(feed: RowFeed, step: int) -> Any:
        samples, figures = read(feed, step)
        digests = [hashlib.sha256(sample.input_ids.tobytes()).hexdigest()[:16] for sample in samples]
        with open(folder / RECORD, "a", encoding="utf-8") as file:
            file.write(json.dumps([step, digests]) + "\n")
        return samples, figures

    RowFeed.samples = noted  # type: ignore[method-assign]
    if torch.distributed.is_initialized() and torch.distributed.get_rank():
        own = folder / f"rank_{torch.distributed.get_rank()}"
        own.mkdir(exist_ok=True)
        stage.progress, stage.metrics = ProgressWriter(own / "progress.json"), MetricsWriter(own / "metrics.jsonl")
    return run(stage)


def main() -> None:
    """Train with the mesh of the command line."""
    folder, task, mesh = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    program = partial(_train, folder, task, mesh)
    size = Recipe.model_validate({"policy": {"parallelism": mesh}}).policy.parallelism.world_size
    if size == 1:
        program(threading.Event())
    else:
        LocalGroup(size).run(program)


if __name__ == "__main__":
    main()
