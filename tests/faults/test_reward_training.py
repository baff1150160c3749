"""A training whose rewards come from a service learns the same, to the bit, as one that scores in its own processes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_core.errors import RewardError
from cosmos_core.rewards.exchange import ENQUEUE_URL, FETCH_URL, TOKEN
from cosmos_core.train.check import look_at_rewards
from cosmos_core.train.setup import train
from tests.effects.change import GRPO, recipe, stage_of
from tests.faults.reward_service import running
from tests.unit.test_flow_training import LORA, TRAININGS, Inputs, metrics_of

REMOTE = {
    "train.train_policy.use_remote_reward": True,
    "train.train_policy.remote_reward.reward_fns": [{"name": "red"}],
    "train.train_policy.remote_reward.batch_size": 3,
}
SETTINGS = {**TRAININGS["nft"], **LORA, "train.epoch": 1}


def test_it_learns_the_same_to_the_bit_while_the_reward_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = Inputs(tmp_path)
    here = inputs.stage(tmp_path / "here", **SETTINGS)
    train(here)
    rewards = {"reward_args": [{"reward_type": "red", "entry": f"{tmp_path / 'reward.py'}:red"}]}
    with running(tmp_path / "service", rewards) as server:
        for name, path in ((ENQUEUE_URL, "enqueue"), (FETCH_URL, "pull")):
            monkeypatch.setenv(name, f"{server.url}/api/reward/{path}")
        monkeypatch.setenv(TOKEN, server.token)
        is_done = threading.Event()

        def kill() -> None:
            while not is_done.wait(1.0):
                for process in server.workers():
                    process.kill()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            there = inputs.stage(tmp_path / "there", **SETTINGS, **REMOTE)
            train(there)
        finally:
            is_done.set()
            killer.join()
    keys = ("loss", "reward/mean", "reward/std", "reward/red", "reward/invalid", "grad_norm")
    ours, theirs = ([{key: line.get(key) for key in keys} for line in metrics_of(stage)] for stage in (here, there))
    assert ours == theirs and len(ours) == 3
    assert ours[0]["reward/mean"] > 0


def test_without_a_service_the_stage_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENQUEUE_URL, raising=False)
    with pytest.raises(RewardError, match=f"use_remote_reward = true: set {ENQUEUE_URL} and {FETCH_URL} in the"):
        train(Inputs(tmp_path).stage(tmp_path / "there", **SETTINGS, **REMOTE))


def test_check_looks_whether_the_service_of_a_stage_has_its_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENQUEUE_URL, raising=False)
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "blue"\n')
    plain = stage_of(tmp_path / "stage", recipe({**GRPO, **REMOTE}), kind="rl")
    with pytest.raises(RewardError, match=f"set {ENQUEUE_URL}"):
        look_at_rewards(plain)
    own = replace(plain, config=plain.config.model_copy(update={"reward_service": str(tmp_path / "rewards.toml")}))
    with pytest.raises(RewardError, match="does not serve 'red'; known: blue"):
        look_at_rewards(own)
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "red"\n')
    assert look_at_rewards(own) == [f"rewards red of {tmp_path / 'rewards.toml'}"]
