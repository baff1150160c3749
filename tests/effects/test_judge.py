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
from tests.conftest import one_certificate
from tests.effects.change import GRPO, Change, changes
from tests.effects.test_rewards import GROUP
from tests.unit.chat_server import chat_server

SERVED = {**GRPO, "judge.endpoint": "http://elsewhere/v1", "judge.model": "m", "judge.template": "{completion}"}


@pytest.fixture(autouse=True)
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One, and not all, for the client that each request has."""
    monkeypatch.setenv("SSL_CERT_FILE", *one_certificate(tmp_path).values())


def asked(recipe: Recipe, url: str = "", *, times: int = 1) -> tuple[float, dict[str, Any], int]:
    """Return the reward of a completion that is judged so often, the first request, and the number of requests."""
    with chat_server(complete=lambda request: '{"reason": "ok", "score": 4}') as (own, requests):
        config = recipe.judge.model_dump() | {"endpoint": url or own}
        for _ in range(times):
            [result] = asyncio.run(judge(["p"], ["c"], ["r"], config))
        assert isinstance(result, tuple)
        return result[0], requests[0], len(requests)


_USUAL: dict[str, dict[str, Any]] = {}


def usual(recipe: Recipe) -> dict[str, Any]:
    """The request of a recipe, made once."""
    if (key := recipe.judge.model_dump_json()) not in _USUAL:
        _USUAL[key] = asked(recipe)[1]
    return _USUAL[key]


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
    before, after = usual(change.before), asked(change.after)[1]
    assert {key for key in before if before[key] != after[key]} == {expected}


@changes(Change("judge.highest_score", 5, SERVED), Change("judge.cache", False, SERVED))
def test_it_changes_the_reward_or_the_number_of_requests(
    change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sides = (asked(side, times=2) for side in (change.before, change.after))
    (value, _, count), (changed_value, _, changed_count) = sides
    assert (value, count) == (0.4, 1)
    assert (changed_value, changed_count) == ((0.8, 1) if change.key.endswith("score") else (0.4, 2))


@changes(Change("judge.endpoint", "http://127.0.0.1:9/v1", GRPO))
def test_it_changes_which_server_judges(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_core.rewards.judge._MAX_RETRIES", 0)
    with pytest.raises(Exception, match="Connection error"):
        asked(change.after, url=change.after.judge.endpoint)
    assert asked(change.before.copy_with(judge=change.before.judge.copy_with(cache=False)))[0] == 0.4


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
            recipe = recipe.copy_with(judge=recipe.judge.copy_with(endpoint=url))
            with open_rewards(recipe.reward_settings, WEIGHTS, lambda: None) as score_groups:
                scores.append(score_groups([GROUP])[0].scores[0])
        is_over.set()
    assert [score.value for score in scores] == [None, 0.4]
    assert scores[0].error == "judge: not done in 0.5 s"
