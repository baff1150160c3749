"""Keys of rewards: what a completion scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.train.measure import open_rewards, reward_weights
from cosmos_core.types import Completion, Group, Prompt, Score, Segment
from tests.effects.change import GRPO, Change, changes, stage_of

PROGRAM = """
import asyncio, os

def points(answer, reference, custom):
    return custom.get("points", 0.0)

def variable(answer, reference):
    return float(os.environ.get("VARIABLE", 0))

def together(answers, references, prompt):
    return [float(len(answers))] * len(references) if prompt == ["6 * 7 ="] else 0.25

async def slow(answer, reference):
    await asyncio.sleep(0.5)
    return 1.0
"""
GROUP = Group(Prompt(0, (1,), "6 * 7 =", "42"), (Completion((Segment((2,), True, (-1.0,), 0),), "stop", "42"),), 0)


# One token, a quarter of a ramp of four that ends at the limit.
LONG = {
    **GRPO, "train.train_policy.reward_function": "overlong", "rollout.max_response_length": 4,
    "train.train_policy.overlong_reward.buffer_length": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VARIABLE", "2.5")


def score(recipe: Recipe, folder: Path, weights: dict[str, float]) -> Score:
    with open_rewards(stage_of(folder / "stage", recipe, kind="rl"), weights) as score_groups:
        return score_groups([GROUP])[0].scores[0]


def trained(recipe: Recipe, folder: Path) -> Score:
    policy = recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)
    return score(recipe, folder, policy.rewards)


def mine(name: str) -> dict[str, Any]:
    return {**GRPO, "train.train_policy.reward_function": f"./mine.py:{name}"}


@changes(
    (Change("train.train_policy.reward_function", {"exact_match": 2}, GRPO), (1.0, 2.0)),
    (Change("train.train_policy.reward_timeout_seconds", 0.1, mine("slow")), (1.0, None)),
    (Change("train.train_policy.reward_env", ["VARIABLE"], mine("variable")), (0.0, 2.5)),
    (Change("validation.reward_env", ["VARIABLE"], mine("variable")), (0.0, 2.5)),
    (Change("train.train_policy.overlong_reward.buffer_length", 2, LONG), (-1 / 4, 0.0)),
    (Change("train.train_policy.overlong_reward.penalty_factor", 2.0, LONG), (-1 / 4, -1 / 2)),
    (Change("train.train_policy.group_reward_calculation", True, mine("together")), (0.25, 1.0)),
    (Change("custom", {"points": 0.75}, mine("points")), (0.0, 0.75)),
    (
        Change("train.train_policy.bypass_reward", True, {**GRPO, "train.train_policy.reward_function": "exact_match"}),
        (1.0, 0.0),
    ),
)
def test_it_changes_the_score_of_a_completion(
    change: Change, expected: tuple[float, float | None], tmp_path: Path
) -> None:
    assert (trained(change.before, tmp_path).value, trained(change.after, tmp_path).value) == expected


@changes(Change("validation.reward_function", {"exact_match": 2}, mine("points")))
def test_it_changes_the_score_of_a_held_out_answer(change: Change, tmp_path: Path) -> None:
    before, after = (score(side, tmp_path, reward_weights(side)).value for side in (change.before, change.after))
    assert (before, after) == (0.0, 2.0)
