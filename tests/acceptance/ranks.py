"""SIGKILL at ten random steps of a training, on one mesh and from mesh to mesh; the rows of each step by their ids."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.acceptance.page import Proof, table
from tests.distributed import killed

logger = logging.getLogger(__name__)

SEED = 20261121
NUM_KILLS = 10
CURVE_TOLERANCE = 1e-5
ONE: dict[str, int] = {}
DP2 = {"dp_shard_size": 2}
SAME = {"one rank": ONE, "dp 2": DP2, "tp 2": {"tp_size": 2}}
CHANGING = (
    DP2, ONE, {"tp_size": 2}, {"cp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2}, {"pp_size": 2},
    {"dp_shard_size": 4}, ONE, {"tp_size": 2, "dp_shard_size": 2}, {"pp_size": 2, "dp_shard_size": 2}, ONE,
)  # fmt: skip


def prove(folder: Path) -> Proof:
    """Each mesh undisturbed and killed, then one training over all of `CHANGING`."""
    began = time.monotonic()
    task = folder / "task"
    killed.make_task(task)
    generator = random.Random(SEED)
    rows: list[list[object]] = []
    met = True
    for name, mesh in SAME.items():
        whole = folder / f"{name} undisturbed"
        _train(task, whole, [mesh], generator)
        problems, kills = _killed(task, folder / name, whole, [mesh] * (NUM_KILLS + 1), generator)
        if killed.weights(folder / name) != killed.weights(whole):
            problems.append("weights differ")
        met = met and not problems
        rows.append([name, kills, f"{_difference(folder / name, whole):.1e}", "; ".join(problems) or "same bits"])
    problems, kills = _killed(task, folder / "changing", folder / "one rank undisturbed", CHANGING, generator)
    met = met and not problems
    difference = _difference(folder / "changing", folder / "one rank undisturbed")
    rows.append(["changing", kills, f"{difference:.1e}", "; ".join(problems) or "same curve"])
    header = ["mesh", "killed after step (went on from)", "largest relative difference of a loss", "result"]
    return Proof(
        title="Ten kills of a training of several ranks",
        is_met=met,
        claim=(
            f"SFT of {killed.STEPS} steps with an asynchronous checkpoint every {killed.SAVE_FREQ}, killed with "
            f"SIGKILL (all ranks at once) at {NUM_KILLS} random steps and started again each time. On one mesh the "
            f"final weights have the sha256 of an undisturbed run; on changing meshes every loss is within "
            f"{CURVE_TOLERANCE:g} of it. Rows are noted as they are read: no step has others than in the undisturbed "
            f"run, and no epoch a row twice or none."
        ),
        commands=["python -m tests.acceptance ranks"],
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )


def _train(
    task: Path, folder: Path, meshes: Sequence[Mapping[str, int]], generator: random.Random
) -> list[killed.Kill]:
    folder.mkdir()
    return killed.train_with_kills(task, folder, meshes, generator)


def _killed(
    task: Path, folder: Path, whole: Path, meshes: Sequence[Mapping[str, int]], generator: random.Random
) -> tuple[list[str], str]:
    """What does not hold, and the kills in words."""
    kills = _train(task, folder, meshes, generator)
    rows = killed.rows_of_steps(folder)
    problems = killed.problems(rows)
    if rows != killed.rows_of_steps(whole):
        problems.append("rows differ")
    if _difference(folder, whole) > CURVE_TOLERANCE:
        problems.append("losses differ")
    words = ", ".join(f"{_named(kill.mesh)} {kill.step} ({kill.checkpoint})" for kill in kills)
    logger.info("%s: %s", folder.name, words)
    return problems, words


def _difference(folder: Path, whole: Path) -> float:
    pairs = zip(killed.losses(folder), killed.losses(whole), strict=True)
    return max(abs(found - expected) / abs(expected) for found, expected in pairs)


def _named(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis.removesuffix('_size')} {size}" for axis, size in mesh.items()) or "one rank"
