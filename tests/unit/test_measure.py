"""Held-out completions: the same random numbers at each step, and no valid reward is a failure of the stage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmos_core.config.schema.dataset import PASS_RATES_FILE
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import StageFailed
from cosmos_core.rewards.base import full_reward
from cosmos_core.run.workspace import Workspace
from cosmos_core.sample.records import SampledPrompt, ScoredCompletion
from cosmos_core.sample.selection import compute_pass_rate
from cosmos_core.train.measure import (
    CompletionValidation,
    completion_metrics,
    make_completion_settings,
    pass_at_k,
    row_metrics,
)
from cosmos_core.train.pass_rates import PassRates
from cosmos_core.types import Completion, Group, Prompt, Sampling, Score, ScoredGroup, Segment
from tests.unit.test_train import GRPO, make_stage, recipe

PROMPTS = [Prompt(i, (1, 2), "?", "4") for i in range(3)]
COMPLETION = Completion((Segment((5,), True, (-1.0,), 0),), "stop", "4")


def scored(*values: float | None, prompt: Prompt = PROMPTS[0]) -> ScoredGroup:
    scores = tuple(Score(value, {} if value is None else {"right": value}) for value in values)
    return ScoredGroup(Group(prompt, (COMPLETION,) * len(values), 0), scores)


class Engine:
    """Completes each prompt with one token, and remembers what the random numbers depend on."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._done: list[Group] = []

    def submit(self, prompts: Sequence[Prompt], sampling: Sampling, step: int) -> None:
        self.steps.append(step)
        self._done = [Group(prompt, (COMPLETION,) * sampling.num_completions, step) for prompt in prompts]

    def completed(self) -> list[Group]:
        done, self._done = self._done, []
        return done

    def wake(self) -> None:
        pass

    def sleep(self, level: int = 1) -> None:
        pass


def completions(folder: Path, engine: Any, score: Score) -> CompletionValidation:
    def scored(groups: Sequence[Group]) -> list[ScoredGroup]:
        return [ScoredGroup(group, (score,) * len(group.completions)) for group in groups]

    prompts: Any = PROMPTS
    settings = make_completion_settings(recipe(GRPO))
    return CompletionValidation(prompts, engine, scored, settings, make_stage(folder, "rl", recipe(GRPO)))


def test_each_validation_draws_with_the_same_seeds(tmp_path: Path) -> None:
    engine = Engine()
    measured = completions(tmp_path / "rl", engine, Score(0.5))
    assert measured.validate(3)["validation/reward"] == measured.validate(9)["validation/reward"] == 0.5
    assert len(set(engine.steps)) == 1


def test_no_valid_reward_fails_the_stage_so_that_it_is_tried_again(tmp_path: Path) -> None:
    measured = completions(tmp_path / "rl", Engine(), Score(None, error="timed out"))
    with pytest.raises(StageFailed, match="all 3 held-out completions have an invalid reward; the first: timed out"):
        measured.validate(1)


@pytest.mark.parametrize(("k", "count", "right"), [(1, 7, 3), (2, 7, 3), (4, 7, 3), (4, 7, 0), (4, 5, 5), (5, 6, 1)])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(k: int, count: int, right: int) -> None:
    choices = list(combinations(range(count), k))
    assert pass_at_k(k, count, right) == pytest.approx(sum(min(each) < right for each in choices) / len(choices))


def test_a_penalty_that_is_not_due_costs_no_accuracy() -> None:
    rewards = {"boxed_math": 2.0, "overlong": 1.0}
    assert full_reward(recipe({**GRPO, "reward_function": rewards}).held_out_rewards) == 2.0


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"bypass_reward": True, "reward_function": {"exact_match": 2.0}}, {"exact_match": 2.0}),
        ({"bypass_reward": True}, {}),
        ({"reward_function": {"exact_match": 0.0}}, {"exact_match": 0.0}),
    ],
)
def test_accuracy_is_that_of_a_reward_that_was_named_or_none(
    settings: dict[str, Any], rewards: dict[str, float]
) -> None:
    unnamed = {name: value for name, value in GRPO.items() if name != "reward_function"}
    asked = Recipe.model_validate(recipe({**unnamed, **settings}).model_dump())  # as a worker reads it
    assert asked.held_out_rewards == rewards
    assert full_reward(rewards) == (2.0 if any(rewards.values()) else None)
    group = ScoredGroup(scored(0.0, 0.0).group, (Score(0.0), Score(0.0)))
    found = completion_metrics([group], partial(full_reward, rewards))
    expected = 0.0 if any(rewards.values()) else None
    assert found.get("validation/accuracy") == found.get("validation/pass@2") == expected


def test_several_completions_give_pass_at_k_over_prompts_with_so_many_valid_ones() -> None:
    found = completion_metrics([scored(1.0, 0.0, 0.0, 0.0), scored(1.0, 0.5, None, None)], lambda source, metrics: 1.0)
    assert found["validation/accuracy"] == pytest.approx(2 / 6)
    assert found["validation/pass@2"] == pytest.approx((3 / 6 + 1) / 2)
    assert found["validation/pass@4"] == 1.0 and "validation/pass@8" not in found
    assert found["validation/reward/right"] == pytest.approx(2.5 / 6)
    assert found["validation/reward_stderr"] == pytest.approx(0.25)
    one = completion_metrics([scored(1.0)], lambda source, metrics: 1.0)
    assert "validation/pass@2" not in one and "validation/reward_stderr" not in one, "one prompt shows no error"


@pytest.mark.parametrize(
    ("weights", "values", "is_right"),
    [
        ({"a.py:math": 1.0, "a.py:code": 1.0}, {"math": 1.0}, True),  # the other one returned None, as in TRL
        ({"a.py:math": 1.0, "a.py:code": 1.0}, {"math": 0.5}, False),
        ({"a.py:math": 1.0, "a.py:code": 1.0}, {"math": 1.0, "code": 0.0}, False),
        ({"a.py:right": 1.0, "a.py:repeats": -1.0}, {"right": 0.0, "repeats": 0.0}, False),
        ({"a.py:right": 1.0, "a.py:repeats": -1.0}, {"right": 1.0, "repeats": 0.3}, True),
        ({"a.py:right": 1.0, "a.py:form": 1.0, "a.py:long": -1.0}, {"right": 0.0, "form": 1.0, "long": 0.0}, False),
        ({"a.py:repeats": -1.0}, {"repeats": 0.0}, None),
        ({"a.py:logged": 0.0}, {"logged": 0.0}, None),
    ],
)
def test_a_completion_is_right_if_each_reward_that_applies_to_it_is_1_whatever_it_loses(
    weights: dict[str, float], values: dict[str, float], is_right: bool | None, tmp_path: Path
) -> None:
    total = sum(weight * values.get(name.partition(":")[2], 0.0) for name, weight in weights.items())
    group = ScoredGroup(Group(PROMPTS[0], (COMPLETION,), 0), (Score(total, values),))
    expected = None if is_right is None else float(is_right)
    assert completion_metrics([group], partial(full_reward, weights)).get("validation/accuracy") == expected
    rates = PassRates(partial(full_reward, weights))
    rates.add([group])
    rates.write(tmp_path, PROMPTS[:1])
    assert json.loads((tmp_path / PASS_RATES_FILE).read_text())["pass_rate"] == expected
    sampled = SampledPrompt(0, [ScoredCompletion("4", [], total, values, "", 0, 1, True)])
    assert compute_pass_rate(sampled, partial(full_reward, weights, "")) == expected
    if len(values) == len(weights):  # a reward service always returns all scores
        functions = [{"name": name.partition(":")[2], "weight": weight} for name, weight in weights.items()]
        service = RemoteRewardConfig.model_validate({"reward_fns": functions})
        assert completion_metrics([group], partial(full_reward, service)).get("validation/accuracy") == expected


def test_accuracy_is_left_out_where_no_data_set_with_a_full_reward_has_a_valid_completion() -> None:
    groups = [
        scored(value, prompt=Prompt(0, (1,), "?", "4", source=source))
        for source, value in (("sums", None), ("style", 0.5))
    ]
    found = completion_metrics(groups, lambda source, metrics: {"sums": 1.0, "style": None}[source])
    assert "validation/accuracy" not in found and found["validation/reward"] == 0.5


def test_held_out_rows_fill_a_forward_pass_of_each_data_parallel_rank(tmp_path: Path) -> None:
    data = SimpleNamespace(size=lambda: 4)
    rank: Any = SimpleNamespace(adapter=SimpleNamespace(mesh=SimpleNamespace(dp=data)))
    algorithm: Any = SimpleNamespace(measure=lambda chunks, view, size: {"chunks": [len(chunk) for chunk in chunks]})

    class Rows(list[int]):
        has_sample_pairs = False

        def samples(self, positions: range) -> list[int]:
            return list(positions)

    held_out: Any = Rows(range(19))
    workspace = Workspace(tmp_path)
    assert row_metrics(workspace, rank, algorithm, held_out, 2) == {"validation/chunks": [8, 8, 3]}
