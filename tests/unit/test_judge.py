"""The reward `judge`: scores of a server, replies without a score, the cache, and a server that is away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.judge import JudgeConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import StageContext
from cosmos_core.rewards.judge import _parse_judge_score
from cosmos_core.rewards.runner import RewardRunner, _RewardResult, _score_completions
from tasks.kinds import all_kinds
from tests.conftest import one_certificate
from tests.unit.chat_server import chat_server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MY_KEY", "secret")
    monkeypatch.setenv("SSL_CERT_FILE", *one_certificate(tmp_path).values())  # each request has a client of its own
    return tmp_path / "cache"


def requests_of(url: str, texts: list[str], prompt: str = "2 + 2?", **settings: Any) -> list[dict[str, Any]]:
    config = JudgeConfig(endpoint=url, model="m", key_env="MY_KEY", **settings).model_dump()
    fields = {"reference": "four {prompt}", "prompt": prompt, "judge_config": config}
    return [{"to_be_evaluated": text, **fields} for text in texts]


def scores(url: str, texts: list[str], **settings: Any) -> list[_RewardResult]:
    """Return the scores of completions of one prompt, as a process of rewards finds them."""
    return _score_completions("judge", requests_of(url, texts, **settings), True)


def judged(request: dict[str, Any]) -> str:
    """Give 5 to a response with a 4, a score out of range to one with a 9, and no JSON to others."""
    text = request["messages"][1]["content"].rpartition("Response:")[2]
    return '```json\n{"reason": "ok", "score": 5}\n```' if "4" in text else '{"score": 99}' if "9" in text else "hm"


def test_scores_are_divided_by_the_highest_and_replies_without_one_are_invalid() -> None:
    judge = RewardRunner(
        {"judge": 1.0}, timeout_seconds=60, num_workers=1, env_variable_names=("MY_KEY", "XDG_CACHE_HOME")
    )
    with chat_server(complete=judged) as (url, requests), judge as runner:
        [[four, nine, other]] = runner._score_requests([requests_of(url, ["4", "9", "?"])])
    assert four.value == 0.5 and four.metrics["judge/prompt_tokens"] == 7
    assert nine.value is None and "score 99; the rule is a number from 0 to 10" in nine.error
    assert other.value is None and "replied 'hm', which is no JSON with a score" in other.error
    assert {request["key"] for request in requests} == {"Bearer secret"}
    assert all(text in requests[0]["messages"][1]["content"] for text in ("2 + 2?", "four {prompt}"))
    assert requests[0]["response_format"]["json_schema"]["schema"]["properties"]["score"]["maximum"] == 10


def test_what_one_completion_provokes_costs_its_score_alone_and_placeholders_of_texts_stay() -> None:
    def complete(request: dict[str, Any]) -> str | bytes:
        is_bad = "no chat" in request["messages"][1]["content"]
        return b'{"choices": null}' if is_bad else '<think>{}</think>{"reason": "ok", "score": 5}'

    with chat_server(complete=complete) as (url, requests):
        good, bad = scores(url, ["good", "no chat"], prompt="2 + {completion}?")
    assert good.raw_score == 0.5 and bad.raw_score is None and "TypeError" in bad.error
    assert all("2 + {completion}?" in request["messages"][1]["content"] for request in requests)
    with chat_server(status=400, complete=judged) as (url, _):
        [score] = scores(url, ["4"])
    assert score.is_permanent_error and "BadRequestError: Error code: 400" in score.error


def test_a_request_that_a_busy_server_refuses_costs_its_score_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is still limited after all attempts, and a reply that a proxy cuts off."""
    monkeypatch.setattr("cosmos_core.rewards.judge._MAX_RETRIES", 0)
    with chat_server(first=1, complete=judged) as (url, _):
        found = scores(url, ["4", "4", "4"])
    [refused] = [score for score in found if score.raw_score is None]
    assert not refused.is_permanent_error and "InternalServerError: Error code: 503" in refused.error
    assert [score.raw_score for score in found if score is not refused] == [0.5, 0.5]
    with chat_server(complete=lambda request: judged(request) if "4" in str(request) else b'{"choices": [') as (url, _):
        good, cut_off = scores(url, ["4", "?"])
    assert good.raw_score == 0.5 and cut_off.raw_score is None and "JSONDecodeError" in cut_off.error


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('The set {1, 2} is \\boxed{4}.\n```json\n{"reason": "ok", "score": 5}\n```\nI hope {this} helps.', 5.0),
        ('{"reason": "one line\nand another with } in it", "score": 5}', 5.0),
        ('{"criteria": {"score": 2}, "score": 5}', 5.0),
        ('{"criteria": {"score": 5}}', None),
        ('{"score": 3}, or rather {"score": 5}', None),
    ],
)
def test_a_score_may_have_text_with_braces_around_it_and_is_one(reply: str, score: float | None) -> None:
    found = _parse_judge_score(reply, 10)
    assert found == score if score else "is no JSON with a score" in str(found)


def test_parts_of_a_prompt_are_shown_as_text_and_no_column_replaces_the_reference() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "How\nmany?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "references": "of the text"}
    fields = {"metadata": row, "turns": [{"role": "assistant", "content": "4"}]}
    with chat_server(complete=judged) as (url, requests):
        [request] = requests_of(url, ["4"])
        [found] = _score_completions("judge", [{**request, **fields}], True)
    expected = "Prompt:\n[image]How\nmany?\n\nReference answer:\nfour {prompt}\n\nResponse:\n4"
    assert (found.raw_score, requests[0]["messages"][1]["content"]) == (0.5, expected)


def test_the_same_completion_is_judged_once_unless_the_rubric_changes(cache: Path) -> None:
    with chat_server(complete=judged) as (url, requests):
        first, again = scores(url, ["4"]), scores(url, ["4"])
        assert len(requests) == 1 and again[0].raw_score == first[0].raw_score == 0.5
        assert again[0].metrics["prompt_tokens"] == 0
        scores(url, ["4"], rubric="Be strict.")
        scores(url, ["4"], cache=False)
        assert len(requests) == 3
    [file, _] = sorted((cache / "cosmos-posttrain" / "judge").iterdir())
    assert "secret" not in file.read_text() and json.loads(file.read_text())["text"]
    file.write_text("torn")
    with chat_server(complete=judged) as (url, requests):
        assert scores(url, ["4"])[0].raw_score == 0.5


def test_a_cache_that_cannot_be_written_costs_no_score(cache: Path) -> None:
    cache.write_text("a file in place of the folder")
    with chat_server(complete=judged) as (url, _):
        [found] = scores(url, ["4"])
    assert (found.raw_score, found.error) == (0.5, "")


def test_a_judge_that_is_away_makes_completions_invalid_and_a_retry_sensible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmos_core.rewards.judge._MAX_RETRIES", 0)
    with chat_server() as (url, _):
        pass
    [score] = scores(url, ["4"])
    assert score.raw_score is None and not score.is_permanent_error and "Connection" in score.error
    with chat_server(status=404, complete=judged) as (url, _):
        [score] = scores(url, ["4"])
    assert score.raw_score is None and score.is_permanent_error and "no such model" in score.error


def test_a_recipe_without_a_server_is_refused() -> None:
    policy = {"train": {"train_policy": {"type": "grpo", "reward_function": "judge"}}}
    made = Recipe.model_validate(policy)
    assert "needs judge.endpoint" in "".join(
        made.judge.unsupported_setting_errors(StageContext(made, all_kinds()["rl"]))
    )
    assert made.secret_env_names == ("OPENAI_API_KEY",)
    named = Recipe.model_validate({**policy, "judge": {"endpoint": "http://a/v1", "model": "m"}})
    assert not [*named.judge.unsupported_setting_errors(StageContext(named, all_kinds()["rl"]))]
    blind = Recipe.model_validate(
        {**policy, "judge": {"endpoint": "http://a/v1", "model": "m", "template": "{answer}"}}
    )
    [error] = blind.judge.unsupported_setting_errors(StageContext(blind, all_kinds()["rl"]))
    assert error.startswith("judge.template has no {completion}")
    bypassed = {"train": {"train_policy": {"type": "grpo", "reward_function": "judge", "bypass_reward": True}}}
    assert Recipe.model_validate(bypassed).uses_judge, "validation keeps its reward"
