"""The engine of a training that needs one for its validation alone sleeps until then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.train import setup
from tests.effects.change import GRPO, SFT, Settings, recipe


@pytest.mark.parametrize(("settings", "levels"), [(SFT, [2]), (GRPO, [])])
def test_it_gives_its_memory_to_the_training_from_the_start(settings: Settings, levels: list[int]) -> None:
    slept: list[int] = []
    engine = SimpleNamespace(sleep=lambda level: slept.append(level))
    generation: Any = SimpleNamespace(engine=engine, score=lambda *rewards: None)
    stage: Any = SimpleNamespace(recipe=recipe(settings))
    setup._completion_metrics_fn([], generation, stage)  # type: ignore[arg-type]
    assert slept == levels
