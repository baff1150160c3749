"""Stages that these tests train in a process or on ranks: a model that learns arithmetic, and its prepared rows."""

from __future__ import annotations

from pathlib import Path

from configs.demo import arithmetic
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.run.stage import Stage
from tasks.kinds import all_kinds


def stage_of(path: Path, kind: str, recipe: Recipe, model: Path | str = "", data: Path | None = None) -> Stage:
    path.mkdir(parents=True, exist_ok=True)
    config = StageConfig(name=path.name, kind=kind)
    return Stage(path, config, recipe, str(model), data, {}, "f" * 64, kind=all_kinds()[kind])


def make_task(folder: Path, recipe: Recipe, *, rows: int = 64, hidden_size: int = 64, layers: int = 2) -> Path:
    """Make the model in `task/model`, and the rows of the recipe's training in `rows/data`."""
    stage = stage_of(folder / "task", "custom", recipe)
    arithmetic.make(stage, train_rows=rows, heldout_rows=8, hidden_size=hidden_size, layers=layers)
    prepare.run(stage_of(folder / "rows", "prepare", recipe, folder / "task/model", folder / "task/data"))
    return folder
