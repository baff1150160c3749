"""A real model gains what its gate finds significant, by GRPO and by expert iteration, on every seed."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from cosmos_core.run.files import read_json
from cosmos_core.run.stage import CONDITIONS
from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.acceptance.seeds import SEEDS, settings
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

MINUTES = {"real": 12.0, "expert-iteration": 20.0}
_RIGHT = "evaluation/capitals/exact_match"


def prove(folder: Path) -> Proof:
    """Run both demos once a seed; a gate that refuses ends the proof."""
    began = time.monotonic()
    rows, commands, met = [], [], True
    for seed in SEEDS:
        for name, most in MINUTES.items():
            config = demo.CONFIG.with_name(f"{name}.toml")
            workspace = Workspace(folder / f"{name}_{seed}")
            timed = demo.run_to_end(workspace, settings(seed), config)
            before, after = (100 * demo.metrics(workspace, stage)[_RIGHT] for stage in ("before", "after"))
            pair = comparison(workspace)
            met = met and timed.seconds < 60 * most
            commands.append(demo.shown(settings(seed), config))
            rows.append([
                seed, name, f"{before:.1f} %", f"{after:.1f} %", f"**{after - before:+.1f}**",
                f"{pair['better']}, {pair['worse']}", f"{pair['p_value']:.1e}", f"{timed.seconds / 60:.1f} min",
            ])  # fmt: skip
            logger.info("seed %d: %s", seed, " | ".join(map(str, rows[-1])))
    header = ["seed", "demo", "right before", "after", "gain, points", "questions better, worse", "p", "wall time"]
    return Proof(
        title="A real model learns on two cores",
        is_met=met,
        claim=(
            f"SmolLM2-135M-Instruct learns to name a capital and nothing else: on every seed, by GRPO of LoRA adapters "
            f"in less than {MINUTES['real']:.0f} minutes and by SFT on the best of its own answers in less than "
            f"{MINUTES['expert-iteration']:.0f}, so many more of 48 held-out questions are answered right that the "
            f"gate's exact test of McNemar has p < 0.01."
        ),
        commands=commands,
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )


def comparison(workspace: Workspace) -> dict[str, Any]:
    """Return the comparison of the gate, question by question."""
    [condition] = read_json(workspace.stage("gate") / CONDITIONS)
    pair: dict[str, Any] = condition["paired"]
    return pair
