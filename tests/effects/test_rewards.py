"""Keys of rewards: what a completion scores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.rewards.base import RewardConfig
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.train.measure import open_rewards
from cosmos_core.types import Completion, Group, Prompt, Score, Segment
from tests.effects.change import GRPO, Change, changes
from tests.tiny_pipelines import _wan_vae
from tests.unit.reward_server import RewardServer, Sent, reply, serving

PROGRAM = """
import asyncio, os

def points(completion, reference, custom):
    return custom.get("points", 0.0)

def variable(completion, reference):
    return float(os.environ.get("VARIABLE", 0))

def together(completion, reference, prompt):
    return [float(len(completion))] * len(reference) if prompt == ["6 * 7 ="] else 0.25

async def slow(completion, reference):
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
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})  # one process


def score(recipe: Recipe, folder: Path, weights: RewardConfig) -> Score:
    with open_rewards(recipe.reward_settings, weights, lambda: None) as score_groups:
        return score_groups([GROUP])[0].scores[0]


def trained(recipe: Recipe, folder: Path) -> Score:
    policy = recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)
    return score(recipe, folder, policy.rewards)


def mine(name: str) -> dict[str, Any]:
    return {**GRPO, "train.train_policy.reward_function": f"./mine.py:{name}"}


USUAL: dict[str, float | None] = {}


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
    if (key := repr(change.before)) not in USUAL:
        USUAL[key] = trained(change.before, tmp_path).value
    assert (USUAL[key], trained(change.after, tmp_path).value) == expected


@changes(Change("validation.reward_function", {"exact_match": 2}, mine("points")))
def test_it_changes_the_score_of_a_held_out_answer(change: Change, tmp_path: Path) -> None:
    before, after = (score(side, tmp_path, side.held_out_rewards).value for side in (change.before, change.after))
    assert (before, after) == (0.0, 2.0)


REMOTE = {
    **GRPO, "train.train_policy.use_remote_reward": True,
    "train.train_policy.remote_reward.reward_fns": [{"name": "a", "clip_max": 50.0, "clip_min": -50.0}],
    "train.train_policy.remote_reward.reward_clip_max": 40.0,
    "train.train_policy.remote_reward.reward_clip_min": -40.0,
}  # fmt: skip
VALIDATION = REMOTE | {
    key.replace("train.train_policy.", "validation."): REMOTE[key] for key in REMOTE if ".remote_reward." in key
}
LOCAL = {**REMOTE, "train.train_policy.use_remote_reward": False, "train.train_policy.reward_function": "exact_match"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardServer]:
    """A service whose functions give 30 under the key `a`, and -45 under `low`."""
    said = {"a": 30.0, "low": -45.0}
    with serving(score=lambda fields, array, name: {key: [v] * len(array) for key, v in said.items()}) as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        yield found


SAID: dict[str, float | None] = {}


def said_of(recipe: Recipe, folder: Path, weights: RewardConfig) -> float | None:
    """The score by these weights, asked for once: training and validation ask in the same way."""
    if (key := str(weights)) not in SAID:
        SAID[key] = score(recipe, folder, weights).value
    return SAID[key]


def of_scores(table: str, base: dict[str, Any]) -> list[tuple[Change, float]]:
    """Changes of what is made of the scores, for training or for validation, and what 30 becomes with each."""
    functions = f"{table}.reward_fns"
    return [
        (Change(f"{table}.scale", 2.0, base), 60.0),
        (Change(f"{functions}.weight", 0.5, base), 15.0),
        (Change(f"{functions}.name", "low", base), -40.0),
        (Change(f"{functions}.score_key", "a+low", base), -15.0),
        (Change(f"{functions}.clip_max", 20.0, base), 20.0),
        (Change(f"{functions}.clip_min", 35.0, base), 35.0),
        (Change(f"{table}.reward_clip_max", 20.0, base), 20.0),
        (Change(f"{table}.reward_clip_min", 35.0, base), 35.0),
    ]


@changes(
    (Change("train.train_policy.use_remote_reward", True, LOCAL), 30.0),
    *of_scores("train.train_policy.remote_reward", REMOTE),
    *of_scores("validation.remote_reward", VALIDATION),
)
def test_it_changes_the_score_of_the_service(
    change: Change, expected: float, tmp_path: Path, server: RewardServer
) -> None:
    is_of_validation = change.key.startswith("validation.")
    before, after = change.before, change.after
    training = [said_of(side, tmp_path, side.training_rewards) for side in (before, after)]
    validation = [said_of(side, tmp_path, side.held_out_rewards) for side in (before, after)]
    assert validation == [1.0 if change.key.endswith("use_remote_reward") else 30.0, expected]
    assert training == ([30.0, 30.0] if is_of_validation else validation), "validation takes over what it does not have"


@changes(Change("validation.use_remote_reward", False, REMOTE))
def test_it_changes_nothing_but_whether_validation_may_ask_where_training_does(change: Change) -> None:
    assert change.before.validation.use_remote_reward is True
    with pytest.raises(ValidationError, match=r"must equal train\.train_policy\.use_remote_reward"):
        _ = change.after


def under(table: str) -> list[tuple[Change, Any]]:
    """The same changes of training and of validation."""
    table = f"{table}.remote_reward"
    functions = {f"{table}.reward_fns": [{"name": "a"}]}
    base = {**GRPO, "train.train_policy.use_remote_reward": True, **functions}
    silent = {**base, f"{table}.reward_fns": [{"name": "never"}]}
    silent |= {f"{table}.timeout_seconds": 0.5, f"{table}.retries": 1}
    patient = {**silent, f"{table}.timeout_seconds": 2.0}  # all requests are sent in time on a busy machine too
    return [
        (Change(f"{table}.batch_size", 2, base), ("enqueued", 4, 2)),
        (Change(f"{table}.timeout_seconds", 0.7, silent), ("error", "0.5 s", "0.7 s")),
        (Change(f"{table}.retries", 0, patient), ("enqueued", 8, 4)),
        (Change(f"{table}.missing_score", "drop_group", patient), ("enqueued", 8, 4)),
        (Change(f"{table}.max_in_flight", 1, {**silent, f"{table}.retries": 0}), ("in flight", 4, 1)),
    ]


@changes(*under("train.train_policy"), *under("validation"))
def test_it_changes_how_the_service_is_asked(
    change: Change, expected: tuple[str, Any, Any], tmp_path: Path, server: RewardServer
) -> None:
    server.on_pull = lambda sent: reply(400, {"X-Reward-State": "pending"}) if sent.form["type"] == "never" else None
    what, *numbers = expected
    name = "held_out_rewards" if change.key.startswith("validation.") else "training_rewards"
    assert [
        told(side, tmp_path, getattr(side, name), server)[what] for side in (change.before, change.after)
    ] == numbers


def of_videos(table: str) -> Change:
    functions = {f"{table}.remote_reward.reward_fns": [{"name": "a"}]}
    base = {**GRPO, "train.train_policy.use_remote_reward": True, **functions}
    return Change(f"{table}.remote_reward.video_vae", "vae", base)


@changes(of_videos("train.train_policy"), of_videos("validation"))
def test_it_changes_what_the_service_is_sent_of_a_video(change: Change, tmp_path: Path, server: RewardServer) -> None:
    _wan_vae().save_pretrained(tmp_path / "vae")
    name = "held_out_rewards" if change.key.startswith("validation.") else "training_rewards"
    for side in (change.before, change.after):
        weights = getattr(side, name)
        assert isinstance(weights, RemoteRewardConfig)
        video = np.zeros((5, 32, 32, 3), np.uint8)
        RemoteRewards(weights, server.service).score([{"prompt": "", "media": video}])
    found = [(fields["media_type"], array.shape) for fields, array in (sent.decoded for sent in server.enqueued)]
    assert found == [("video", (1, 3, 5, 32, 32)), ("latent", (1, 16, 2, 4, 4))]


TOLD: dict[str, dict[str, Any]] = {}


def told(recipe: Recipe, folder: Path, weights: RewardConfig, server: RewardServer) -> dict[str, Any]:
    """What was asked for four completions, and what became of the first of them."""
    if (key := str(weights)) in TOLD:  # training and validation ask in the same way
        return TOLD[key]
    server.sent.clear()
    with open_rewards(recipe.reward_settings, weights, lambda: None) as score_groups:
        first, *_ = score_groups([GROUP] * 4)
    waiting: set[str] = set()
    most = 0
    for sent in server.sent:
        if sent in server.enqueued:
            waiting = {key for key in waiting if key in asked_after(sent, server)}
            waiting.add(sent.headers["Idempotency-Key"])
            most = max(most, len(waiting))
    error = first.scores[0].error.rpartition("after ")[2]
    TOLD[key] = {"enqueued": len(server.enqueued), "in flight": most, "error": error}
    return TOLD[key]


def asked_after(sent: Sent, server: RewardServer) -> set[str]:
    """The requests whose scores were asked for after this one arrived."""
    later = server.sent[server.sent.index(sent) :]
    return {each.form["uuid"] for each in later if each.path.endswith("/pull")}
