"""GRPO as users run it, on one rank and on two, ends with the weights of a plain loop that generates by itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cosmos_core.run.progress import read_metrics
from tests.conftest import DEMOS, Workspace
from tests.reference.plain_grpo import Settings, train

STEPS = 5
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
PIPELINE = f"""
[pipeline]
name = "plain"
threads = 1

[policy]
model_max_length = 40
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
seed = {SETTINGS.seed}
epoch = 100
max_num_steps = {STEPS}
train_batch_per_replica = {SETTINGS.prompts_per_step * SETTINGS.completions}
optm_lr = {SETTINGS.learning_rate}
optm_warmup_steps = 0
epsilon = {SETTINGS.adam_epsilon}
optm_weight_decay = {SETTINGS.weight_decay}
optm_grad_norm_clip = {SETTINGS.clip_norm}

[train.train_policy]
type = "grpo"
reward_function = "reward.py:variety"
dataloader_shuffle = false
mini_batch = 2
batch_size_per_optimize = {SETTINGS.prompts_per_step * SETTINGS.completions // SETTINGS.updates_per_step}
mu_iterations = {SETTINGS.passes}
epsilon_low = {SETTINGS.epsilon_low}
epsilon_high = {SETTINGS.epsilon_high}
kl_beta = {SETTINGS.kl_beta}
temperature = {SETTINGS.temperature}

[rollout]
backend = "hf"
n_generation = {SETTINGS.completions}
batch_size = 2
max_response_length = {SETTINGS.max_tokens}
sampling_config.temperature = {SETTINGS.temperature}

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "{DEMOS}/arithmetic.py:make"
arguments = {{ train_rows = 12, heldout_rows = 4, hidden_size = 64, layers = 2 }}

[[pipeline.stages]]
name = "prompts"
kind = "prepare"
after = ["task"]
model = "stage:task"
data = "stage:task"
"""
STAGE = """
[[pipeline.stages]]
name = "{name}"
kind = "rl"
after = {after}
model = "stage:task"
data = "stage:prompts"
overrides.policy.parallelism.dp_shard_size = {size}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A training on one rank and the same on two, each behind the other."""
    workspace = Workspace(tmp_path_factory.mktemp("plain"))
    workspace.write("reward.py", REWARD)
    stages = [
        STAGE.format(name="one", after='["prompts"]', size=1),
        STAGE.format(name="two", after='["prompts", "one"]', size=2),
    ]
    workspace.write("p.toml", PIPELINE + "".join(stages))
    workspace.cosmos("run", "p.toml")
    return workspace


def plain(run: Workspace, settings: Settings) -> tuple[Mapping[str, Tensor], list[float]]:
    torch.manual_seed(0)  # nothing is drawn from it
    lines = (run.stage("task") / "data/train.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["question"] for line in lines]
    model, rewards = train(run.stage("task") / "model", prompts, lambda text: len(set(text)) / 5, settings, STEPS)
    return model.state_dict(), rewards


@pytest.fixture(scope="module")
def expected(run: Workspace) -> tuple[Mapping[str, Tensor], list[float]]:
    return plain(run, SETTINGS)


def difference(file: Path, weights: Mapping[str, Tensor]) -> float:
    """The largest of any weight."""
    found = load_file(file)
    assert found.keys() <= weights.keys()
    assert weights.keys() - found.keys() <= {"lm_head.weight"}, "tied to the embedding"
    return max((weight - weights[name]).abs().max().item() for name, weight in found.items())


@pytest.mark.parametrize("name", ["one", "two"])
def test_grpo_ends_with_the_weights_of_the_plain_loop(
    name: str, run: Workspace, expected: tuple[Mapping[str, Tensor], list[float]]
) -> None:
    weights, rewards = expected
    lines = read_metrics(run.stage(name) / "metrics.jsonl")
    assert [line["reward/mean"] for line in lines] == pytest.approx(rewards, abs=1e-12), "other completions"
    exported = run.stage(name) / f"safetensors/step_{STEPS}/model.safetensors"
    assert difference(exported, weights) <= TOLERANCE
    assert max(line["clip_high"] + line["clip_low"] for line in lines) > 0, "nothing was clipped"
    assert difference(run.stage("task") / "model/model.safetensors", weights) > 1000 * TOLERANCE, "nothing was learned"


@pytest.mark.parametrize(
    "change", [{"kl_beta": 0.06}, {"epsilon_high": 0.16}, {"weight_decay": 0.02}, {"clip_norm": 0.9}]
)
def test_the_comparison_would_see_another_setting(change: dict[str, float], run: Workspace) -> None:
    weights, _ = plain(run, replace(SETTINGS, **change))
    assert difference(run.stage("one") / f"safetensors/step_{STEPS}/model.safetensors", weights) > 5 * TOLERANCE
