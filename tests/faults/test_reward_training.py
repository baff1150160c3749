"""A training whose rewards come from a service learns the same, to the bit, as one that scores in its own processes."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import RewardError
from cosmos_core.launch.managed_service import managed_reward_service
from cosmos_core.rewards.exchange import ENQUEUE_URL_VARIABLE, FETCH_URL_VARIABLE, TOKEN_VARIABLE
from cosmos_core.rewards.service.config import read_config
from cosmos_core.run.stage import Stage
from cosmos_core.train.check import check_rewards
from cosmos_core.train.setup import train
from tasks.kinds import all_kinds
from tests.acceptance import digits_served
from tests.effects.change import GRPO, recipe, stage_of
from tests.faults.reward_service import running
from tests.unit.test_flow_training import LORA, TRAININGS, Inputs, metrics_of

REMOTE = {
    "train.train_policy.use_remote_reward": True,
    "train.train_policy.remote_reward.reward_fns": [{"name": "red"}],
    "train.train_policy.remote_reward.batch_size": 3,
}
SETTINGS = {
    **TRAININGS["nft"], **LORA, "train.epoch": 1, "train.ckpt.enable_checkpoint": False,
    "policy.diffusers.sample.num_steps": 2,
}  # fmt: skip


KILLING = """
import functools, os, runpy, signal
from pathlib import Path

as_usual = runpy.run_path(str(Path(__file__).with_name("reward.py")))["red"]
calls = 0


@functools.wraps(as_usual)
def red(*arguments, **fields):
    global calls
    calls += 1
    marker = Path(__file__).with_name(f"killed at {calls}")
    if calls in {2, 7} and not marker.exists():
        marker.touch()
        os.kill(os.getppid(), signal.SIGKILL)
    return as_usual(*arguments, **fields)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def expected(inputs: Inputs) -> list[dict[str, Any]]:
    """What a training says whose reward is in its own processes."""
    here = inputs.stage(inputs.folder / "here", **SETTINGS)
    train(here)
    found = said_by(here)
    assert len(found) == 3 and found[0]["reward/mean"] > 0
    return found


def said_by(stage: Stage) -> list[dict[str, Any]]:
    keys = ("loss", "reward/mean", "reward/std", "reward/red", "reward/invalid", "grad_norm")
    return [{key: line.get(key) for key in keys} for line in metrics_of(stage)]


def test_a_service_beside_the_stage_that_is_killed_is_started_again_and_no_score_is_lost(
    inputs: Inputs, expected: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_bytes((inputs.folder / "reward.py").read_bytes())
    (tmp_path / "killing.py").write_text(KILLING)
    file = tmp_path / "rewards.toml"
    file.write_text(f'[[reward_args]]\nreward_type = "red"\nentry = "{tmp_path / "killing.py"}:red"\nbatch_size = 4\n')
    stage = inputs.stage(tmp_path / "there", **SETTINGS, **REMOTE)
    with managed_reward_service(str(file), stage.path) as found:
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        train(stage)
    assert said_by(stage) == expected
    assert len(list(tmp_path.glob("killed at *"))) == 2
    noted = json.loads((stage.path / "reward_service.json").read_text())
    assert noted["restarts"] == 2 and noted["services"][0]["status"] == "ok"


@pytest.mark.full
def test_it_learns_the_same_to_the_bit_while_the_reward_is_killed(
    inputs: Inputs, expected: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewards = {"reward_args": [{"reward_type": "red", "entry": f"{inputs.folder / 'reward.py'}:red"}]}
    with running(tmp_path / "service", rewards) as server:
        for name, path in ((ENQUEUE_URL_VARIABLE, "enqueue"), (FETCH_URL_VARIABLE, "pull")):
            monkeypatch.setenv(name, f"{server.url}/api/reward/{path}")
        monkeypatch.setenv(TOKEN_VARIABLE, server.token)
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
    assert said_by(there) == expected


def test_the_digits_demo_may_have_its_classifier_behind_a_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m tests.acceptance digits_served` runs it; this is what it runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.toml").write_text(digits_served.REWARDS)
    (tmp_path / "digits.toml").write_text(digits_served.served(digits_served.CONFIG.read_text()))
    pipeline = load_pipeline(tmp_path / "digits.toml", (), all_kinds())
    asked = pipeline.recipes["nft"].training_rewards
    assert isinstance(asked, RemoteRewardConfig) and [each.name for each in asked.reward_fns] == ["likeness"]
    assert pipeline.stage("nft").reward_service == str(tmp_path / "rewards.toml")
    assert [reward.reward_type for reward in read_config(tmp_path / "rewards.toml").rewards] == ["likeness"]


def test_without_a_service_the_stage_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENQUEUE_URL_VARIABLE, raising=False)
    with pytest.raises(
        RewardError, match=f"use_remote_reward = true: set {ENQUEUE_URL_VARIABLE} and {FETCH_URL_VARIABLE} in the"
    ):
        train(Inputs(tmp_path).stage(tmp_path / "there", **SETTINGS, **REMOTE))


def test_check_looks_whether_the_service_of_a_stage_has_its_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENQUEUE_URL_VARIABLE, raising=False)
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "blue"\n')
    plain = stage_of(tmp_path / "stage", recipe({**GRPO, **REMOTE}), kind="rl")
    with pytest.raises(RewardError, match=f"set {ENQUEUE_URL_VARIABLE}"):
        check_rewards(plain)
    own = replace(plain, config=plain.config.model_copy(update={"reward_service": str(tmp_path / "rewards.toml")}))
    with pytest.raises(RewardError, match="does not serve 'red'; known: blue"):
        check_rewards(own)
    (tmp_path / "rewards.toml").write_text('[[reward_args]]\nreward_type = "red"\n')
    assert check_rewards(own) == [f"rewards red of {tmp_path / 'rewards.toml'}"]
    for path, said in (("absent.pth", "no such file"), (str(inputs_vae(tmp_path)), "is of the class 'AutoencoderKL'")):
        vae = {"train.train_policy.remote_reward.video_vae": path}
        encodes = replace(own, recipe=recipe({**GRPO, **REMOTE, **vae}))
        with pytest.raises(RewardError, match=f"remote_reward.video_vae = .*{said}"):
            check_rewards(encodes)


def inputs_vae(folder: Path) -> Path:
    (folder / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    return folder
