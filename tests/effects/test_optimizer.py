"""Keys of the optimizer, the schedule and clipping."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.optim import build_optimizer, learning_rate_factor
from tests.effects.change import SFT, Change, changes, difference
from tests.unit.trainers import NoView, sft, trainer_of

LINEAR = {**SFT, "train.optm_decay_type": "linear", "train.optm_warmup_steps": 0}


def group(recipe: Recipe) -> dict[str, object]:
    """The optimizer's class, and its settings for matrices."""
    optimizer = build_optimizer(torch.nn.Linear(2, 2), recipe.train)
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    return {"class": type(optimizer), **settings}


@changes(
    (Change("train.optm_name", "Adam"), {"class": torch.optim.Adam, "decoupled_weight_decay": False}),
    (Change("train.optm_lr", 3e-4), {"lr": 3e-4, "initial_lr": 3e-4}),
    (Change("train.optm_impl", "foreach"), {"fused": False, "foreach": True}),
    (Change("train.optm_weight_decay", 0.3), {"weight_decay": 0.3}),
    (Change("train.optm_betas", [0.8, 0.95]), {"betas": (0.8, 0.95)}),
    (Change("train.epsilon", 1e-5), {"eps": 1e-5}),
)
def test_it_changes_the_optimizer_and_nothing_else_of_it(change: Change, expected: dict[str, object]) -> None:
    before, after = group(change.before), group(change.after)
    assert before.keys() == after.keys()
    assert difference(before, after) == expected


def curve(recipe: Recipe) -> list[float]:
    """What the learning rate of each of 10 steps is multiplied with."""
    return [learning_rate_factor(step, 10, recipe.train) for step in range(10)]


@changes(
    (Change("train.optm_warmup_steps", 5), [0.2, 0.4, 0.6, 0.8, *[1.0] * 6]),
    (Change("train.optm_warmup_start_factor", 0.5), [0.5 + 0.05 * (step + 1) for step in range(10)]),
    (Change("train.optm_decay_type", "sqrt", {**SFT, "train.optm_warmup_steps": 0}),
     [1 - math.sqrt(step / 10) for step in range(10)]),
    (Change("train.optm_decay_ratio", 0.5, LINEAR), [*[1.0] * 6, 0.8, 0.6, 0.4, 0.2]),
    (Change("train.optm_min_lr_factor", 0.5, LINEAR), [1 - 0.05 * step for step in range(10)]),
)  # fmt: skip
def test_it_changes_the_curve_of_the_learning_rate(change: Change, expected: list[float]) -> None:
    assert curve(change.after) == pytest.approx(expected)
    assert curve(change.before) != pytest.approx(expected)


@changes(Change("train.optm_grad_norm_clip", 0.25))
def test_it_bounds_the_gradient_that_the_optimizer_sees(change: Change, model: Path, tmp_path: Path) -> None:
    def norm(recipe: Recipe) -> float:
        trained = load_model(str(model), dtype=torch.float32)
        rank = trainer_of(trained, recipe.train, 0, ProgressWriter(tmp_path / "progress.json"))
        ids = np.arange(8, dtype=np.int64)
        (update,) = sft().updates([Sample(ids, np.ones(8, dtype=np.uint8))], NoView())
        assert rank.update(update)["grad_norm"] > 1
        return torch.nn.utils.get_total_norm([p.grad for p in trained.parameters() if p.grad is not None]).item()

    assert norm(change.before) == pytest.approx(1.0, rel=1e-4)
    assert norm(change.after) == pytest.approx(0.25, rel=1e-4)
