"""What the ranks of `test_save.py` run: a training of one step, its checkpoints, and what they hold."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from cosmos_core.checkpoint.save import Checkpointer
from cosmos_core.checkpoint.state import TrainState, capture_rng, named_tensors, restore_rng
from cosmos_core.errors import StageFailed
from cosmos_core.models.hf import load_model
from cosmos_core.parallel.fsdp import full_tensors
from cosmos_core.parallel.mesh import all_gather_object, is_first_rank, rank_number
from cosmos_core.train.trainer import Trainer
from cosmos_core.train.weight_sets import MovingAverage
from tests.distributed.loading import split
from tests.distributed.matrix import Case, recipe, samples
from tests.unit.trainers import sft

Mesh = dict[str, Any]


def begin(model: Path, mesh: Mesh, scratch: Path) -> tuple[Trainer, TrainState]:
    """A training of float32 weights, with a moving average."""
    torch.set_num_threads(1)
    rank = split(load_model(str(model), dtype=torch.float32), mesh, scratch)
    MovingAverage(rank.weight_sets, recipe(Case()).train)
    rank.weight_sets.add("old")
    return rank, TrainState(rank.adapter.model, rank.optimizer, weight_sets=rank.weight_sets.tensors)


def step(rank: Trainer) -> float:
    """One update; its loss."""
    (update,) = sft().updates(samples(0), rank)
    return rank.update(update)["loss"]


def checkpoints(folder: Path, *, asynchronous: bool = True) -> Checkpointer:
    return Checkpointer(folder, fingerprint="f", max_keep=2, is_async=asynchronous)


def content(state: TrainState) -> dict[str, np.ndarray]:
    """Every tensor whole, on the first rank."""
    return {name: tensor.cpu().numpy().copy() for name, tensor in full_tensors(named_tensors(state)) if is_first_rank()}


class Saved(NamedTuple):
    """A checkpoint of one step, and what follows it, as the first rank knows it."""

    held: dict[str, np.ndarray]
    losses: list[float]
    drawn: list[float]
    """The next random number of each rank."""
    value: Any = None


def save_all(cases: list[tuple[str, Mesh, Path]], models: Path, scratch: Path, stop: threading.Event) -> list[Saved]:
    """Of each case a step and its checkpoint, two more steps while it is written, and the checkpoint of these."""
    return [train_and_save(models / model, mesh, folder, scratch) for model, mesh, folder in cases]


def train_and_save(model: Path, mesh: Mesh, folder: Path, scratch: Path) -> Saved:
    rank, state = begin(model, mesh, scratch)
    rank.set_learning_rate(5, 10)
    step(rank)
    for average in state.weight_sets["ema"].values():
        average.mul_(0.5)
    for tensor in state.weight_sets["old"].values():
        tensor.add_(3.0)
    state.feed = {"frontier": 5, "buffered": [torch.arange(6)]}
    state.algorithm = {"baseline": torch.tensor([0.5, 0.25]), "seen": 3}
    held = content(state)
    saver = checkpoints(folder)
    torch.manual_seed(rank_number())
    state.loop_state = {"rng": capture_rng(), "value": 7}
    saver.save(1, state)
    losses = [step(rank), step(rank)]
    saver.save(3, state)
    saver.close()
    return Saved(held, losses, all_gather_object(torch.rand(()).item()))


def load_all(cases: list[tuple[str, Mesh, Path]], models: Path, scratch: Path, stop: threading.Event) -> list[Saved]:
    """Of each case what the checkpoint of one step holds, and two more steps."""
    return [load_and_train(models / model, mesh, folder, scratch) for model, mesh, folder in cases]


def load_and_train(model: Path, mesh: Mesh, folder: Path, scratch: Path) -> Saved:
    rank, state = begin(model, mesh, scratch)
    rank.set_learning_rate(5, 10)
    assert checkpoints(folder).load_latest(state) == 1
    assert state.feed["frontier"] == 5 and state.algorithm["seen"] == 3
    held, rng = content(state), state.loop_state["rng"]
    if rng is not None:
        restore_rng(rng)  # type: ignore[arg-type]
    losses = [step(rank), step(rank)]
    return Saved(held, losses, all_gather_object(torch.rand(()).item()) if rng else [], state.loop_state["value"])


def save_where_one_disk_is_full(
    model: Path, asynchronous: bool, folder: Path, scratch: Path, stop: threading.Event
) -> Any:
    """What each rank says when the last can write no more after its first checkpoint."""
    rank, state = begin(model, {"dp_shard_size": 2}, scratch)
    step(rank)
    saver = checkpoints(folder, asynchronous=asynchronous)
    saver.save(1, state)
    saver.wait()
    if dist.get_rank() == dist.get_world_size() - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    said = "nothing"
    try:
        saver.save(2, state)
        saver.close()
    except StageFailed as error:
        said = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, said)
    return found
