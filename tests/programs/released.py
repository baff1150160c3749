"""A trivial stage that goes on for as long as a test wants: it counts until a file appears."""

import json
import os
import time
from pathlib import Path

from cosmos_core.errors import Preempted
from cosmos_core.types import Outcome


def count(stage, release):
    """Count on from `checkpoint.json`, one step every 50 ms, until the file `release` exists."""
    checkpoint = stage.path / "checkpoint.json"
    step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    with open(stage.path / "visits.txt", "a") as visits:
        visits.write(f"start {step}\n")
    while not Path(release).exists():
        stage.progress.phase("step")
        time.sleep(0.05)
        step += 1
        temporary = checkpoint.with_suffix(".new")
        temporary.write_text(json.dumps({"step": step}))
        os.replace(temporary, checkpoint)
        stage.progress.report_checkpoint(step)
        stage.progress.step(step)
        if stage.stop_requested:
            raise Preempted(f"saved at step {step}")
    (stage.path / "out.txt").write_text(str(step))
    return Outcome(outputs=("out.txt",), metrics={"count": float(step)})
