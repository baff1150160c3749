"""Each rank saves its own part; the parts are a checkpoint for every mesh."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from cosmos_core.checkpoint.resume import resume_obstacle
from tests.distributed import saving
from tests.distributed.matrix import chosen
from tests.local_ranks import LocalGroup

ALONE: dict[str, Any] = {}
DP2, DP4 = {"dp_shard_size": 2}, {"dp_shard_size": 4}
HSDP = {"dp_replicate_size": 2, "dp_shard_size": 2}
TP2, TP2_DP2 = {"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}
PP2 = {"pp_size": 2, "pp_schedule": "1F1B"}
DDP2, PP2_DP2 = {"dp_replicate_size": 2}, {**PP2, "dp_shard_size": 2}
EP2 = {"ep_size": 2, "dp_shard_size": 2}
USUAL = [
    ("dense", DP2, DP2), ("dense", DP2, TP2), ("dense", DDP2, PP2), ("dense", PP2, DP2), ("moe", EP2, ALONE),
]  # fmt: skip
FURTHER = [
    ("dense", HSDP, PP2_DP2), ("dense", PP2_DP2, DP2), ("dense", DP4, DP4), ("dense", DP4, TP2_DP2),
    ("dense", TP2_DP2, DP2), ("dense", DP2, ALONE), ("dense", ALONE, DP4), ("dense", PP2_DP2, PP2_DP2),
    ("moe", EP2, TP2_DP2), ("moe", DP2, EP2), ("moe", TP2_DP2, EP2),
]  # fmt: skip
RESHARDED = [*USUAL, *FURTHER]
SHAPE: dict[str, Any] = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


def ranks(mesh: dict[str, Any]) -> int:
    size = 1
    for axis, value in mesh.items():
        size *= value if axis.endswith("_size") and axis != "ep_size" else 1
    return size


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)).save_pretrained(folder / "dense")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **experts)).save_pretrained(folder / "moe")
    return folder


def each(function: Any, cases: list[tuple[str, dict[str, Any], Path]], models: Path, scratch: Path) -> list[Any]:
    """The answers for cases, which share a group where they have as many ranks."""
    found: dict[int, Any] = {}
    for size in sorted({ranks(mesh) for _, mesh, _ in cases}):
        alike = [index for index, (_, mesh, _) in enumerate(cases) if ranks(mesh) == size]
        program = partial(function, [cases[index] for index in alike], models, scratch)
        answers = program(threading.Event()) if size == 1 else LocalGroup(size).run(program)
        found |= dict(zip(alike, answers, strict=True))
    return [found[index] for index in range(len(cases))]


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return all cases if one of the further ones runs."""
    last = max(chosen(request, "test_a_checkpoint_of_one_mesh_goes_on_on_another"), default=0)
    return RESHARDED if last >= len(USUAL) else USUAL


@pytest.fixture(scope="module")
def saved(cases: Any, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, saving.Saved]]:
    """By model and mesh a checkpoint of one step, with the newer one spoilt, and what was in it."""
    root = tmp_path_factory.mktemp("saved")
    wanted = {label(model, mesh): (model, mesh, root / label(model, mesh)) for model, mesh, _ in cases}
    answers = each(saving.save_all, list(wanted.values()), models, root)
    for _, _, folder in wanted.values():
        assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_3"]
        assert resume_obstacle(folder, 3, "f") is None
        (folder / "step_3/policy/manifest.json").unlink()
    return {name: (case[2], answer) for (name, case), answer in zip(wanted.items(), answers, strict=True)}


@pytest.fixture(scope="module")
def loaded(cases: Any, saved: Any, models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[saving.Saved]:
    wanted = [(model, after, saved[label(model, before)][0]) for model, before, after in cases]
    return each(saving.load_all, wanted, models, tmp_path_factory.mktemp("loaded"))


def label(model: str, mesh: dict[str, Any]) -> str:
    return "-".join([model, *(f"{axis.removesuffix('_size')}{size}" for axis, size in mesh.items())])


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(
            index, marks=[pytest.mark.full] * (index >= len(USUAL)), id=f"{label(model, b)} to {label(model, a)}"
        )
        for index, (model, b, a) in enumerate(RESHARDED)
    ],
)
def test_a_checkpoint_of_one_mesh_goes_on_on_another(index: int, saved: Any, loaded: list[saving.Saved]) -> None:
    model, before, after = RESHARDED[index]
    (_, expected), found = saved[label(model, before)], loaded[index]
    assert found.held.keys() == expected.held.keys()
    for start in ("ema.", "old.", "feed.buffered.0", "algorithm.baseline"):
        assert any(name.startswith(start) for name in found.held), start
    for name, tensor in expected.held.items():
        assert np.array_equal(found.held[name], tensor), name
    assert found.value == 7
    if ranks(before) == ranks(after):
        assert found.drawn == expected.drawn and len(set(found.drawn)) == ranks(after)
    else:
        assert found.drawn == []  # nothing to go on with
    if before == after:
        assert found.losses == expected.losses
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)


def test_each_rank_writes_its_own_part_once(saved: Any) -> None:
    folder, expected = saved[label("dense", DP2)]
    policy = folder / "step_1/policy"
    names = ["extra.json", "extra_1.json", "rank_0.safetensors", "rank_1.safetensors"]
    assert sorted(path.name for path in policy.iterdir()) == sorted([*names, "manifest.json"])
    manifest = json.loads((policy / "manifest.json").read_text())
    assert manifest["ranks"] == 2 and sorted(manifest["files"]) == names
    whole = sum(tensor.nbytes for tensor in expected.held.values())
    sizes = [number_of_bytes(policy / f"rank_{rank}.safetensors") for rank in range(2)]
    assert sum(sizes) == whole
    assert max(sizes) < 1.02 * whole / 2


def test_replicas_are_written_once(saved: Any) -> None:
    for mesh, shards in ((DDP2, 1), (HSDP, 2)):
        if (name := label("dense", mesh)) in saved:
            folder, expected = saved[name]
            whole = sum(tensor.nbytes for tensor in expected.held.values())
            files = sorted((folder / "step_1/policy").glob("*.safetensors"))
            assert [file.name for file in files] == [f"rank_{rank}.safetensors" for rank in range(shards)]
            assert sum(map(number_of_bytes, files)) == whole


def number_of_bytes(file: Path) -> int:
    with safe_open(file, framework="pt") as opened:
        return sum(opened.get_tensor(name).nbytes for name in opened.keys())  # noqa: SIM118 - no dict


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=pytest.mark.full), True], ids=["sync", "async"])
def test_a_full_disk_of_one_rank_is_one_line_on_all_and_the_checkpoint_before_stays(
    models: Path, tmp_path: Path, asynchronous: bool
) -> None:
    folder = tmp_path / "checkpoints"
    program = partial(saving.save_where_one_disk_is_full, models / "dense", asynchronous, folder, tmp_path)
    line = (
        f"disk full while saving checkpoint step_2 in {folder}; the checkpoint of step 1 is intact; "
        "free space and run again"
    )
    assert LocalGroup(2).run(program) == [line, line]
    assert [path.name for path in folder.iterdir()] == ["step_1"]
    assert resume_obstacle(folder, 1, "f") is None
