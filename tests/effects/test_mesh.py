"""Keys that say how many ranks train, and what they share."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.models import offload
from cosmos_core.models.hf import load_model
from cosmos_core.models.teacher import make_teacher_train_config
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.feeds import rows_per_step
from tests.effects.change import EAGER, GRPO, SFT, Change, changes
from tests.effects.test_model import rank_of, samples
from tests.local_ranks import LocalGroup
from tests.unit.trainers import NoView, sft, trainer_of

KEYS = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size")
SHARDED = {**SFT, "policy.parallelism.dp_shard_size": 2}


def sharding(recipes: list[Recipe], folder: Path, stop: threading.Event) -> list[dict[str, Any]]:
    """Of each recipe: how FSDP treats the first block, of the teacher where it has one."""
    found = []
    for recipe in recipes:
        model: Any = load_model(str(folder), dtype=torch.float32)
        mesh = open_mesh(recipe.policy.parallelism, "cpu")
        train = make_teacher_train_config(recipe.distillation, recipe.train) if recipe.teacher else recipe.train
        trainer_of(model, train, 0, ProgressWriter(folder / f"progress_{dist.get_rank()}.json"), mesh)
        group = model.model.layers[0]._get_fsdp_state()._fsdp_param_group
        found.append(
            {
                "sums in": group.mp_policy.reduce_dtype,
                "in host memory": isinstance(group.offload_policy, CPUOffloadPolicy),
                "frees after forward": group.post_forward_mesh_info is not None,
            }
        )
    return found


def shapes(recipes: list[Recipe], stop: threading.Event) -> list[dict[str, Any]]:
    """Of each recipe's mesh: over which shape each thing is shared."""
    found = []
    for recipe in recipes:
        mesh = open_mesh(recipe.policy.parallelism, "cpu")
        assert mesh is not None
        parts: dict[str, DeviceMesh | None] = {
            "rows": mesh.dp, "weights": mesh.fsdp, "sequence": mesh.cp, "matrices": mesh.tp,
            "experts": mesh.ep, "layers": mesh.pp,
        }  # fmt: skip
        found.append({name: tuple(part.shape) for name, part in parts.items() if part is not None})
    assert dist.get_world_size() == 2
    return found


@pytest.fixture(scope="module")
def on_two() -> dict[str, dict[str, Any]]:
    bases = [SHARDED if key == "ep_size" else SFT for key in KEYS]
    recipes = [Change(f"policy.parallelism.{key}", 2, base).after for key, base in zip(KEYS, bases, strict=True)]
    return dict(zip(KEYS, LocalGroup(2).run(partial(shapes, recipes)), strict=True))


@changes(
    (Change("policy.parallelism.dp_shard_size", 2), {"rows": (2,), "weights": (2,)}),
    (Change("policy.parallelism.dp_replicate_size", 2), {"rows": (2,), "weights": (2, 1)}),
    (Change("policy.parallelism.cp_size", 2), {"rows": (1,), "weights": (2,), "sequence": (2,)}),
    (Change("policy.parallelism.tp_size", 2), {"rows": (1,), "matrices": (2,)}),
    (Change("policy.parallelism.ep_size", 2, SHARDED), {"rows": (2,), "weights": (2,), "experts": (2,)}),
    (Change("policy.parallelism.pp_size", 2), {"rows": (1,), "layers": (2,)}),
)
def test_it_changes_what_ranks_share(
    change: Change, expected: dict[str, Any], on_two: dict[str, dict[str, Any]]
) -> None:
    assert change.before.policy.parallelism.world_size == (2 if change.base is SHARDED else 1)
    assert change.after.policy.parallelism.world_size == 2
    assert on_two[change.key.rpartition(".")[2]] == expected


ON_TWO = {**EAGER, **SHARDED}
TAUGHT = {**ON_TWO, **GRPO, "distillation.enable": True}
SHARDING = {
    "train.fsdp_reduce_dtype": ("bfloat16", {"sums in": torch.bfloat16}),
    "train.fsdp_offload": (True, {"in host memory": True}),
    "train.fsdp_reshard_after_forward": ("never", {"frees after forward": False}),
    "distillation.fsdp_offload": (True, {"in host memory": True}),
    "distillation.fsdp_reshard_after_forward": ("always", {"frees after forward": True}),
}
SHARDINGS = [Change(key, value, TAUGHT if "distill" in key else ON_TWO) for key, (value, _) in SHARDING.items()]


@pytest.fixture(scope="module")
def sharded(model: Path) -> list[dict[str, Any]]:
    recipes = [recipe for change in SHARDINGS for recipe in (change.before, change.after)]
    answers: list[dict[str, Any]] = LocalGroup(2).run(partial(sharding, recipes, model))
    return answers


@changes(*SHARDINGS)
def test_it_changes_how_blocks_are_sharded(change: Change, sharded: list[dict[str, Any]]) -> None:
    number, is_teacher = 2 * list(SHARDING).index(change.key), change.key.startswith("distillation")
    base, found = sharded[number], sharded[number + 1]
    assert base == {"sums in": torch.float32, "in host memory": False, "frees after forward": not is_teacher}
    assert found == base | SHARDING[change.key][1]


@changes(Change("train.activation_offload", True, EAGER))
def test_it_changes_where_activations_wait(
    change: Change, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[tuple[int, ...]] = []

    class Counting(save_on_cpu):
        """Torch's, with the shapes that it was given."""

        def __init__(self, **settings: bool) -> None:
            super().__init__(**settings)
            move = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(tuple(tensor.shape)) or move(tensor)

    monkeypatch.setattr(offload, "save_on_cpu", Counting)
    monkeypatch.setattr(offload, "MIN_OFFLOADED_ELEMENTS", 1)

    def count(recipe: Recipe) -> int:
        moved.clear()
        rank = rank_of(recipe, model, tmp_path)
        for update in sft().updates(samples(), NoView()):
            rank.update(update)
        return len(moved)

    assert (count(change.before), count(change.after) > 10) == (0, True)


@changes(
    Change("policy.parallelism.n_init_replicas", 3, SFT),
    Change("policy.parallelism.n_init_replicas", 3, {**GRPO, "train.train_batch_per_replica": 32}),
)
def test_replicas_are_data_parallel_and_each_has_its_rows(change: Change) -> None:
    before, after = change.before, change.after
    assert (before.policy.parallelism.world_size, after.policy.parallelism.world_size) == (1, 3)
    assert after.policy.parallelism.dp_replicate_size == 3
    in_step = [rows_per_step(side.train, side.group_size) for side in (before, after)]
    assert in_step[1] == 3 * in_step[0]
    assert Recipe.model_validate(after.model_dump()) == after
