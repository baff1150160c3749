"""GRPO as a stage runs it, on one rank and on two, ends with the weights of a plain loop that generates by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.demo import arithmetic
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.setup import run
from tests.distributed import members
from tests.effects.change import stage_of
from tests.local_ranks import LocalGroup
from tests.reference.plain_grpo import Settings, train

STEPS = 3
TOLERANCE = 1e-6
SETTINGS = Settings(
    prompts_per_step=3, completions=4, max_tokens=6, updates_per_step=2, passes=2, learning_rate=3e-4,
    adam_epsilon=1e-4, weight_decay=0.01, clip_norm=1.0, epsilon_low=0.1, epsilon_high=0.15, kl_beta=0.05,
    temperature=0.9, seed=11,
)  # fmt: skip
REWARD = """
def variety(completion, reference):
    return len(set(completion)) / 5
"""
RECIPE: dict[str, Any] = {
    "policy": {"model_max_length": 40, "model_gradient_checkpointing": False},
    "train": {
        "param_dtype": "float32", "compile": False, "seed": SETTINGS.seed, "epoch": 100, "max_num_steps": STEPS,
        "train_batch_per_replica": SETTINGS.prompts_per_step * SETTINGS.completions,
        "optm_lr": SETTINGS.learning_rate, "optm_warmup_steps": 0, "epsilon": SETTINGS.adam_epsilon,
        "optm_weight_decay": SETTINGS.weight_decay, "optm_grad_norm_clip": SETTINGS.clip_norm,
        "train_policy": {
            "type": "grpo", "reward_function": "reward.py:variety", "dataloader_shuffle": False, "mini_batch": 2,
            "batch_size_per_optimize": SETTINGS.prompts_per_step * SETTINGS.completions // SETTINGS.updates_per_step,
            "mu_iterations": SETTINGS.passes, "epsilon_low": SETTINGS.epsilon_low,
            "epsilon_high": SETTINGS.epsilon_high, "kl_beta": SETTINGS.kl_beta, "temperature": SETTINGS.temperature,
        },
    },
    "rollout": {
        "backend": "hf", "n_generation": SETTINGS.completions, "batch_size": 2,
        "max_response_length": SETTINGS.max_tokens, "sampling_config": {"temperature": SETTINGS.temperature},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its prompts, and the same prompts prepared."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "reward.py").write_text(REWARD)
    RECIPE["train"]["train_policy"]["reward_function"] = f"{folder}/reward.py:variety"
    config = Recipe.model_validate(RECIPE)
    arithmetic.make(stage_of(folder / "task", config, kind="custom"), train_rows=12, heldout_rows=4, hidden_size=64)
    prepare.run(
        stage_of(folder / "prompts", config, kind="prepare", model=folder / "task/model", data=folder / "task/data")
    )
    return folder


def trained(task: Path, name: str, **mesh: int) -> Path:
    """Train as a stage does, on as many ranks as the mesh has; return the stage's folder."""
    policy = {**RECIPE["policy"], "parallelism": mesh}
    config = Recipe.model_validate({**RECIPE, "policy": policy})
    stage = stage_of(task / name, config, kind="rl", model=task / "task/model", data=task / "prompts/data")
    if mesh:
        LocalGroup(stage.recipe.policy.parallelism.world_size).run(partial(members.train, stage, None, task))
    else:
        run(stage)
    return stage.path


@pytest.fixture(scope="module")
def one(task: Path) -> Path:
    return trained(task, "one")


def plain(task: Path, settings: Settings) -> tuple[Mapping[str, Tensor], list[float]]:
    torch.manual_seed(0)  # nothing is drawn from it
    lines = (task / "task/data/train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["question"] for line in lines]
    model, rewards = train(task / "task/model", prompts, lambda text: len(set(text)) / 5, settings, STEPS)
    return model.state_dict(), rewards


@pytest.fixture(scope="module")
def expected(task: Path) -> tuple[Mapping[str, Tensor], list[float]]:
    return plain(task, SETTINGS)


def difference(file: Path, weights: Mapping[str, Tensor]) -> float:
    """The largest of any weight."""
    found = load_file(file)
    assert found.keys() <= weights.keys()
    assert weights.keys() - found.keys() <= {"lm_head.weight"}, "tied to the embedding"
    return max((weight - weights[name]).abs().max().item() for name, weight in found.items())


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_grpo_ends_with_the_weights_of_the_plain_loop(
    ranks: int, task: Path, one: Path, expected: tuple[Mapping[str, Tensor], list[float]]
) -> None:
    weights, rewards = expected
    found = one if ranks == 1 else trained(task, "two", dp_shard_size=2)
    lines = read_metrics(found / "metrics.jsonl")
    assert [line["reward/mean"] for line in lines] == pytest.approx(rewards, abs=1e-12), "other completions"
    assert difference(found / f"safetensors/step_{STEPS}/model.safetensors", weights) <= TOLERANCE
    assert max(line["clip_high"] + line["clip_low"] for line in lines) > 0, "nothing was clipped"
    assert difference(task / "task/model/model.safetensors", weights) > 1000 * TOLERANCE, "nothing was learned"


@pytest.mark.full
@pytest.mark.parametrize(
    "change", [{"kl_beta": 0.06}, {"epsilon_high": 0.16}, {"weight_decay": 0.02}, {"clip_norm": 0.9}]
)
def test_the_comparison_would_see_another_setting(change: dict[str, float], task: Path, one: Path) -> None:
    weights, _ = plain(task, replace(SETTINGS, **change))
    assert difference(one / f"safetensors/step_{STEPS}/model.safetensors", weights) > 5 * TOLERANCE
