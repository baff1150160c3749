"""Trainings of experts and of adapters that change their ranks half-way end as on one rank."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from configs.demo import arithmetic
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.errors import Preempted
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import Stage
from cosmos_core.train.setup import run
from tasks.kinds import all_kinds
from tests.distributed import members
from tests.local_ranks import LocalGroup

KINDS: dict[str, dict[str, Any]] = {"experts": {}, "adapter": {"lora": {"r": 4, "target_modules": "all-linear"}}}
"""What `[policy]` says."""
FILES = {"experts": ["model"], "adapter": ["model", "lora/adapter_model"]}
EP2, EP4 = {"dp_shard_size": 2, "ep_size": 2}, {"dp_shard_size": 4, "ep_size": 4}
DP2, TP2, PP2 = {"dp_shard_size": 2}, {"tp_size": 2}, {"pp_size": 2}


def recipe(policy: Mapping[str, Any], mesh: Mapping[str, int]) -> Recipe:
    rows = {"type": "sft", "mini_batch": "auto" if mesh else 3, "conversation_column_name": "messages"}
    train = {
        "param_dtype": "float32", "compile": False, "optm_lr": 1e-3, "train_batch_per_replica": 9, "max_num_steps": 4,
        "ema_enable": True, "train_policy": rows,
        "ckpt": {"enable_checkpoint": True, "save_freq": 2, "save_mode": "sync"},
    }  # fmt: skip
    return Recipe.model_validate({"policy": {**policy, "model_max_length": 32, "parallelism": mesh}, "train": train})


def stage(
    path: Path, policy: Mapping[str, Any], mesh: Mapping[str, int], model: Path | str = "", data: Path | None = None
) -> Stage:
    path.mkdir(parents=True, exist_ok=True)
    config = StageConfig(name=path.name, kind="sft")
    return Stage(path, config, recipe(policy, mesh), str(model), data, {}, "f" * 64, kind=all_kinds()[config.kind])


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    arithmetic.make(stage(folder / "task", {}, {}), train_rows=64, heldout_rows=16, hidden_size=32, layers=2)
    prepare.run(stage(folder / "rows", {}, {}, folder / "task/model", folder / "task/data"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "task/model")
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "experts")
    tokenizer.save_pretrained(folder / "experts")
    return folder


def sft(task: Path, path: Path, policy: Mapping[str, Any], mesh: Mapping[str, int]) -> Stage:
    model = "task/model" if "lora" in policy else "experts"
    return stage(path, policy, mesh, task / model, task / "rows/data")


@pytest.fixture(scope="module")
def alone(task: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stage]:
    """The same trainings on one rank, in this process."""
    folder = tmp_path_factory.mktemp("alone")
    stages = {name: sft(task, folder / name, policy, {}) for name, policy in KINDS.items()}
    for one in stages.values():
        run(one)
    return stages


def weights(done: Stage, file: str) -> dict[str, Tensor]:
    return load_file(done.path / f"safetensors/step_4/{file}.safetensors")


def assert_like(done: Stage, alone: Stage, kind: str) -> None:
    losses = [[line["loss"] for line in read_metrics(each.path / "metrics.jsonl")] for each in (done, alone)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for file in FILES[kind]:
        found, expected = weights(done, file), weights(alone, file)
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            # Adam turns the rounding of a tiny gradient into a share of the rate of 1e-3.
            assert (found[name] - weight).abs().max() <= 2e-5, name


def on(size: int, done: Stage, stop_after: int | None, scratch: Path) -> Any:
    return LocalGroup(size).run(partial(members.train, done, stop_after, scratch))


@pytest.mark.parametrize(
    ("kind", "two", "four"),
    [pytest.param(*each, marks=pytest.mark.full) for each in (("experts", EP2, EP4), ("adapter", DP2, None))],
)
def test_it_begins_on_a_mesh_and_ends_on_one_rank(
    kind: str, two: dict[str, int], four: dict[str, int] | None, task: Path, tmp_path: Path, alone: dict[str, Stage]
) -> None:
    path, policy = tmp_path / "sft", KINDS[kind]
    with pytest.raises(Preempted, match="stopped after step 2 of 4; checkpoint saved"):
        on(2, sft(task, path, policy, two), 2, tmp_path)
    if four:
        with pytest.raises(Preempted, match="stopped after step 3 of 4; checkpoint saved"):
            on(4, sft(task, path, policy, four), 3, tmp_path)
    one = sft(task, path, policy, {})
    run(one)
    assert_like(one, alone[kind], kind)


@pytest.fixture(scope="module")
def halfway(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halfway")
    for kind, policy in KINDS.items():
        with pytest.raises(Preempted, match="stopped after step 2 of 4"):
            on(1, sft(task, folder / kind, policy, {}), 2, folder)
    return folder


BEGINNINGS = [
    ("experts", EP2), *(pytest.param("adapter", mesh, marks=pytest.mark.full) for mesh in (TP2, DP2, PP2)),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mesh"), BEGINNINGS)
def test_it_begins_on_one_rank_and_ends_on_a_mesh(
    kind: str, mesh: dict[str, int], task: Path, halfway: Path, tmp_path: Path, alone: dict[str, Stage]
) -> None:
    shutil.copytree(halfway / kind, tmp_path / "sft")
    two = sft(task, tmp_path / "sft", KINDS[kind], mesh)
    outcome = on(2, two, None, tmp_path)
    assert outcome.outputs == ("safetensors/step_4",)
    proven = [check.partition(":")[0] for check in outcome.info["checks"]]
    assert proven == ["keys", "bytes", "reload", "tokenizer", *(["merge", "adapter"] if kind == "adapter" else [])]
    assert_like(two, alone[kind], kind)
    sizes = [line.get("tuning/rows_per_pass") for line in read_metrics(two.path / "metrics.jsonl")]
    assert sizes[2] in {1, 3, 9} and sizes[:2] + sizes[3:] == [None] * 3  # all ranks have measured the same
