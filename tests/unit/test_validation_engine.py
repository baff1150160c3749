"""The engine of a training that needs one for its validation alone sleeps until then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.run.workspace import Workspace
from cosmos_core.train import setup
from cosmos_core.train.measure import CompletionValidation, make_completion_settings
from tests.effects.change import GRPO, SFT, Settings, recipe


@pytest.mark.parametrize(("settings", "levels"), [(SFT, [2, 2]), (GRPO, [1])])
def test_it_gives_its_memory_to_the_training_from_the_start_and_after_a_validation(
    settings: Settings, levels: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    engine = SimpleNamespace(sleep=lambda level: slept.append(level), wake=lambda: None)
    generation: Any = SimpleNamespace(engine=engine, publish=lambda step: None)
    monkeypatch.setattr(setup.measure.CompletionValidation, "log_metrics", lambda self, step, groups: {})
    found, workspace = recipe(settings), Workspace(tmp_path)
    completions = CompletionValidation(
        [], generation.engine, lambda groups: [], make_completion_settings(found), workspace
    )
    has_rollouts = found.train.train_policy.has_rollouts
    setup._make_validate_fn(completions, generation, has_rollouts=has_rollouts)(1)
    assert slept == levels
