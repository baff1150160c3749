"""An alarm where engines do not compute what the trainer computes, from what is trained on."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.rollout import hf
from cosmos_core.rollout.base import EngineSettings
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.logprob_drift import LogprobDriftCheck
from cosmos_core.train.setup import train
from cosmos_core.types import Sampling
from tests.unit.test_train import GRPO, make_stage, recipe, task  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("difference", "lag", "alarm"),
    [(1e-5, 0, 0.0), (0.01, 0, 1.0), (0.01, 2, 0.0), (1.5, 2, 1.0), (math.nan, 0, 1.0)],
)
def test_what_rounding_or_staleness_does_not_explain_is_an_alarm(difference: float, lag: int, alarm: float) -> None:
    metrics = {"rollout/logprob_difference_mean": difference, "rollout/version_lag": float(lag)}
    assert LogprobDriftCheck(torch.float32, None, Sampling()).check_step(1, metrics) == {"watch/alarm": alarm}


def test_half_precision_rounds_more_and_without_rollouts_nothing_is_said() -> None:
    metrics = {"rollout/logprob_difference_mean": 0.2}
    for dtypes in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        assert LogprobDriftCheck(*dtypes, Sampling()).check_step(1, metrics) == {"watch/alarm": 0.0}
        assert LogprobDriftCheck(*dtypes, Sampling()).check_step(1, {}) == {}


@pytest.mark.parametrize(
    ("sampling", "difference", "alarm"),
    [
        (Sampling(top_p=0.8), 0.2, 0.0),  # the kept mass is at least 0.8, and -log 0.8 = 0.223
        (Sampling(top_p=0.8), 0.23, 1.0),
        (Sampling(top_k=5), 3.0, 0.0),
        (Sampling(temperature=0.7, policy_temperature=1.0), 3.0, 0.0),
        (Sampling(temperature=0.7, policy_temperature=0.7), 3.0, 1.0),
        (Sampling(repetition_penalty=1.2), 3.0, 0.0),
        (Sampling(top_k=5), math.nan, 1.0),
    ],
)
def test_what_sampling_changes_is_no_alarm(sampling: Sampling, difference: float, alarm: float) -> None:
    metrics = {"rollout/logprob_difference_mean": difference, "rollout/tokens_not_finite": 0.0}
    drift = LogprobDriftCheck(torch.float32, None, sampling)
    assert drift.check_step(1, metrics) == {"watch/alarm": alarm}
    assert drift.check_step(2, {"rollout/tokens_not_finite": 2.0}) == {"watch/alarm": 1.0}


def test_dropout_of_an_adapter_which_the_engine_does_not_apply_is_no_alarm(
    task: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    config = recipe({**GRPO, "entropy_coeff": 1.0}, train_batch_per_replica=8, max_num_steps=2, optm_lr=0.1)
    lora = LoraConfig(r=4, lora_dropout=0.5, target_modules="all-linear")
    config = config.copy_with(policy=config.policy.copy_with(lora=lora))
    at = make_stage(tmp_path / "rl", "rl", config, task / "task/model", task / "rl-data/data")
    train(at)
    lines = read_metrics(at.path / "metrics.jsonl")
    assert [line["watch/alarm"] for line in lines] == [0.0, 0.0]
    assert lines[-1]["rollout/logprob_difference_mean"] > 0.001, "more than rounding explains"
    drift = LogprobDriftCheck(torch.float32, None, Sampling(), has_dropout=True)
    assert drift.check_step(1, {"rollout/logprob_difference_mean": 1.5}) == {"watch/alarm": 1.0}


@pytest.mark.parametrize("takes_rollouts", [pytest.param(False, marks=pytest.mark.full), True])
def test_weights_that_are_corrupted_in_the_engine_are_noticed_at_the_next_step(
    takes_rollouts: bool,
    task: Path,  # noqa: F811 - the fixture
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Corrupted(hf.HfEngine):
        """From its third step on one matrix of the engine is not what the trainer sent."""

        def __init__(self, settings: EngineSettings) -> None:
            super().__init__(EngineSettings(**{**vars_of(settings), "is_separate": True}))

        def submit(self, prompts: Any, sampling: Any, step: int) -> None:
            if step == 2:
                with torch.no_grad():
                    self._model.model.layers[0].mlp.up_proj.weight.neg_()
            super().submit(prompts, sampling, step)

    def vars_of(settings: EngineSettings) -> dict[str, Any]:
        return {name: getattr(settings, name) for name in EngineSettings.__dataclass_fields__}

    monkeypatch.setattr(hf, "HfEngine", Corrupted)
    policy = {**GRPO, "kl_beta": 0.0, "use_rollout_logprobs_for_loss": takes_rollouts}
    config = recipe(policy, train_batch_per_replica=16, max_num_steps=4, optm_lr=1e-4)
    stage = make_stage(tmp_path / "rl", "rl", config, task / "task/model", task / "rl-data/data")
    with caplog.at_level(logging.WARNING):
        train(stage)
    lines = read_metrics(stage.path / "metrics.jsonl")
    assert [line["watch/alarm"] for line in lines] == [0.0, 0.0, 1.0, 0.0]  # the next version mends it
    assert "step 3: engines and trainer differ by" in caplog.text
