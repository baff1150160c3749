"""A training that takes no time: its model is a number, to which it adds."""

from pathlib import Path

from cosmos_core.errors import DataError
from cosmos_core.types import Outcome


def grow(stage, by=1, refuse=False):
    """Adds to the number of its model; refused for as long as that is asked for."""
    with open(stage.path / "visits.txt", "a") as visits:
        visits.write("start\n")
    if refuse:
        raise DataError("refused on purpose")
    before = Path(stage.model, "size.txt") if stage.config.model else None
    size = by + (int(before.read_text()) if before else 0)
    (stage.path / "model").mkdir(exist_ok=True)
    (stage.path / "model" / "size.txt").write_text(str(size))
    return Outcome(outputs=("model",), metrics={"size": float(size)}, info={"model": "model"})
