"""A student that hardly adds comes near its teacher by on-policy distillation, on every seed and in both forms."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.acceptance.seeds import SEEDS, settings
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

CONFIG = demo.CONFIG.with_name("distillation.toml")
POINTS = 3.0
FORMS = {
    "divergence over 16 tokens": [],
    "reverse KL of the drawn token": ["distilled.distillation.top_k=0"],
}
_ACCURACY = "validation/accuracy"


def prove(folder: Path) -> Proof:
    """Run the pipeline once a form and seed; the second form takes teacher and student over from the first."""
    began = time.monotonic()
    rows, commands, met = [], [], True
    for seed in SEEDS:
        workspace = Workspace(folder / f"seed_{seed}")
        for form, changed in FORMS.items():
            chosen = [*settings(seed), *changed]
            demo.run_to_end(workspace, chosen, CONFIG)
            stages = ("student", "distilled", "teacher")
            before, after, teacher = (100 * demo.metrics(workspace, f"{s}-accuracy")[_ACCURACY] for s in stages)
            met = met and teacher - after <= POINTS
            rows.append(
                [seed, form, f"{before:.1f} %", f"{after:.1f} %", f"{teacher:.1f} %", f"{after - teacher:+.1f}"]
            )
            commands.append(demo.shown(chosen, CONFIG))
            logger.info("seed %d: %s", seed, " | ".join(map(str, rows[-1])))
    header = ["seed", "form", "student", "distilled", "teacher", "distilled - teacher, points"]
    return Proof(
        title="A distilled student comes near its teacher",
        is_met=met,
        claim=(
            f"On every seed, with both forms of on-policy distillation and without any reward, the student's held-out "
            f"accuracy ends at most {POINTS:.0f} points below its teacher's."
        ),
        commands=commands,
        body=table(header, rows),
        seconds=time.monotonic() - began,
    )
