"""The engine of a training that needs one for its validation alone sleeps until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.train import setup
from tests.effects.change import GRPO, SFT, Settings, recipe


@pytest.mark.parametrize(("settings", "levels"), [(SFT, [2, 2]), (GRPO, [1])])
def test_it_gives_its_memory_to_the_training_from_the_start_and_after_a_validation(
    settings: Settings, levels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[int] = []
    engine = SimpleNamespace(sleep=lambda level: slept.append(level), wake=lambda: None)
    generation: Any = SimpleNamespace(engine=engine, make_scorer=lambda *rewards: None, publish=lambda step: None)
    stage: Any = SimpleNamespace(recipe=recipe(settings))
    monkeypatch.setattr(setup.measure.CompletionValidation, "log_metrics", lambda self, step, groups: {})
    setup._completion_metrics_fn([], generation, stage)(1)  # type: ignore[arg-type]
    assert slept == levels
