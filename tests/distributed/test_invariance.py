"""Loss and gradients do not depend on how an update was split over ranks, micro-batches and rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.distributed.matrix import VOCABULARY, Case, axes, cells, chosen, computed, run_cases, settings
from tests.local_ranks import LocalGroup

DP2, DP4 = (("dp_shard_size", 2),), (("dp_shard_size", 4),)
HSDP = (("dp_replicate_size", 2), ("dp_shard_size", 2))
TP2 = (("tp_size", 2),)
TP2_DP2 = (("dp_shard_size", 2), ("tp_size", 2))
CP2, CP2_DP2, CP4 = (("cp_size", 2),), (("cp_size", 2), ("dp_shard_size", 2)), (("cp_size", 4),)
DDP = (("dp_replicate_size", 2),)
GPIPE, ONE_F, PP2 = ((("pp_size", 2), ("pp_schedule", name)) for name in ("GPipe", "1F1B", "Interleaved1F1B"))
PP4 = (("pp_size", 4), ("pp_schedule", "1F1B"))

MIXED: dict[str, Any] = {"dtype": "float32", "train": (("param_dtype", "bfloat16"),)}
TWO = [
    *(Case(mesh, mini_batch, packed) for mesh in (DP2,) for mini_batch in (1, 2, 4) for packed in (False, True)),
    Case(DDP, 2),
    Case(DP2, 4, masked=3),
    Case(DP2, 8, masked=3, packed=True),
    Case(DP2, 2, algorithm="grpo"),
    Case(DP2, 2, algorithm="grpo", idle=5),
    Case(DP2, 2, algorithm="taught"),
    Case(DP2, 1, algorithm="dpo"),
    Case(DP2, 2, algorithm="dpo", packed=True),
    Case(DP2, 2, algorithm="kto"),
    Case(DP2, 2, checkpointing=True),
    Case(DP2, 2, train=(("fsdp_offload", True),)),
    Case(DP2, 2, train=(("activation_offload", True),)),
    Case(DP2, 2, train=(("activation_offload", True),), checkpointing=True, packed=True),
    Case(DP2, 2, train=(("fsdp_reshard_after_forward", "never"),)),
    Case(DP2, 2, dtype="float32"),
    Case(DP2, 2, model="untied"),
    *(Case(TP2, mini_batch, packed) for mini_batch in (1, 4) for packed in (False, True)),
    Case(TP2, 2, model="untied"),
    Case(TP2, 2, algorithm="grpo", model="untied"),
    Case(TP2, 2, algorithm="taught"),
    Case(TP2, 2, algorithm="dpo"),
    Case(TP2, 2, dtype="float32"),
    *(Case(CP2, mini_batch, True) for mini_batch in (1, 2, 4)),
    Case(CP2, 2, masked=3),
    Case(CP2, 2, algorithm="grpo", model="untied"),
    Case(CP2, 2, algorithm="taught"),
    Case(CP2, 1, algorithm="dpo"),
    Case(CP2, 1, algorithm="kto"),
    Case(CP2, 2, checkpointing=True),
    Case(CP2, 2, dtype="float32"),
    *(
        Case(mesh, mini_batch, packed, model="deep")
        for mesh in (GPIPE, ONE_F, PP2)
        for mini_batch in (1, 2, 4)
        for packed in (False, True)
    ),
    *(Case(mesh, 4, model="untied") for mesh in (GPIPE, ONE_F, PP2)),
    *(Case(mesh, 8, masked=3, packed=mesh is PP2, model="deep") for mesh in (GPIPE, ONE_F, PP2)),
    Case((*PP2, ("pp_micro_batch_size", 2)), 8, model="deep"),
    Case(PP2, 4, checkpointing=True, model="deep"),
    Case(PP2, 4, dtype="float32", model="deep"),
    Case(PP2, 2, algorithm="grpo", model="deep"),
    Case(PP2, 2, algorithm="taught", model="deep"),
    Case(PP2, 2, algorithm="dpo", model="deep"),
    Case(PP2, 4, trained="adapter", model="deep"),
    Case(ONE_F, 4, trained="attention", model="deep"),
    Case(DP2, 2, packed=True, **MIXED),
]
FOUR = [
    *(Case(mesh, mini_batch, packed) for mesh in (DP4, HSDP) for mini_batch in (1, 2) for packed in (False, True)),
    Case(DP4, 4, masked=2),
    Case(HSDP, 2, masked=2, packed=True),
    Case(HSDP, 2, algorithm="grpo"),
    Case(HSDP, 1, algorithm="dpo"),
    Case(CP2_DP2, 1, algorithm="dpo"),
    Case(DP4, 1, algorithm="grpo", packed=True),
    Case(DP4, 2, dtype="float32"),
    Case(TP2_DP2, 2),
    Case(TP2_DP2, 1, packed=True, model="untied"),
    Case(TP2_DP2, 4, masked=3),
    Case(CP2_DP2, 2),
    Case(CP2_DP2, 1, algorithm="grpo"),
    Case(CP2_DP2, 4, masked=3),
    Case(CP4, 2),
    Case((("cp_size", 2), ("tp_size", 2)), 2, model="untied"),
    *(
        Case((*mesh, *DP2), mini_batch, packed, model="deep")
        for mesh in (GPIPE, ONE_F, PP2)
        for mini_batch in (1, 4)
        for packed in (False, True)
    ),
    *(Case((*mesh, *DP2), 4, model="untied") for mesh in (GPIPE, ONE_F, PP2)),
    *(Case((*mesh, *DP2), 4, masked=3, packed=mesh is PP2, model="deep") for mesh in (GPIPE, ONE_F, PP2)),
    Case((*PP2, *DP2), 4, checkpointing=True, model="deep"),
    Case((*PP2, *DP2), 4, dtype="float32", model="deep"),
    Case((*PP2, *DP2), 2, algorithm="grpo", model="deep"),
    Case((*PP2, *DDP), 2, model="deep"),
    Case((*PP2, *TP2), 2, packed=True, trained="adapter", model="untied"),
    Case((*PP2, *TP2), 2, model="deep"),
    Case((*PP2, *CP2), 2, model="deep"),
    *(Case(mesh, 4, packed=True, model="untied", **MIXED) for mesh in ((*PP2, *DP2), TP2_DP2)),
    Case(PP4, 4, model="deep"),
    Case(PP4, 2, packed=True, model="deep"),
]
USUAL_PAIRS = {
    ("dp_shard_size", "tp_size"),
    ("cp_size", "dp_shard_size"),
    ("dp_shard_size", "pp_size"),
    ("pp_size", "tp_size"),
}
"""That the suite has beside the sharded replicas of `test_diffusion.py`."""
BAR = {"float64": 1e-9, "float32": 1e-5}
MIXED_BAR = 0.05
"""Norms are rounded too where FSDP gathers them."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    for name in ("tied", "untied", "deep"):
        config = Qwen3Config(
            vocab_size=VOCABULARY + (name == "untied"), hidden_size=32, intermediate_size=64,
            num_hidden_layers=5 if name == "deep" else 2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            max_position_embeddings=64, tie_word_embeddings=name != "untied", initializer_range=0.2,
        )  # fmt: skip
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
    return folder


def answers(cases: dict[int, Case], size: int, models: Path, folder: Path) -> dict[int, Path]:
    LocalGroup(size).run(partial(run_cases, cases, models, folder))
    return {index: folder / f"{index}.pt" for index in cases}


@pytest.fixture(scope="module")
def of_two(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Path]:
    cases = {index: TWO[index] for index in chosen(request, "test_two_ranks_do_what_one_does")}
    return answers(cases, 2, models, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def of_four(models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[int, Path]:
    cases = {index: FOUR[index] for index in chosen(request, "test_four_ranks_do_what_one_does")}
    return answers(cases, 4, models, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The update computed by this process, with padded rows."""
    found: dict[Case, dict[str, Any]] = {}

    def compute(case: Case) -> dict[str, Any]:
        plain = replace(case, mesh=(), mini_batch=4, packed=False, checkpointing=False)
        if plain not in found:
            found[plain] = computed(plain, models, tmp_path_factory.mktemp("alone"))
        return found[plain]

    return compute


def bar_of(case: Case) -> float:
    return MIXED_BAR if MIXED["train"] == case.train else BAR[case.dtype]


def compare(expected: dict[str, Any], found: dict[str, Any], bar: float) -> None:
    assert found["figures"].keys() == expected["figures"].keys()
    for name, value in expected["figures"].items():
        assert found["figures"][name] == pytest.approx(value, rel=100 * bar, abs=bar), name
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        scale = gradient.abs().max()
        assert scale > 0, name
        assert (found["gradients"][name] - gradient).abs().max() / scale <= bar, name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=0, atol=max(1e-6, 1e3 * bar), msg=name)


@pytest.mark.parametrize("index", cells(TWO, settings))
def test_two_ranks_do_what_one_does(index: int, of_two: dict[int, Path], alone: Any) -> None:
    case = TWO[index]
    compare(alone(case), torch.load(of_two[index]), bar_of(case))


@pytest.mark.parametrize("index", cells(FOUR, lambda case: axes(case) & USUAL_PAIRS))
def test_four_ranks_do_what_one_does(index: int, of_four: dict[int, Path], alone: Any) -> None:
    case = FOUR[index]
    compare(alone(case), torch.load(of_four[index]), bar_of(case))
