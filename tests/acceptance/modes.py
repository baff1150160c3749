"""The arithmetic demo learns alike with engines inside and apart, also run ahead, and by the relatives of GRPO."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.acceptance.seeds import SEEDS, settings
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

POINTS = 3.0
LIFT_POINTS = 25.0
_POLICY = "grpo.train.train_policy"
MODES = {
    "colocated": [],
    "apart, synchronous": ["grpo.mode=disaggregated", f"{_POLICY}.allowed_outdated_steps=0"],
    "apart, at most two steps old": ["grpo.mode=disaggregated", f"{_POLICY}.allowed_outdated_steps=2"],
}
ALGORITHMS = {
    "DAPO": [f"{_POLICY}.variant=dapo"],
    "GSPO": [f"{_POLICY}.variant=gspo", f"{_POLICY}.epsilon_low=0.003", f"{_POLICY}.epsilon_high=0.004"],
    "Dr. GRPO": [
        f"{_POLICY}.unbiased_advantage=true",
        f"{_POLICY}.loss_type=seq-mean-token-mean",
        f"{_POLICY}.unbiased_loss_max_tokens=8",
    ],
}


def prove(folder: Path) -> Proof:
    """Run the demo up to the accuracy after GRPO, once for each way and seed; SFT is made once for a seed."""
    began = time.monotonic()
    config = folder / "arithmetic.toml"
    text = demo.CONFIG.read_text().replace('"arithmetic.py:', f'"{demo.CONFIG.parent}/arithmetic.py:')
    config.write_text(text.partition('[[pipeline.stages]]\nname = "gate"')[0])
    rows, is_met = [], True
    for seed in SEEDS:
        workspace = Workspace(folder / f"seed_{seed}")
        after = {}
        for way, changed in {**MODES, **ALGORITHMS}.items():
            demo.run_to_end(workspace, [*settings(seed), *changed], config)
            after[way] = 100 * demo.metrics(workspace, "grpo-accuracy")[demo.ACCURACY]
            logger.info("seed %d, %s: %.1f %%", seed, way, after[way])
        before = 100 * demo.accuracy_before_grpo(workspace)
        of_modes = [after[way] for way in MODES]
        is_met &= max(of_modes) - min(of_modes) <= POINTS and min(after.values()) >= before + LIFT_POINTS
        rows.append([seed, *(f"{value:.1f} %" for value in (before, *after.values()))])
    return Proof(
        title="GRPO in three placements, and its relatives",
        is_met=is_met,
        claim=(
            f"On every seed the held-out accuracy after GRPO is the same within {POINTS:.0f} points, whether the "
            f"engine is in the trainer's process, apart, or apart with weights of up to two steps ago; and each of "
            f"{', '.join(ALGORITHMS)} lifts it by at least {LIFT_POINTS:.0f} points over the SFT checkpoint too."
        ),
        commands=[demo.shown(changed) for changed in (*MODES.values(), *ALGORITHMS.values())],
        body=table(["seed", "after SFT", *MODES, *ALGORITHMS], rows),
        seconds=time.monotonic() - began,
    )
