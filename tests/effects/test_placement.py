"""Keys of engines in processes of their own: how many, how far they run ahead, and when weights reach them."""

from __future__ import annotations

import os
import pickle
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.kinds.prompts import Prompts
from cosmos_core.rollout.async_groups import AsyncGroupSource
from cosmos_core.rollout.transfer import DeltaWeightTransfer, NativeWeightTransfer
from cosmos_core.run.workspace import Workspace
from cosmos_core.train import generation
from cosmos_core.train.loop import TrainLoop
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.train.validation import Validation
from cosmos_core.worker import program as worker
from tests.effects.change import GRPO, Change, changes, stage_of
from tests.feeds import prompt_order

APART = {**GRPO, "mode": "disaggregated", "train.train_batch_per_replica": 32}
DAPO = {**APART, "train.train_policy.variant": "dapo"}


def ahead(recipe: Recipe, folder: Path) -> AsyncGroupSource:
    """What the training of a recipe takes its groups from."""
    rows: Prompts = type("Rows", (), {"__len__": lambda self: 64})()
    setup: Any = SimpleNamespace(
        engine_fleet=None, make_local_scorer=lambda weights: weights, send_missing_weights=None, exit_stack=ExitStack(),
        _stage=SimpleNamespace(recipe=recipe, progress=Workspace(folder).progress),
    )  # fmt: skip
    sampling = make_training_sampling(recipe)
    found: Any = generation.RolloutSetup.make_async_source(setup, prompt_order(rows, recipe), sampling, None)
    return found


@changes(
    (Change("train.train_policy.on_policy", True, APART), {"max_lag": (4, 0)}),
    (Change("train.train_policy.allowed_outdated_steps", 2, APART), {"max_lag": (4, 2)}),
    (Change("train.train_policy.outdated_rollout_fetch_batch_size", 7, APART), {"num_extra_prompts": (0, 7)}),
    (Change("train.train_policy.outdated_rollout_fetch_batch_size", 7, DAPO), {"num_extra_prompts": (128, 7)}),
    (Change("train.train_policy.max_inflight_steps", 9, APART), {"max_steps_ahead": (None, 9)}),
    (Change("mode", "colocated_separated", APART), {"max_lag": (4, 0)}),
    (Change("mode", "colocated_separated", {**APART, "train.sync_weight_interval": 3}), {"max_lag": (4, 2)}),
    (Change("mode", "colocated_separated", APART), {"sleeps_in_training": (False, True)}),
    (Change("mode", "colocated_separated", APART), {"max_steps_ahead": (None, 1)}),
    (Change("mode", "colocated_separated", DAPO), {"num_extra_prompts": (128, 0)}),
)
def test_it_changes_how_far_engines_run_ahead(change: Change, expected: dict[str, Any], tmp_path: Path) -> None:
    before, after = ahead(change.before, tmp_path), ahead(change.after, tmp_path)
    [(name, values)] = expected.items()
    assert (getattr(before, name), getattr(after, name)) == values


@changes(
    (Change("mode", "disaggregated", GRPO), (0, 1)),
    (Change("rollout.parallelism.n_init_replicas", 3, APART), (1, 3)),
)
def test_it_changes_the_engines_beside_the_ranks(change: Change, expected: tuple[int, int], tmp_path: Path) -> None:
    def count(recipe: Recipe, folder: Path) -> int:
        return worker._create_engine_group(stage_of(folder, recipe, kind="rl")).get_target_size()

    assert (count(change.before, tmp_path / "before"), count(change.after, tmp_path / "after")) == expected


def test_ranks_and_engines_of_a_cluster_get_the_keys_that_the_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Change("train.train_policy.reward_env", ("MY_KEY",), APART).after
    for name in ("MY_KEY", "REMOTE_REWARD_TOKEN", "NO_CONCERN_OF_IT"):
        monkeypatch.setenv(name, name.lower())
    call = pickle.loads(pickle.dumps(worker._add_service_variables(stage_of(tmp_path, config, kind="rl"), os.getpid)))
    for name in ("MY_KEY", "REMOTE_REWARD_TOKEN", "NO_CONCERN_OF_IT"):
        monkeypatch.delenv(name)
    assert call() == os.getpid()
    assert (os.environ["MY_KEY"], os.environ["REMOTE_REWARD_TOKEN"]) == ("my_key", "remote_reward_token")
    assert "NO_CONCERN_OF_IT" not in os.environ


@pytest.mark.parametrize(("mode", "waits"), [("disaggregated", False), ("colocated_separated", True)])
def test_engines_on_the_gpus_of_ranks_wait_for_them(mode: str, waits: bool, tmp_path: Path) -> None:
    stage = stage_of(tmp_path, Change("mode", mode, GRPO).after, kind="rl")
    stage.save()
    with mock.patch.object(generation, "EngineReplica") as replica:
        generation.open_replica(stage.path)
    assert replica.call_args.kwargs == {"should_wait_for_trainer": waits}


def test_engines_apart_are_scored_by_what_scores_those_inside(tmp_path: Path) -> None:
    local = Change("mode", "disaggregated", {**APART, "train.train_policy.reward_function": "exact_match"}).after
    remote = Change("train.train_policy.use_remote_reward", True, APART).after
    for config in (local, remote):
        found: Any = ahead(config, tmp_path).score
        assert found and found == config.training_rewards


def test_the_rewards_of_validation_know_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(generation, "open_rewards", lambda recipe, weights, beat, most: nullcontext(asked.append(most)))
    config = Change("validation.max_response_length", 8, {**GRPO, "rollout.max_response_length": 4}).after
    trainer: Any = None
    made = generation.RolloutSetup(stage_of(tmp_path, config, kind="rl"), trainer, ExitStack())
    for most in (None, config.max_held_out_tokens, 4, 8):
        made.make_local_scorer({"overlong": 1.0}, most)
    assert asked == [4, 8]


def test_an_engine_with_ranks_of_its_own_takes_what_they_take(tmp_path: Path) -> None:
    spread = Change("rollout.parallelism.tp_size", 4, APART).after
    group = worker._create_engine_group(stage_of(tmp_path, spread, kind="rl"))
    assert (group.get_target_size(), group.processes_per_actor) == (1, 4)


@changes(
    (Change("rollout.mode", "async", APART), {"max_groups": (1, 10)}),
    (Change("rollout.batch_size", 5, APART), {"max_groups": (1, 5)}),
    (
        Change("rollout.async_config.max_concurrent_requests", 3, {**APART, "rollout.mode": "async"}),
        {"max_groups": (10, 3)},
    ),
    (Change("rollout.async_r2r_sync", "generation", APART), {"weight_sync_mode": ("disabled", "generation")}),
    (Change("rollout.engine_timeout_seconds", 5.0, APART), {"timeout_seconds": (600.0, 5.0)}),
)
def test_it_changes_what_engines_get_and_when(
    change: Change, expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(generation, "EngineFleet", lambda handles, **settings: made.append(settings))
    for recipe in (change.before, change.after):
        generation._make_engine_fleet(recipe.rollout, recipe.mode, [], lambda: None)
    [(name, values)] = expected.items()
    assert (made[0][name], made[1][name]) == values


def transfer_of(recipe: Recipe) -> Any:
    """How the weights of a recipe reach its engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "EngineFleet", lambda handles, **settings: settings["weight_transfer"])
        return generation._make_engine_fleet(recipe.rollout, recipe.mode, [], lambda: None)


@changes(
    (Change("rollout.weight_transfer", "native", APART), "nccl"),
    (Change("rollout.weight_transfer", "native", {**APART, "mode": "colocated_separated"}), "ipc"),
)
def test_it_changes_the_way_that_weights_take(
    change: Change, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert transfer_of(change.before) is None
    assert transfer_of(change.after) is None and "needs GPUs" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = transfer_of(change.after)
    assert isinstance(found, NativeWeightTransfer) and found.transport.backend == expected
    other = Change("rollout.async_r2r_sync", "inference", {**APART, "rollout.weight_transfer": "native"}).after
    assert transfer_of(other) is None


def test_changed_values_alone_are_sent_if_that_is_asked_for() -> None:
    recipe = Change("rollout.weight_transfer", "delta", APART).after
    assert isinstance(transfer_of(recipe), DeltaWeightTransfer)


@changes(Change("train.sync_weight_interval", 3, GRPO))
def test_it_changes_how_often_weights_are_sent(change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(recipe: Recipe) -> list[int]:
        """The steps after which a training of seven sends weights."""
        steps: list[int] = []
        parts: Any = SimpleNamespace(
            adapter=SimpleNamespace(check_parallel_plan=lambda: None, prestart_verification=lambda: None)
        )
        feed: Any = SimpleNamespace(total_steps=7, steps_per_epoch=7)
        saver: Any = SimpleNamespace(latest_step=lambda: 7, wait=lambda: None)
        stage = stage_of(tmp_path / "stage", recipe, kind="rl")
        validation = Validation(
            recipe.validation, stage, publish=lambda step: steps.append(step) or {},
            publish_interval=recipe.train.sync_weight_interval,
        )  # fmt: skip
        loop = TrainLoop(stage, recipe.train, parts, feed, parts, saver, validation)
        monkeypatch.setattr(loop, "_restore_checkpoint", lambda: (0, False))
        monkeypatch.setattr(loop, "_save_checkpoint", lambda: None)
        monkeypatch.setattr(loop, "_run_train_step", lambda: {} if loop.step < 7 else None)
        loop.run()
        return steps

    assert sent(change.before) == list(range(8)) and sent(change.after) == [0, 3, 6]
