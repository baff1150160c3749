"""Keys of logging: what Weights & Biases is told; a stand-in for its package listens."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.observe import gallery
from cosmos_core.observe.sinks.base import send_to_sinks
from cosmos_core.train.completions import CompletionLog
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment
from tests.effects.change import GRPO, SFT, Change, changes, difference, stage_of

WITH_WANDB = {**SFT, "logging.logger": ["wandb"]}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each run that is begun, with the figures that it gets."""
    found: list[dict[str, Any]] = []

    def init(**arguments: Any) -> SimpleNamespace:
        run = {**arguments, "figures": []}
        found.append(run)
        return SimpleNamespace(
            starting_step=0,
            log=lambda figures, step: run["figures"].append((step, figures)),
            finish=lambda exit_code: None,
        )

    wandb = ModuleType("wandb")
    wandb.__dict__.update(init=init, Settings=lambda **settings: None, Image=str)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return found


def log(recipe: Recipe, folder: Path) -> None:
    stage = stage_of(folder / "outputs/monday/stages/sft", recipe)
    with send_to_sinks(stage):
        stage.metrics.log(1, {"loss": 0.5})


@changes(Change("logging.logger", ["console", "wandb"]))
def test_it_changes_who_gets_the_metrics(change: Change, told: list[dict[str, Any]], tmp_path: Path) -> None:
    log(change.before, tmp_path)
    assert told == []
    log(change.after, tmp_path)
    assert [run["figures"] for run in told] == [[(1, {"loss": 0.5})]]


@changes(
    (Change("logging.project_name", "sums", WITH_WANDB), {"project": "sums"}),
    (Change("logging.group_name", "first", WITH_WANDB), {"group": "first"}),
    (Change("logging.experiment_name", "adam", {**WITH_WANDB, "logging.group_name": "first"}),
     {"name": "adam-monday-sft"}),
)  # fmt: skip
def test_it_changes_the_run_on_wandb(
    change: Change, expected: dict[str, str], told: list[dict[str, Any]], tmp_path: Path
) -> None:
    log(change.before, tmp_path)
    log(change.after, tmp_path)
    before, after = ({name: run[name] for name in ("project", "group", "name")} for run in told)
    assert difference(before, after) == expected


@changes(Change("logging.log_completions", False, GRPO))
def test_it_changes_whether_completions_are_written(change: Change, tmp_path: Path) -> None:
    completion = Completion((Segment((2,), True, (-1.0,), 0),), "stop", "42")
    scored = ScoredGroup(Group(Prompt(0, (1,), "6 * 7?", "42"), (completion,), 0), (Score(1.0),))
    for name, side in (("before", change.before), ("after", change.after)):
        CompletionLog(tmp_path / name / "completions", should_write=side.logging.log_completions)(1, [scored])
    assert [(tmp_path / name / "completions").exists() for name in ("before", "after")] == [True, False]


@changes(Change("logging.multi_modal_log_interval", 4, WITH_WANDB))
def test_it_changes_which_drawings_wandb_is_sent(change: Change, told: list[dict[str, Any]], tmp_path: Path) -> None:
    drawing = gallery.GeneratedSample("a dog", np.zeros((8, 8, 3), np.uint8), 1.0)
    for name, recipe in {"before": change.before, "after": change.after}.items():
        stage = stage_of(tmp_path / name / "monday/stages/sft", recipe)
        with send_to_sinks(stage):
            for step in (2, 3, 4):
                if step != 3:
                    gallery.save_step_samples(stage.path, step, [[drawing]])
                stage.metrics.log(step, {"loss": 0.5})
    sent = [[step for step, figures in run["figures"] if "validation/drawings" in figures] for run in told]
    assert sent == [[2, 4], [4]]
