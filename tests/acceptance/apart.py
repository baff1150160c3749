"""`kill -9` of each process of a training whose engines are apart: every prompt is trained once, whoever dies."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from cosmos_core.run.files import sha256
from cosmos_core.run.stage import Stage
from tests.acceptance.page import Proof, table
from tests.distributed import test_fleet as fleet
from tests.distributed.test_fleet import STEPS, actors, metrics, recipe, rl, steps, validated

logger = logging.getLogger(__name__)

SEED = 20261122
MOMENTS = 5
MOST_ATTEMPTS = 4


def engines(tree: psutil.Process) -> list[psutil.Process]:
    """One engine of the two."""
    return actors(tree, "RolloutEngine")[:1]


def ranks(tree: psutil.Process) -> list[psutil.Process]:
    """One rank of the two."""
    return actors(tree, "Rank")[-1:]


def rewards(tree: psutil.Process) -> list[psutil.Process]:
    """A process that rewards run in."""
    children = [child for rank in actors(tree, "Rank") for child in rank.children()]
    return [child for child in children if "spawn" in " ".join(child.cmdline())][:1]


def driver(tree: psutil.Process) -> list[psutil.Process]:
    """The worker, which has started all others."""
    return [tree]


def ray(tree: psutil.Process) -> list[psutil.Process]:
    """All processes of Ray."""
    return [each for each in tree.children(recursive=True) if "ray" in " ".join(each.cmdline()[:3])]


VICTIMS: dict[str, Callable[[psutil.Process], list[psutil.Process]]] = {
    "an engine": engines, "a rank": ranks, "a reward process": rewards, "the driver": driver, "all of Ray": ray,
}  # fmt: skip


def prove(folder: Path) -> Proof:
    """An undisturbed training, then five with a kill for each kind of process."""
    began = time.monotonic()
    task = fleet.make_task(folder, recipe(0))
    undisturbed = rl(task, folder / "undisturbed", recipe(2, ranks=2))
    attempts, _ = _run(undisturbed, None, 0)
    expected, generator = _digest(undisturbed), random.Random(SEED)
    rows, met = [], attempts == 1
    for name, victims in VICTIMS.items():
        problems, seconds = [], []
        for number in range(MOMENTS):
            stage = rl(task, folder / f"{name.replace(' ', '_')}_{number}", recipe(2, ranks=2))
            at = time.monotonic()
            attempts, left = _run(stage, victims, generator.randrange(1, STEPS), generator.uniform(0, 0.5))
            seconds.append(time.monotonic() - at)
            if [m["step"] for m in steps(stage)] != list(range(1, STEPS + 1)) or _digest(stage) != expected:
                problems.append(f"{number}: another result")
            if validated(stage) != validated(undisturbed):
                problems.append(f"{number}: another validation")
            if left:
                problems.append(f"{number}: {left} processes left")
        met = met and not problems
        rows.append([name, MOMENTS, f"{max(seconds):.0f}", "; ".join(problems) or "the same bits, nothing left"])
        logger.info("%s", " | ".join(map(str, rows[-1])))
    return Proof(
        title="Kills of a training with engines apart",
        is_met=met,
        claim=(
            f"GRPO of {STEPS} steps on two ranks, with two engines in processes of their own and "
            f"allowed_outdated_steps = 0. At a random moment (seed {SEED}) one process is killed with SIGKILL; a "
            f"worker that ends is started again, as the launcher does, and what a dead worker has left is ended first, "
            f"as its supervisor does. The weights have the sha256 of an undisturbed training, which they "
            f"could not have if a prompt had been left out or trained twice, and no process is left."
        ),
        commands=["python -m tests.acceptance apart"],
        body=table(["killed", "times", "longest, s", "result"], rows),
        seconds=time.monotonic() - began,
    )


Victims = Callable[[psutil.Process], list[psutil.Process]]


def _run(stage: Stage, victims: Victims | None, step: int, delay: float = 0.0) -> tuple[int, int]:
    """Run the worker until it has done its work; return how often it was started, and how many processes are left."""
    family: set[psutil.Process] = set()
    is_due = victims is not None
    for attempt in range(1, MOST_ATTEMPTS + 1):
        with open(stage.path / f"log_{attempt}", "w") as log:
            command = [sys.executable, "-m", "cosmos_core.worker", str(stage.path)]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=Path(__file__).parents[2])
        tree = psutil.Process(process.pid)
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                family |= set(tree.children(recursive=True))
                if is_due and victims is not None and max((m["step"] for m in metrics(stage)), default=0) >= step:
                    time.sleep(delay)
                    is_due = not _killed(victims(tree))
            time.sleep(0.05)
        if process.returncode == 0:
            break
        # What a dead worker leaves is ended by its supervisor, which is not there.
        _killed([each for each in family if each.is_running()])
    psutil.wait_procs(list(family), timeout=20)
    left = [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    assert not is_due, "the training ended before the moment came"
    return attempt, len(left)


def _killed(processes: list[psutil.Process]) -> bool:
    """Kill them; return whether there were any."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGKILL)
    return bool(processes)


def _digest(stage: Stage) -> str:
    return sha256(stage.path / f"safetensors/step_{STEPS}/model.safetensors")
