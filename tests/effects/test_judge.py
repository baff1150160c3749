"""Keys of `[judge]`: what a judge is asked, and what its reply is worth."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.rewards.judge import judge
from cosmos_core.train.measure import open_rewards
from tests.effects.change import GRPO, Change, changes, stage_of
from tests.effects.test_rewards import GROUP
from tests.unit.chat_server import chat_server

SERVED = {**GRPO, "judge.endpoint": "http://elsewhere/v1", "judge.model": "m", "judge.template": "{completion}"}


def asked(recipe: Recipe, url: str = "") -> tuple[float, dict[str, Any], int]:
    """Return the reward of a completion that is judged twice, the first request, and the number of requests."""
    with chat_server(complete=lambda request: '{"reason": "ok", "score": 4}') as (own, requests):
        config = recipe.judge.model_dump() | {"endpoint": url or own}
        for _ in range(2):
            [result] = asyncio.run(judge(["p"], ["c"], ["r"], config))
        assert isinstance(result, tuple)
        return result[0], requests[0], len(requests)


@changes(
    (Change("judge.model", "other", SERVED), "model"),
    (Change("judge.rubric", "Be strict.", SERVED), "messages"),
    (Change("judge.template", "{prompt}", {**SERVED, "judge.template": "{completion}"}), "messages"),
    (Change("judge.temperature", 1.0, SERVED), "temperature"),
    (Change("judge.max_tokens", 9, SERVED), "max_tokens"),
    (Change("judge.key_env", "MY_KEY", SERVED), "key"),
)
def test_it_changes_the_request(change: Change, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (_, before, _), (_, after, _) = asked(change.before), asked(change.after)
    assert {key for key in before if before[key] != after[key]} == {expected}


@changes(Change("judge.highest_score", 5, SERVED), Change("judge.cache", False, SERVED))
def test_it_changes_the_reward_or_the_number_of_requests(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (value, _, count), (changed_value, _, changed_count) = asked(change.before), asked(change.after)
    assert (value, count) == (0.4, 1)
    assert (changed_value, changed_count) == ((0.8, 1) if change.key.endswith("score") else (0.4, 2))


@changes(Change("judge.endpoint", "http://127.0.0.1:9/v1", GRPO))
def test_it_changes_which_server_judges(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_core.rewards.judge._MAX_RETRIES", 0)
    with pytest.raises(Exception, match="Connection error"):
        asked(change.after, url=change.after.judge.endpoint)
    assert asked(change.before.derive(judge=change.before.judge.derive(cache=False)))[0] == 0.4


WEIGHTS = {"judge": 1.0}
IMPATIENT = {
    **SERVED, "train.train_policy.reward_function": WEIGHTS, "train.train_policy.reward_timeout_seconds": 0.1
}  # fmt: skip


@changes(Change("judge.timeout_seconds", 0.5, IMPATIENT))
def test_it_changes_how_long_a_slow_judge_is_waited_for(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    is_over = threading.Event()

    def complete(request: dict[str, Any]) -> str:
        is_over.wait(1.0)
        return '{"score": 4}'

    with chat_server(complete=complete) as (url, _):
        scores = []
        for recipe in (change.after, change.before):
            recipe = recipe.derive(judge=recipe.judge.derive(endpoint=url))
            with open_rewards(stage_of(tmp_path / "stage", recipe, kind="rl"), WEIGHTS) as score_groups:
                scores.append(score_groups([GROUP])[0].scores[0])
        is_over.set()
    assert [score.value for score in scores] == [None, 0.4]
    assert scores[0].error == "judge: not done in 0.5 s"
