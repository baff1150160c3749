"""A training that takes no time: what it has learned is the number in the last row of its data."""

import json
import os
import time
from pathlib import Path

from cosmos_core.types import Outcome


def learn(stage):
    """The accuracy is the number; a failure that goes by itself is asked for by a row `fail`, and a row `until` names a
    file that ends the training."""
    rows = [json.loads(line) for line in stage.data.read_text().splitlines()]
    if rows[-1].get("fail") and not (stage.path.parent.parent.parent / "failed-once").exists():
        (stage.path.parent.parent.parent / "failed-once").touch()
        os._exit(3)
    (stage.path / "model").mkdir(exist_ok=True)
    (stage.path / "model" / "model.safetensors").write_text(json.dumps(rows))
    while "until" in rows[-1] and not Path(rows[-1]["until"]).exists():
        time.sleep(0.05)
    metrics = {"validation/accuracy": float(rows[-1]["accuracy"]), "validation/prompts": 100.0}
    return Outcome(outputs=("model",), metrics=metrics, info={"model": "model"})
