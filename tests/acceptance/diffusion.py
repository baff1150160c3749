"""Each diffusion family with each training, all weights and an adapter: killed, resumed, exported; 32 cells."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tests.acceptance.page import Proof, table
from tests.faults.flow_cells import CELLS, Cells
from tests.warm import spawner

logger = logging.getLogger(__name__)


def prove(folder: Path) -> Proof:
    """Every cell of the matrix."""
    began, rows, met = time.monotonic(), [], True
    spawner.install()  # 64 trainings begin in a process of their own
    cells = Cells(folder)
    for cell in CELLS:
        found = cells.run(cell)
        name, _ = cell.measure
        met = met and not found.problems
        rows.append([
            cell.family, cell.training, cell.weights, f"{name} {found.before:.4g} -> {found.after:.4g}",
            f"{found.killed_at} of {found.num_steps}", found.checkpoint, found.num_tensors,
            f"{found.seconds:.0f} s", "; ".join(found.problems) or "identical",
        ])  # fmt: skip
        logger.info("%s: %s", cell, rows[-1][-1])
    header = [
        "family", "training", "weights", "held-out rows", "killed after step", "went on from", "tensors", "took",
        "result",
    ]  # fmt: skip
    return Proof(
        title="Every diffusion training, killed",
        is_met=met,
        claim=(
            "Tiny pipelines of all four families, with SFT, DiffusionNFT, FlowGRPO and DiffusionNFT with a data term, "
            "all weights and an adapter. Each is trained once undisturbed and once with `kill -9` behind a checkpoint, "
            "in a process of its own, and resumed. The held-out loss falls, or the held-out reward rises; sha256 of "
            "every tensor of the last checkpoint (weights, average, old policy, reference, optimizer), the state of "
            "every random generator, every figure of every step and every file of the export are those of the "
            "undisturbed run; and the export, loaded by plain diffusers in another process, draws bit for bit what the "
            "policy draws. The suite has four of the cells."
        ),
        commands=[
            "python -m tests.acceptance diffusion",
            "pytest -m 'full or not full' tests/faults/test_flow_kills.py",
        ],
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )
