"""A real model gains what its gate finds significant, by GRPO and by expert iteration, on every seed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from cosmos_core.run.files import read_json
from cosmos_core.run.stage import CONDITIONS_FILE
from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.acceptance.seeds import SEEDS, settings
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

_RIGHT = "evaluation/capitals/exact_match"


def prove_grpo(folder: Path) -> Proof:
    """Run the demo of GRPO once a seed."""
    return _prove(folder, "real", 12.0, "A real model learns by GRPO", "by GRPO of LoRA adapters")


def prove_expert_iteration(folder: Path) -> Proof:
    """Run the demo of expert iteration once a seed."""
    how = "by three rounds of SFT on the best of its own completions"
    return _prove(folder, "expert-iteration", 20.0, "A real model learns from its own completions", how)


def _prove(folder: Path, name: str, minutes: float, title: str, how: str) -> Proof:
    """Run a demo once a seed; a gate that refuses ends the proof."""
    began = time.monotonic()
    config = demo.CONFIG.with_name(f"{name}.toml")
    rows, met = [], True
    for seed in SEEDS:
        workspace = Workspace(folder / f"{name}_{seed}")
        timed = demo.run_to_end(workspace, settings(seed), config)
        before, after = (100 * demo.metrics(workspace, stage)[_RIGHT] for stage in ("before", "after"))
        pair = comparison(workspace)
        met = met and timed.seconds < 60 * minutes
        rows.append([
            seed, f"{before:.1f} %", f"{after:.1f} %", f"**{after - before:+.1f}**",
            f"{pair['better']}, {pair['worse']}", f"{pair['p_value']:.1e}", f"{timed.seconds / 60:.1f} min",
        ])  # fmt: skip
        logger.info("seed %d: %s", seed, " | ".join(map(str, rows[-1])))
    header = ["seed", "right before", "after", "gain, points", "questions better, worse", "p", "wall time"]
    return Proof(
        title=title,
        is_met=met,
        claim=(
            f"SmolLM2-135M-Instruct learns to name a capital and nothing else, {how}, on two cores in less than "
            f"{minutes:.0f} minutes: on every seed so many more of 48 held-out questions have the right completion "
            f"that the gate's exact test of McNemar has p < 0.01."
        ),
        commands=[demo.shown(settings(seed), config) for seed in SEEDS],
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )


def comparison(workspace: Workspace) -> dict[str, Any]:
    """Return the comparison of the gate, question by question."""
    [condition] = read_json(workspace.stage("gate") / CONDITIONS_FILE)
    pair: dict[str, Any] = condition["paired"]
    return pair
