"""What the ranks of `test_group.py` run."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from cosmos_core.cluster.actors import ActorGroup
from cosmos_core.cluster.group import WorkerGroup
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.parallel.mesh import all_reduce_any
from cosmos_core.types import Outcome

if TYPE_CHECKING:
    from cosmos_core.run.stage import Stage


def total(stop: threading.Event) -> float:
    """1 + 2 + ... over all ranks; the other ranks' answers differ."""
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item() - 100 * dist.get_rank()


def own_gpus(stop: threading.Event) -> str:
    """The GPUs that each rank was given, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return " ".join(map(str, found))


def listening(driver: int, stop: threading.Event) -> set[tuple[str, int]]:
    """Where processes below `driver` listen while all ranks have met."""
    dist.barrier()
    found = listeners(driver) if dist.get_rank() == 0 else set()
    dist.barrier()
    return found


def listeners(driver: int) -> set[tuple[str, int]]:
    """Address and port of all that a process and those below it listen on."""
    processes = [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]
    sockets = [each for process in processes for each in process.net_connections("inet")]
    return {(each.laddr.ip, each.laddr.port) for each in sockets if each.status == psutil.CONN_LISTEN}


def patience(stop: threading.Event) -> float:
    """Seconds for which a rank waits in the store for another."""
    return dist.distributed_c10d._get_default_store().timeout.total_seconds()


def refuse(stop: threading.Event) -> None:
    """The last rank refuses while the others wait for it."""
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ConfigError("train.optm_lr = -1 must be positive")
    dist.barrier()


def die(stop: threading.Event) -> None:
    """The last rank is gone without a word."""
    if dist.get_rank() == dist.get_world_size() - 1:
        os._exit(3)
    dist.barrier()


def stop_together(started: Path, stop: threading.Event) -> list[int]:
    """The step at which each rank stopped; there is a file `started` from the third on."""
    step = 0
    while not all_reduce_any(stop.is_set()):
        step += 1
        if step == 3:
            started.touch()
    found: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(found, step)
    return found


def train(stage: Stage, stop_after: int | None, scratch: Path, stop: threading.Event) -> Outcome:
    """The stage, a training or a validation; with `stop_after` the last rank alone is told to stop at that step."""
    from cosmos_core.run.progress import MetricsWriter, ProgressWriter
    from cosmos_core.train import setup, validate  # seconds, which ranks in Ray that do not train are spared

    torch.set_num_threads(1)
    if dist.get_rank():
        own = scratch / f"rank_{dist.get_rank()}"
        own.mkdir(exist_ok=True)
        stage.progress, stage.metrics = ProgressWriter(own / "progress.json"), MetricsWriter(own / "metrics.jsonl")
    if stop_after is not None and dist.get_rank() == dist.get_world_size() - 1:

        def watch(line: dict[str, Any]) -> None:
            stage.stop_requested = line["step"] == stop_after

        stage.metrics.line_callbacks.append(watch)
    program = validate.run if stage.config.kind == "validate" else setup.run
    return program(stage)


class Beside:
    """An actor beside the ranks."""

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def shared_gpus(told: Any) -> str:
    """The GPUs that each rank was given, then those of each actor beside them."""
    of_ranks = own_gpus(told)
    while dist.get_rank() == 0 and not told.actors:
        time.sleep(0.1)
    return " ".join([of_ranks, *(handle.call("gpus").result(60) for handle in told.actors)])


if __name__ == "__main__":
    is_shared = "shared" in sys.argv[2:]
    processes = int((sys.argv[3:] or ["1"])[0])
    beside = ActorGroup(Beside, lambda: 2, shares_gpus=True, processes_per_actor=processes) if is_shared else None
    print(WorkerGroup(int(sys.argv[1]), actors=beside).run(shared_gpus if is_shared else own_gpus))  # noqa: T201
    if "die" in sys.argv[2:]:
        try:
            WorkerGroup(int(sys.argv[1])).run(die)
        except StageFailed as error:
            print(error)  # noqa: T201
