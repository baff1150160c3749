"""Keys that say how many ranks train, and what they share."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cosmos_core.cluster.group import WorkerGroup
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.parallel.mesh import open_mesh
from tests.effects.change import SFT, Change, changes

KEYS = ("dp_shard_size", "dp_replicate_size", "tp_size", "cp_size", "ep_size", "pp_size")
SHARDED = {**SFT, "policy.parallelism.dp_shard_size": 2}


def shapes(recipes: list[Recipe], stop: threading.Event) -> list[dict[str, Any]]:
    """Of each recipe's mesh: over which shape each thing is shared."""
    found = []
    for recipe in recipes:
        mesh = open_mesh(recipe.policy.parallelism, "cpu")
        assert mesh is not None
        parts: dict[str, DeviceMesh | None] = {
            "rows": mesh.data, "weights": mesh.shard, "sequence": mesh.context, "matrices": mesh.tensor,
            "experts": mesh.expert, "layers": mesh.pipeline,
        }  # fmt: skip
        found.append({name: tuple(part.shape) for name, part in parts.items() if part is not None})
    assert dist.get_world_size() == 2
    return found


@pytest.fixture(scope="module")
def on_two() -> dict[str, dict[str, Any]]:
    bases = [SHARDED if key == "ep_size" else SFT for key in KEYS]
    recipes = [Change(f"policy.parallelism.{key}", 2, base).after for key, base in zip(KEYS, bases, strict=True)]
    return dict(zip(KEYS, WorkerGroup(2, "local").run(partial(shapes, recipes)), strict=True))


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
