"""The reference policy of a KL penalty is what the stage starts from, with its adapter; `cosmos check` sees that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from configs.demo import arithmetic
from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.errors import ConfigError
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.check import _check_model
from cosmos_core.train.setup import run, train
from tests.unit.test_train import GRPO, SFT, make_stage, recipe

KL = {**GRPO, "kl_beta": 0.05}


def adapted(base: Recipe, **lora: Any) -> Recipe:
    return base.model_copy(update={"policy": base.policy.model_copy(update={"lora": LoraConfig(**lora)})})


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, prompts, and an adapter of the model that has been trained."""
    folder = tmp_path_factory.mktemp("task")
    stage = make_stage(folder / "task", "custom", recipe(SFT))
    arithmetic.make(stage, train_rows=64, heldout_rows=16, hidden_size=64, layers=1)
    for name, policy in (("sft-data", SFT), ("rl-data", GRPO)):
        prepare.run(make_stage(folder / name, "prepare", recipe(policy), folder / "task/model", folder / "task/data"))
    config = adapted(recipe(SFT, train_batch_per_replica=8, max_num_steps=3, optm_lr=5e-2), r=4)
    sft = make_stage(folder / "sft", "sft", config, folder / "task/model", folder / "sft-data/data")
    run(sft)
    (sft.path / "safetensors/step_3/lora").rename(folder / "adapter")
    return folder


def test_the_reference_has_the_adapter_that_the_training_goes_on_with(task: Path, tmp_path: Path) -> None:
    config = adapted(
        recipe(KL, train_batch_per_replica=8, max_num_steps=2, optm_lr=1e-2), lora_path=str(task / "adapter")
    )
    stage = make_stage(tmp_path / "rl", "rl", config, task / "task/model", task / "rl-data/data")
    train(stage)
    weights = load_file(task / "adapter/adapter_model.safetensors")
    assert max(tensor.abs().max() for name, tensor in weights.items() if "lora_B" in name) > 1e-2
    assert abs(read_metrics(stage.path / "metrics.jsonl")[0]["kl"]) < 1e-7


def test_a_check_refuses_settings_that_are_not_those_of_the_adapter(task: Path, tmp_path: Path) -> None:
    config = adapted(recipe(SFT), lora_path=str(task / "adapter"), r=16)
    stage = make_stage(tmp_path / "sft", "sft", config, task / "task/model")
    with pytest.raises(ConfigError, match=r"policy\.lora\.r = 16, but the adapter in lora_path has 4"):
        _check_model(stage.recipe.policy, stage.recipe.train, stage.kind, stage.model)
