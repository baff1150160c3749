"""A reward service that is started: beside a stage with a token under another name, tested by itself, refused."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tomli_w

from cosmos_core.config.schema.remote_reward import RemoteRewardConfig
from cosmos_core.errors import RewardError
from cosmos_core.launch.managed_service import managed_reward_service
from cosmos_core.rewards.exchange import read_service_endpoints
from cosmos_core.rewards.remote import RemoteRewards
from cosmos_core.rewards.reward_model import RewardInput, RewardModelSettings, ScoreColumns, load_scorer
from cosmos_core.rewards.service.__main__ import _announce_url
from cosmos_core.rewards.service.config import ServiceConfig, read_config
from cosmos_core.rewards.service.pool import RewardProcess
from cosmos_core.rewards.service.worker import _score_batch, make_reward_inputs
from cosmos_core.run.process import read_start_time
from tests.conftest import wait_until

OVERLONG = {"max_tokens": 100, "overlong": {"buffer_length": 40, "penalty_factor": 2.0}}


def test_a_stage_finds_its_service_whatever_variable_has_its_token(tmp_path: Path) -> None:
    file = tmp_path / "rewards.toml"
    reward = {"reward_type": "exact_match"}
    file.write_text(tomli_w.dumps({"authentication": "on", "token_env": "MY_TOKEN", "reward_args": [reward]}))
    asked = RemoteRewardConfig.model_validate({"reward_fns": [{"name": "exact_match"}], "timeout_seconds": 20.0})
    with managed_reward_service(str(file), tmp_path) as found:
        request = {"prompt": "", "to_be_evaluated": "42", "reference": "42"}
        [score] = RemoteRewards(asked, read_service_endpoints(found)).score([request])
    assert score.value == 1.0


def test_what_a_reward_started_in_a_session_of_its_own_ends_with_the_process_of_the_reward() -> None:
    async def start_and_kill() -> int:
        process: Any = RewardProcess(cast(Any, None), "cpu")
        command, pipe = ("sh", "-c", "setsid sleep 1000 & echo $!; wait"), asyncio.subprocess.PIPE
        process._process = await asyncio.create_subprocess_exec(*command, stdout=pipe, start_new_session=True)
        pid = int(await process._process.stdout.readline())
        wait_until(lambda: os.getsid(pid) == pid, 5, "it has a session of its own")
        await process.kill()
        return pid

    pid = asyncio.run(start_and_kill())
    wait_until(lambda: read_start_time(pid) is None, 5, "it has ended")


def test_code_and_models_are_found_beside_the_file_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a recipe, from whatever folder it is started."""
    for folder in ("project/weights", "project/own", "here/own"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "project" / "mine.py").touch()
    paths = [("mine.py:f", "weights"), ("gone.py:f", "org/model"), ("own:f", "own")]
    rewards = [{"reward_type": f"r{i}", "entry": entry, "model_path": model} for i, (entry, model) in enumerate(paths)]
    (tmp_path / "project" / "rewards.toml").write_text(tomli_w.dumps({"reward_args": rewards}))
    monkeypatch.chdir(tmp_path / "here")
    found = [(each.entry, each.model_path) for each in read_config(Path("../project/rewards.toml")).rewards]
    project = tmp_path / "here" / ".." / "project"
    assert found == [(f"{project}/mine.py:f", f"{project}/weights"), paths[1], ("own:f", f"{tmp_path}/here/own")]


def test_overlong_takes_from_options_what_no_request_has() -> None:
    reward = load_scorer("overlong", "", RewardModelSettings(options=OVERLONG))
    items = [RewardInput(info={"num_tokens": count}) for count in (60, 70, 100, 500)]
    assert reward.score(items) == {"overlong": [0.0, -0.5, -2.0, -2.0]}
    with pytest.raises(RewardError, match=r"^the reward 'overlong' needs options.overlong, which no request has; for"):
        load_scorer("overlong", "", RewardModelSettings(options={"max_tokens": 100}))


def test_the_judge_has_its_settings_in_recipes_alone() -> None:
    with pytest.raises(RewardError, match=r"^reward_type = 'judge' has its settings in recipes alone; name it in"):
        load_scorer("judge", "", RewardModelSettings())


def test_a_column_of_the_row_does_not_replace_the_turns_of_the_completion() -> None:
    turns = [{"role": "assistant", "content": "4"}]
    job = {"prompts": ["2 + 2?"], "media": "text", "completions": ["4"], "turns": [turns], "num_tokens": [3]}
    columns = {"turns": ["of another model"], "num_tokens": 99, "level": 1}
    [item] = make_reward_inputs({**job, "metadata": [columns]}, np.zeros((1, 0)))
    assert item.info == {"turns": turns, "num_tokens": 3, "level": 1}


def test_scores_that_are_no_json_are_an_error_of_their_batch() -> None:
    class Exact:
        def score(self, items: Sequence[RewardInput]) -> ScoreColumns:
            return {"exact": [Decimal(1)] * len(items)}

    job = {"prompts": ["p"], "media": "text", "completions": ["4"]}
    with pytest.raises(TypeError, match="Decimal is not JSON"):
        _score_batch(Exact(), [job], [np.zeros((1, 0))])


@pytest.mark.parametrize(
    ("host", "expected_host"), [("::", "[::1]"), ("fd00::1", "[fd00::1]"), ("0.0.0.0", "127.0.0.1"), ("a.b", "a.b")]
)
def test_the_url_of_a_service_is_one_whatever_address_it_listens_on(
    host: str, expected_host: str, tmp_path: Path
) -> None:
    socket = SimpleNamespace(getsockname=lambda: (host, 8080, 0, 0))
    server: Any = SimpleNamespace(servers=[SimpleNamespace(sockets=[socket])])
    _announce_url(server, ServiceConfig(host=host), tmp_path / "url")
    assert (tmp_path / "url").read_text() == f"http://{expected_host}:8080"


def test_a_text_reward_passes_its_self_test(tmp_path: Path) -> None:
    names = ("direct_math", "format", "gsm8k", "overlong", "reasoning_gym")
    rewards = [{"reward_type": name, "options": OVERLONG if name == "overlong" else {}} for name in names]
    file = tmp_path / "rewards.toml"
    file.write_text(tomli_w.dumps({"reward_args": rewards}))
    command = [sys.executable, "-m", "cosmos_core.rewards.service", "--config", str(file), "--self-test"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = {line.split()[0]: line.partition(" s: ")[2].partition(" (")[0] for line in told.stdout.splitlines()}
    assert found == {
        "direct_math": "direct_math 1.0000, -1.0000",
        "format": "format 1.0000, 0.0000",
        "gsm8k": "gsm8k 1.0000, 0.0000",
        "overlong": "overlong -0.0000, -2.0000",
        "reasoning_gym": "reasoning_gym 1.0000, 0.0000",
    }, told.stdout
    assert told.returncode == 0
