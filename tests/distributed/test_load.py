"""A rank reads its part of a model and no more: it is the part that it would have of a model loaded whole."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.distributed import loading
from tests.local_ranks import LocalGroup
from tests.unit.tiny_families import FAMILIES

DP2, DP4, TP2 = {"dp_shard_size": 2}, {"dp_shard_size": 4}, {"tp_size": 2}
PP2 = {"pp_size": 2, "pp_schedule": "1F1B"}
HSDP = {"dp_replicate_size": 2, "dp_shard_size": 2}
TP2_DP2, CP2_DP2 = {"tp_size": 2, "dp_shard_size": 2}, {"cp_size": 2, "dp_shard_size": 2}
EP2, EP2_DP4 = {"ep_size": 2, "dp_shard_size": 2}, {"ep_size": 2, "dp_shard_size": 4}

TWO = [
    *(("tied", mesh, torch.float32) for mesh in (DP2, TP2)),
    *(("untied", mesh, torch.bfloat16) for mesh in (DP2, TP2)),
    *((name, DP2, torch.float32) for name in ("moe", "gpt-oss", "gemma3-vlm")),
    ("moe", EP2, torch.float32),
    ("tied", PP2, torch.float32),
    ("uneven", DP2, torch.float32),
    ("untied", DP2, torch.float32, ("lora", {"r": 4, "target_modules": "all-linear", "modules_to_save": ["lm_head"]})),
    ("tied", TP2, torch.float32, ("lora", {"r": 4, "target_modules": ["q_proj", "down_proj"]})),
    ("tied", DP2, torch.float32, ("freeze_pattern", ["embed_tokens"])),
]
FOUR = [
    *(("tied", mesh, torch.float32) for mesh in (DP4, HSDP, TP2_DP2, CP2_DP2)),
    *(("untied", mesh, torch.float32) for mesh in (DP4, TP2_DP2)),
    ("uneven", DP4, torch.float32),
    *(("moe", mesh, torch.float32) for mesh in (DP4, HSDP, EP2_DP4)),
    ("gpt-oss", DP4, torch.bfloat16),
]
SHAPE: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, **changes}))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": lambda: qwen3(tie_word_embeddings=True),
    "untied": lambda: qwen3(tie_word_embeddings=False),
    "uneven": lambda: qwen3(vocab_size=263, intermediate_size=50, head_dim=6),
    "moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS)),
    "gpt-oss": FAMILIES["gpt-oss"],
    "gemma3-vlm": FAMILIES["gemma3-vlm"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    for name, make in MODELS.items():
        make().save_pretrained(folder / name, max_shard_size="40KB")
    return folder


def differences(cases: list[Any], size: int, models: Path, scratch: Path) -> list[list[str]]:
    named = [(models / name, mesh, dtype, dict(policy)) for name, mesh, dtype, *policy in cases]
    found: list[list[str]] = LocalGroup(size).run(partial(loading.differences, named, scratch))
    return found


@pytest.fixture(scope="module")
def of_two(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return differences(TWO, 2, models, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return differences(FOUR, 4, models, tmp_path_factory.mktemp("four"))


def label(case: Any) -> str:
    mesh = [f"{axis.removesuffix('_size')}{size}" for axis, size in case[1].items()]
    return "-".join([case[0], *mesh, str(case[2]), *(key for key, _ in case[3:])])


@pytest.mark.parametrize("index", range(len(TWO)), ids=map(label, TWO))
def test_each_of_two_ranks_reads_its_part(index: int, of_two: list[list[str]]) -> None:
    assert of_two[index] == []


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(FOUR)), ids=map(label, FOUR))
def test_each_of_four_ranks_reads_its_part(index: int, of_four: list[list[str]]) -> None:
    assert of_four[index] == []


def changed(models: Path, target: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    """A copy of the untied model, in one file, in which a tensor is another one, or none."""
    shutil.copytree(models / "untied", target, ignore=shutil.ignore_patterns("*.safetensors*"))
    weights: dict[str, torch.Tensor] = {}
    for file in (models / "untied").glob("*.safetensors"):
        weights |= load_file(file)
    new = change(weights.pop(key, torch.zeros(264, 32)))
    weights |= {} if new is None else {key: new}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_every_rank_refuses_a_model_that_is_not_whole(models: Path, tmp_path: Path) -> None:
    norm, head, embedding = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
    last = torch.arange(264).unsqueeze(1) == 263  # a row of the second rank alone
    cases = {
        "missing": (norm, lambda _: None, f"1 tensors missing from the files: {norm}"),
        "stranger": ("stranger", lambda _: torch.ones(2), "1 tensors in the files but not in Qwen3ForCausalLM: strang"),
        "shape": (norm, lambda w: w[:-1], f"1 tensors of another shape than config.json says: {norm}"),
        "nan": (embedding, lambda w: w.masked_fill(last, torch.nan), f"tensor {embedding} holds NaN or infinity"),
        "infinity": (norm, lambda w: w * torch.inf, f"tensor {norm} holds NaN or infinity"),
        "two": (head, lambda w: w + last, f"config.json ties {embedding} to a tensor that has other values in"),
    }
    folders = [changed(models, tmp_path / name, key, change) for name, (key, change, _) in cases.items()]
    config = json.loads((folders[-1] / "config.json").read_text())
    (folders[-1] / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    cut = Path(shutil.copytree(models / "untied", tmp_path / "cut"))
    file = sorted(cut.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])
    gone = Path(shutil.copytree(models / "moe", tmp_path / "gone"))
    (lost := next(gone.glob("*.safetensors"))).unlink()
    without_expert = Path(shutil.copytree(models / "moe", tmp_path / "moe"))
    for part in without_expert.glob("*.safetensors"):
        weights = load_file(part)
        kept = {name: w for name, w in weights.items() if name != "model.layers.1.mlp.experts.3.up_proj.weight"}
        if len(kept) < len(weights):
            save_file(kept, part, metadata={"format": "pt"})
    said = LocalGroup(2).run(partial(loading.refusals, [*folders, cut, gone, without_expert], tmp_path))
    messages = [message for _, _, message in cases.values()] + [f"{file} is damaged", lost.name]
    messages += ["tensors that belong together, like the experts of a layer, some are missing"]
    for (first, second), message in zip(said, messages, strict=True):
        assert message in first and first == second
        assert first.startswith("policy.model_name_or_path = ") and "\n" not in first


@pytest.mark.parametrize(
    "mesh", [DP2, *(pytest.param(mesh, marks=pytest.mark.full) for mesh in (DP4, TP2_DP2))], ids=["dp2", "dp4", "tp dp"]
)
def test_a_rank_takes_the_memory_of_its_shard(mesh: dict[str, int], models: Path, tmp_path: Path) -> None:
    num_params, _ = loading.save_large(tmp_path / "large", layers=4, dtype=torch.bfloat16)
    program = partial(loading.peaks, tmp_path / "large", mesh, models / "tied", tmp_path)
    size = math.prod(mesh.values())
    found: list[loading.Peak] = LocalGroup(size).run(program)
    whole = 4 * num_params // size
    for peak in found:
        # Tensor parallelism leaves the embedding whole.
        assert whole <= peak.shard <= whole * (1.3 if "tp_size" in mesh else 1.001)
        # 0.3 GB are allowed beside a checkpoint of 2 GB; this one has a tenth, and a tensor of it 60 MB.
        assert peak.shard * 0.95 <= peak.most <= peak.shard + 0.03 * 2**30
