"""What a training is told that starts from the checkpoint of another run with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.errors import ModelError
from cosmos_core.train.resume_from import check_base_model, warn_of_other_step_size
from tests.effects.change import GRPO, SFT, recipe

OF_STAGE = {"model": "stage:first", "inputs": {"first": "ab"}}


def checkpoint(folder: Path, ingredients: dict[str, Any], source: dict[str, Any] | None = None) -> Path:
    """The checkpoint of step 4 of a stage with a fingerprint."""
    policy = folder / "checkpoints/step_4/policy"
    policy.mkdir(parents=True)
    (policy / "extra.json").write_text(json.dumps({"feed": {"step": 4, "source": source or {}}}))
    (folder / "fingerprint.json").write_text(json.dumps({"ingredients": ingredients}))
    return policy


@pytest.mark.parametrize(
    ("earlier", "now", "told"),
    [
        ({"model": "ab"}, {"model": "ab"}, ""),
        ({"model": "ab"}, {"model": "cd"}, "began from another model"),
        ({"model": "hub:a/b@1"}, {"model": "hub:a/b@2"}, "began from another model"),
        (OF_STAGE, {"model": "stage:again", "inputs": {"again": "ab", "x": "y"}}, ""),
        (OF_STAGE, {**OF_STAGE, "inputs": {"first": "c"}}, "began from another model"),
        ({"model": "hub:a/b@1"}, {"model": "ab"}, "it is not known whether it began from MODEL"),
        (OF_STAGE, {"model": "cd"}, "it is not known whether it began from MODEL"),
    ],
)
def test_a_base_model_is_compared_in_the_form_in_which_both_runs_have_it(
    earlier: dict[str, Any], now: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name on the Hub and a folder may be the same model, and so may the stages of two pipelines."""
    policy = checkpoint(tmp_path / "first", {"inputs": {}, **earlier})
    checkpoint(tmp_path / "second", {"inputs": {}, **now})
    error = ""
    try:
        check_base_model(policy, tmp_path / "second", "MODEL")
    except ModelError as refused:
        error = str(refused)
    assert told in (error or caplog.text) and bool(error or caplog.text) == bool(told)
    assert bool(error) == told.startswith("began")


@pytest.mark.parametrize(
    ("earlier", "now", "told"),
    [
        ({**SFT, "train.train_batch_per_replica": 8}, {**SFT, "train.train_batch_per_replica": 8}, ""),
        (
            {**SFT, "train.train_batch_per_replica": 8}, {**SFT, "train.train_batch_per_replica": 16},
            "its 4 steps took 8 rows each, those of this training take 16, so that it goes on at row 64 instead of 32; "
            "keep train.train_batch_per_replica",
        ),
        (
            {**GRPO, "train.train_batch_per_replica": 8, "rollout.n_generation": 2},
            {**GRPO, "train.train_batch_per_replica": 8, "rollout.n_generation": 4},
            "its 4 steps took 4 rows each, those of this training take 2, so that it goes on at row 8 instead of 16; "
            "keep train.train_batch_per_replica and rollout.n_generation",
        ),
        (
            {**GRPO, "train.train_batch_per_replica": 8, "rollout.n_generation": 2},
            {**GRPO, "train.train_batch_per_replica": 16, "rollout.n_generation": 4}, "",
        ),
        ({**GRPO, "train.train_batch_per_replica": 8}, {**SFT, "train.train_batch_per_replica": 16}, ""),
    ],
)  # fmt: skip
def test_steps_of_another_size_are_reported_because_rows_are_then_skipped_or_repeated(
    earlier: dict[str, Any], now: dict[str, Any], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = recipe(now)
    policy = checkpoint(tmp_path / "first", {"config": earlier})
    warn_of_other_step_size(policy, config.train, config.group_size)
    assert caplog.messages == ([f"train.resume = '{policy}': {told}"] if told else [])
    policy = checkpoint(tmp_path / "second", {"config": earlier}, {"drawn": 32})  # dynamic sampling saves the position
    caplog.clear()
    warn_of_other_step_size(policy, config.train, config.group_size)
    assert caplog.messages == []
