"""Keys that say how micro-batches go through a pipeline of two ranks."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.models.pipeline_runner import PipelineRunner
from cosmos_core.parallel.mesh import open_mesh
from cosmos_core.parallel.pipeline import StagePlaceholder, apply_pp
from tests.effects.change import SFT, Change, changes
from tests.local_ranks import LocalGroup

BASE = {**SFT, "policy.parallelism.pp_size": 2, "train.train_policy.mini_batch": 4}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pp_schedule": ("GPipe", {"schedule": "ScheduleGPipe", "layers": [[0, 1, 2]]}),
    "pp_layers_per_stage": (3, {"layers": [[0, 1, 2]]}),
    "pp_micro_batch_size": (2, {"rows": 2, "micro-batches": 2}),
}
PLAIN = {"schedule": "ScheduleInterleaved1F1B", "layers": [[0, 1], [3]], "rows": 1, "micro-batches": 4}


def facts(recipes: list[Recipe], stop: threading.Event) -> list[dict[str, Any]]:
    """Of each recipe: the schedule, the layers of each stage of the first rank, how `mini_batch` rows are taken."""
    found = []
    for recipe in recipes:
        mesh = open_mesh(recipe.policy.parallelism, "cpu")
        assert mesh is not None and mesh.pp is not None
        model = Qwen3ForCausalLM(
            Qwen3Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=5, num_attention_heads=2,
                        num_key_value_heads=2, head_dim=4)
        )  # fmt: skip
        apply_pp(model, mesh.parallelism, mesh.pp.get_local_rank())
        stages, size = PipelineRunner(model, recipe.train, mesh, torch.float32), recipe.train.train_policy.mini_batch
        own = [
            [i for i, layer in enumerate(stage.model.model.layers) if not isinstance(layer, StagePlaceholder)]
            for stage in stages.root_modules
        ]
        schedule = type(stages._build_schedule(2, 4, lambda _, number: torch.zeros(()))).__name__
        rows = stages.rows_per_micro_batch(size)
        found.append({
            "schedule": schedule, "layers": own, "rows": rows,
            "micro-batches": stages.num_micro_batches(size // rows, size),
        })  # fmt: skip
    return found


@pytest.fixture(scope="module")
def on_two() -> dict[str, dict[str, Any]]:
    recipes = [Change(f"policy.parallelism.{key}", value, BASE).after for key, (value, _) in CASES.items()]
    plain = Change("policy.parallelism.pp_schedule", "GPipe", BASE).before
    found = LocalGroup(2).run(partial(facts, [plain, *recipes]))
    return dict(zip(["", *CASES], found, strict=True))


@changes(*((Change(f"policy.parallelism.{key}", value, BASE), other) for key, (value, other) in CASES.items()))
def test_it_changes_how_a_pipeline_runs(
    change: Change, expected: dict[str, Any], on_two: dict[str, dict[str, Any]]
) -> None:
    assert on_two[""] == PLAIN
    assert on_two[change.key.rpartition(".")[2]] == PLAIN | expected
