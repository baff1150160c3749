"""Families, experts, adapters and frozen weights on a mesh: loss and gradients are those of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from cosmos_core.models.hf import load_model
from tests.distributed.matrix import Case, cells, chosen, computed, settings
from tests.distributed.mutations import expert_flops
from tests.distributed.test_invariance import BAR, CP2, DP2, DP4, HSDP, PP2, TP2, TP2_DP2, answers, compare
from tests.local_ranks import LocalGroup
from tests.unit.tiny_families import save_family

EP2, EP2_DP4, EP4 = (*DP2, ("ep_size", 2)), (*DP4, ("ep_size", 2)), (*DP4, ("ep_size", 4))
EP2_CP2 = (("cp_size", 2), ("ep_size", 2))
TIED = "qwen2.5"
IDLE, THREE = "idle", "three experts"
"""GPT-OSS whose router never chooses the second half of the experts."""

EXPERTS_OF_TWO = [
    *(Case(EP2, mini_batch, packed, model="qwen3-moe") for mini_batch in (1, 2, 4) for packed in (False, True)),
    Case(EP2, 4, masked=3, model="qwen3-moe"),
    Case(EP2, 8, True, masked=3, model="qwen3-moe"),
    Case(EP2, 2, algorithm="grpo", model="qwen3-moe"),
    Case(EP2, 2, checkpointing=True, model="qwen3-moe"),
    Case(DP2, 2, True, checkpointing=True, model="qwen3-moe", balance=0.5),
    Case(EP2, 4, masked=3, model="qwen3-moe", balance=0.5),
    *(Case(EP2, 2, model=model, balance=0.5) for model in ("mixtral", "gpt-oss")),
    Case(EP2, 2, trained="adapter on attention", model="qwen3-moe"),
    Case(EP2, 2, trained="not experts", model="qwen3-moe"),
    Case(EP2_CP2, 2, model="qwen3-moe"),
    Case(DP2, 2, model="qwen3-moe"),
    Case(DP2, 2, trained="adapter", model="qwen3-moe"),
    Case(EP2, 1, algorithm="dpo", model="qwen3-moe"),
    Case(EP2, 2, model="mixtral"),
    Case(EP2, 2, model="gpt-oss"),
    Case(EP2, 2, True, model="gpt-oss"),
    Case(EP2, 2, checkpointing=True, model=IDLE),
    # The grouped product is what trains; its kernel, and the routers of DeepSeek, know no float64.
    *(Case(EP2, 2, dtype="float32", model=model) for model in ("qwen3-moe", "mixtral", IDLE, "deepseek-v3")),
]
EXPERTS_OF_FOUR = [
    *(Case(mesh, 1, model="qwen3-moe") for mesh in (EP2_DP4, EP4)),
    Case((*HSDP, ("ep_size", 2)), 2, model="qwen3-moe"),
    Case((*EP2, ("cp_size", 2)), 2, model="qwen3-moe"),
    Case((*PP2, *EP2), 4, model="qwen3-moe"),
    Case(EP2_DP4, 2, checkpointing=True, model="gpt-oss"),
    Case(EP2_DP4, 4, masked=3, packed=True, model=IDLE),
    Case(EP2_DP4, 2, dtype="float32", model="qwen3-moe"),
]
TWO = [
    *EXPERTS_OF_TWO,
    *(Case(mesh, 2, model=model) for mesh in (DP2, TP2, CP2) for model in ("llama3", "qwen2.5")),
    # Gemma's norms compute in float32 whatever they are given.
    *(Case(mesh, 2, dtype="float32", model="gemma3") for mesh in (DP2, TP2, CP2)),
    *(Case(TP2, 2, packed, model=model) for model in ("qwen3-moe", "mixtral") for packed in (False, True)),
    *(Case(TP2, 2, model=model) for model in ("phi3", "olmo2")),
    *(Case(TP2, 2, trained=trained, model="phi3") for trained in ("adapter", "attention")),
    Case(TP2, 2, checkpointing=True, model="qwen3-moe"),
    Case(TP2, 2, trained="adapter on attention", model="qwen3-moe"),
    *(Case(TP2, 2, dtype="float32", model=model) for model in ("qwen3-moe", "deepseek-v3")),
    Case(CP2, 2, model="afmoe"),
    Case(DP2, 2, dtype="float32", model="mamba"),
    Case(CP2, 2, model="one head"),
    *(
        Case(mesh, 2, model=TIED, trained=trained)
        for mesh in (DP2, TP2, CP2)
        for trained in ("adapter", "adapter and norm", "attention")
    ),
    Case(DP2, 2, True, model=TIED, trained="adapter", checkpointing=True),
    Case(DP2, 2, model="llama3", trained="adapter", algorithm="grpo"),
    *(Case(mesh, 2, model=TIED, trained="adapter and embedding") for mesh in (DP2, TP2)),
    *(Case(PP2, 4, model=TIED, trained=trained) for trained in ("adapter", "adapter and embedding")),
    Case(DP2, 2, model="llama3", trained="adapter taken from the base", dtype="float32"),
    Case(DP2, 2, model=TIED, trained="adapter", dtype="float32"),
]
ALIKE = {("model", name) for name in ("llama3", "qwen2.5", "olmo2", "mixtral", "afmoe", "one head")} | {
    ("algorithm", "grpo"), ("algorithm", "dpo"), ("masked", 3),
}  # fmt: skip
"""Families whose layers have the form of those of another one, and settings that `test_invariance.py` has."""
REFUSED = {
    Case(EP2, model=TIED): "ep_size = 2: Qwen2ForCausalLM has no plan that sends tokens to experts; set it to 1",
    Case(EP2, model="llama4"): "ep_size = 2: Llama4ForConditionalGeneration has no plan that sends tokens to experts",
    Case(EP2, model=THREE): "ep_size = 2: MixtralForCausalLM has 3 experts, which do not divide by it; set it to 1",
    Case(EP2, trained="adapter", model="qwen3-moe"): "where its plan has none; leave them out of policy.lora",
    Case(TP2, model="llama4"): "experts of Llama4ForConditionalGeneration is split by 'moe_tp_experts', which this",
    Case(TP2, model=THREE): "tp_size = 2: MixtralForCausalLM has 3 experts, which do not divide by it; set it to 1",
    Case(TP2, trained="adapter", model="qwen3-moe"): "of Qwen3MoeForCausalLM is split by 'moe_tp_experts', which this",
    Case(CP2, model="gemma2"): "cp_size = 2: Gemma2ForCausalLM computes attention in its own way",
    Case(TP2, model="apertus"): "ApertusForCausalLM does more than its plan says: ranks disagree about the gradient of",
    Case(TP2, model="phi"): "PhiForCausalLM does more than its plan says",
    Case(TP2, model="doge"): "DogeForCausalLM does more than its plan says",
    Case(TP2, model="three heads"): "tp_size = 2 does not divide the 3 num_attention_heads of Qwen3ForCausalLM",
    Case(CP2, model="three heads"): "cp_size = 2 does not divide the 3 num_attention_heads of Qwen3ForCausalLM",
    Case(TP2, model="one head"): "tp_size = 2 does not divide the 1 num_key_value_heads of LlamaForCausalLM",
    Case(TP2, model="odd features"): "tp_size = 2 does not divide the 49 features of model.layers.0.mlp.gate_proj of",
    Case(CP2, model="qwen3-next"): "cp_size = 2: layers of kind linear_attention mix what is packed; set it to 1",
}
"""On two ranks, and what is said."""
FOUR = [
    *EXPERTS_OF_FOUR,
    Case(HSDP, 2, model=TIED, trained="adapter"),
    Case(TP2_DP2, 2, model=TIED, trained="adapter"),
    Case(TP2_DP2, 2, model=TIED, trained="attention"),
    *(Case(TP2_DP2, 2, dtype=dtype, model="qwen3-moe") for dtype in ("float64", "float32")),
    Case((*TP2, *DP2, ("ep_size", 2)), 2, model="qwen3-moe"),
    Case((*PP2, *TP2), 4, model="qwen3-moe"),
    Case((*PP2, *DP2), 4, model=TIED, trained="adapter"),
    Case((*PP2, *TP2), 4, model=TIED, trained="adapter"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The models of the cases that run."""
    folder = tmp_path_factory.mktemp("models")
    cases = [TWO[index] for index in chosen(request, "test_two_ranks_do_what_one_does")]
    cases += [FOUR[index] for index in chosen(request, "test_four_ranks_do_what_one_does")]
    for name in {"gpt-oss", "qwen3-moe", *(case.model for case in (*cases, *REFUSED))} - {IDLE, THREE}:
        save_family(name, folder / name)
    idle = load_model(str(folder / "gpt-oss"), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in idle.named_parameters():
            if name.endswith("router.bias"):
                parameter[2:] = -1e4
    idle.save_pretrained(folder / IDLE)
    sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=3)
    MixtralForCausalLM(config).save_pretrained(folder / THREE)
    return folder


@pytest.fixture(scope="module")
def of_two(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Path]:
    cases = {index: TWO[index] for index in chosen(request, "test_two_ranks_do_what_one_does")}
    refused = dict(enumerate(REFUSED, start=len(TWO)))
    return answers(cases | refused, 2, models, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Path]:
    cases = {index: FOUR[index] for index in chosen(request, "test_four_ranks_do_what_one_does")}
    return answers(cases, 4, models, tmp_path_factory.mktemp("four"))


def alone(case: Case, models: Path, scratch: Path) -> dict[str, Any]:
    return computed(replace(case, mesh=(), mini_batch=4, packed=False, checkpointing=False), models, scratch)


@pytest.mark.parametrize("index", cells(TWO, lambda case: settings(case) - ALIKE))
def test_two_ranks_do_what_one_does(index: int, of_two: dict[int, Path], models: Path, tmp_path: Path) -> None:
    case = TWO[index]
    compare(alone(case, models, tmp_path), torch.load(of_two[index]), BAR[case.dtype])


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[case.name for case in REFUSED])
def test_what_a_family_cannot_is_refused_by_name(index: int, of_two: dict[int, Path]) -> None:
    assert list(REFUSED.values())[index] in of_two[len(TWO) + index].with_suffix(".txt").read_text()


@pytest.mark.full
@pytest.mark.parametrize("index", cells(FOUR, settings))
def test_four_ranks_do_what_one_does(index: int, of_four: dict[int, Path], models: Path, tmp_path: Path) -> None:
    case = FOUR[index]
    compare(alone(case, models, tmp_path), torch.load(of_four[index]), BAR[case.dtype])


def test_the_experts_of_two_ranks_compute_what_was_chosen_and_nothing_else(models: Path) -> None:
    before, after = LocalGroup(2).run(partial(expert_flops, models / "qwen3-moe"))
    assert before[0] == before[1] > 0  # as many tokens
    assert after[0] != after[1]
    assert sum(after) == sum(before)
