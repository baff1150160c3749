"""Selection of completions whose rewards are weighted sums, which binary fractions do not represent."""

from __future__ import annotations

from functools import partial

import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.sample import KeepConfig
from cosmos_core.config.schema.table import StageContext
from cosmos_core.rewards.base import full_reward
from cosmos_core.sample.records import SampledPrompt
from cosmos_core.sample.selection import compute_pass_rate, select_completions, select_pair
from tasks.kinds import all_kinds
from tests.unit.test_sample import candidate

WEIGHTS = {"a.py:right": 0.7, "a.py:form": 0.2, "a.py:short": 0.1}
ALL_RIGHT = 0.7 + 0.2 + 0.1


def test_a_lowest_reward_of_1_keeps_the_completions_that_are_right_by_every_function() -> None:
    assert ALL_RIGHT < 1.0
    prompt = SampledPrompt(0, [candidate("a", ALL_RIGHT), candidate("b", 0.9)])
    assert compute_pass_rate(prompt, partial(full_reward, WEIGHTS, "")) == 0.5
    kept = select_completions(prompt, KeepConfig(min_reward=1.0), 0.5, 0)
    assert [each.text for each in kept] == ["a"]


@pytest.mark.parametrize(
    ("rewards", "margin", "is_pair"),
    [((0.1 + 0.2, 0.3), 0.0, False), ((0.8, 0.5), 0.3, False), ((0.8, 0.5), 0.29, True), ((0.5, 0.5), 0.0, False)],
)
def test_the_rewards_of_a_pair_differ_by_more_than_a_rounding_error(
    rewards: tuple[float, float], margin: float, is_pair: bool
) -> None:
    prompt = SampledPrompt(0, [candidate(text, reward) for text, reward in zip("ab", rewards, strict=True)])
    assert (select_pair(prompt, prompt.candidates, margin) is not None) is is_pair


@pytest.mark.parametrize("num_completions", [1, 2])
def test_a_pair_needs_two_completions(num_completions: int) -> None:
    made = Recipe.model_validate({
        "train": {"train_policy": {"type": "grpo"}}, "sample": {"pairs": "best-worst"},
        "rollout": {"n_generation": num_completions},
    })  # fmt: skip
    refusals = [*made.sample.unsupported_setting_errors(StageContext(made, all_kinds()["sample"]))]
    assert ["set rollout.n_generation above 1" in each for each in refusals] == [True] * (num_completions < 2)


@pytest.mark.parametrize(("kind", "is_told"), [("sample", False), ("validate", False), ("rl", True)])
def test_only_a_training_is_told_that_its_completions_are_not_drawn_from_the_policy(kind: str, is_told: bool) -> None:
    made = Recipe.model_validate({
        "train": {"train_policy": {"type": "grpo", "temperature": 0.9}},
        "rollout": {"sampling_config": {"temperature": 0.7, "top_p": 0.9}},
    })  # fmt: skip
    context = StageContext(made, all_kinds()[kind])
    for table in (made.rollout, made.train.train_policy):
        told = [line for line in table.notices(context) if "training completions are not drawn" in line]
        assert bool(told) is is_told
