"""Keys of `[sample]`: which completions become rows, and which server completes the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.sample.endpoint import EndpointClient
from cosmos_core.sample.records import SampledPrompt, ScoredCompletion
from cosmos_core.sample.selection import compute_pass_rate, make_rows, select_completions
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.types import Prompt
from tests.effects.change import GRPO, Change, changes, stage_of
from tests.unit.chat_server import chat_server

ALL = {**GRPO, "sample.keep.best": 0}
PAIRS = {**ALL, "sample.pairs": "best-worst"}


def candidate(text: str, reward: float, seed: int, *, is_finished: bool = True) -> ScoredCompletion:
    return ScoredCompletion(text, [{"role": "assistant", "content": text}], reward, {}, "", seed, 1, is_finished)


EASY = SampledPrompt(0, [candidate("a", 1.0, 0), candidate("a", 1.0, 1), candidate("b", 1.0, 2)])
HARD = SampledPrompt(1, [candidate("c", 0.5, 3), candidate("d", 0.0, 4), candidate("e", 1.0, 5, is_finished=False)])


def texts(recipe: Recipe) -> str:
    """Return the texts of the rows of an easy and a hard prompt; of a pair both."""
    rows: list[dict[str, Any]] = []
    for sampled in (EASY, HARD):
        passing = select_completions(sampled, recipe.sample.keep, compute_pass_rate(sampled, lambda rewards: 1.0), 0)
        rows += make_rows(sampled, [], recipe.sample, passing, {})
    turns = [row[key] for row in rows for key in ("conversations", "chosen", "rejected") if key in row]
    return "".join(turn["content"] for each in turns for turn in each)


@changes(
    (Change("sample.keep.best", 2, ALL), ("abcd", "abcd")),
    (Change("sample.keep.best", 1, ALL), ("abcd", "ac")),
    (Change("sample.keep.min_reward", 0.5, ALL), ("abcd", "abc")),
    (Change("sample.keep.unique", False, ALL), ("abcd", "aabcd")),
    (Change("sample.keep.finished", False, ALL), ("abcd", "abecd")),
    (Change("sample.keep.max_per_prompt", 1, ALL), ("abcd", "bd")),
    (Change("sample.keep.min_pass_rate", 0.5, ALL), ("abcd", "ab")),
    (Change("sample.keep.max_pass_rate", 0.5, ALL), ("abcd", "cd")),
    (Change("sample.pairs", "best-worst", ALL), ("abcd", "cd")),
    (Change("sample.min_margin", 0.5, PAIRS), ("cd", "")),
)
def test_it_changes_which_completions_are_rows(change: Change, expected: tuple[str, str]) -> None:
    assert (texts(change.before), texts(change.after)) == expected


def requests_of(recipe: Recipe, path: Path, model: Path, *, url: str = "", meet_seconds: float = 0.0) -> list[Any]:
    """Return the requests for two prompts to a server, which is at `url` if the recipe does not name it."""
    with chat_server(meet_seconds=meet_seconds) as (own, requests):
        config = recipe.sample.copy_with(endpoint=url or own)
        endpoint = EndpointClient(
            stage_of(path, recipe.copy_with(sample=config), kind="sample", model=model), _one(recipe)
        )
        prompts = [(Prompt(i, (1,), "", ""), [{"role": "user", "content": "x"}]) for i in range(2)]
        endpoint.complete_prompts(prompts)
        endpoint.close()
        return requests


def _one(recipe: Recipe) -> Any:
    return make_training_sampling(recipe.copy_with(rollout=recipe.rollout.copy_with(n_generation=1)))


SERVED = {**GRPO, "sample.endpoint": "http://elsewhere/v1", "sample.endpoint_model": "m"}


@changes(
    Change("sample.endpoint_model", "other", SERVED),
    Change("sample.endpoint_key_env", "MY_KEY", SERVED),
    Change("sample.endpoint_requests", 1, SERVED),
)
def test_it_changes_what_a_server_is_asked(
    change: Change, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    is_parallel = change.key.endswith("requests")
    # Two requests at a time meet, however busy the machine is; one at a time never do.
    seconds = (60.0, 0.5) if is_parallel else (0.0, 0.0)
    seen = [
        {str(request[key]) for request in requests_of(recipe, tmp_path, model, meet_seconds=meet_seconds)}
        for recipe, meet_seconds in zip((change.before, change.after), seconds, strict=True)
        for key in ("model", "key", "met")
    ]
    assert seen[:3] == [{"m"}, {"Bearer none"}, {str(is_parallel)}]
    assert seen[3:] == [
        {"other" if change.key.endswith("model") else "m"},
        {"Bearer mine" if change.key.endswith("env") else "Bearer none"},
        {"False"},
    ]


@changes(Change("sample.endpoint", "http://127.0.0.1:9/v1", SERVED))
def test_it_changes_which_server_is_asked(change: Change, tmp_path: Path, model: Path) -> None:
    for recipe in (change.before, change.after):
        endpoint = EndpointClient(stage_of(tmp_path, recipe, kind="sample", model=model), _one(recipe))
        assert endpoint.url == recipe.sample.endpoint
        endpoint.close()
