"""The estimate against a real step: the trainer's own update on CPU, in a process of its own.

Measured are the events of PyTorch's allocator (`torch.profiler`, memory), which know nothing of how the estimate is
made and see scratch space inside kernels too, on top of the bytes of the tensors that are there before the step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from cosmos_core.algorithms.registry import make_algorithm
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.estimate import estimate
from tests.unit.trainers import trainer_of

MICRO_BATCH, BATCH, VOCABULARY = 4, 8, 8192
SFT = {"type": "sft", "mini_batch": MICRO_BATCH}
GRPO = {"type": "grpo", "mini_batch": MICRO_BATCH, "reward_function": "exact_match"}


class Case(NamedTuple):
    policy: dict[str, Any]
    is_checkpointed: bool
    train: dict[str, Any] = {}
    length: int = 512
    model: str = "dense"


CASES = {
    "sft, float32": Case(SFT, False, {"param_dtype": "float32"}, length=256, model="small"),
    "sft, float32, checkpointed": Case(SFT, True, {"param_dtype": "float32"}),
    "sft, bfloat16": Case(SFT, False),
    "sft, bfloat16, checkpointed": Case(SFT, True),
    "sft, experts": Case(SFT, True, model="experts", length=256),
    "sft, bfloat16 master, foreach": Case(SFT, True, {"master_dtype": "bfloat16", "optm_impl": "foreach"}),
    "sft, one micro-batch, for-loop": Case({**SFT, "mini_batch": BATCH}, True, {"optm_impl": "for-loop"}, 256),
    "grpo, bfloat16": Case(GRPO, False),
    "grpo, float32, checkpointed, reference": Case({**GRPO, "kl_beta": 0.01}, True, {"param_dtype": "float32"}),
    # Short rows: the peak is the pass that measures pi_old while the gradients of the step before are still held.
    "grpo, an update a row": Case({**GRPO, "mini_batch": 1, "batch_size_per_optimize": 1}, True, length=128),
}
SHORT = ("sft, float32",)
"""What the suite itself measures."""


def recipe_of(case: Case) -> Recipe:
    return Recipe.model_validate(
        {
            "policy": {"model_max_length": case.length, "model_gradient_checkpointing": case.is_checkpointed},
            "train": {"compile": False, "train_batch_per_replica": BATCH, "train_policy": case.policy, **case.train},
            "rollout": {"backend": "hf", "n_generation": 4, "batch_size": 2, "max_response_length": 64},
        }
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """8.4 million parameters, tied embeddings; five; and experts, not tied. Activations weigh as much as they do."""
    folder = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    }  # fmt: skip

    @cache
    def saved(name: str) -> Path:
        dense = Qwen3Config(**sizes, intermediate_size=768, tie_word_embeddings=True)
        experts = Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
        small = Qwen3Config(**sizes | {"num_hidden_layers": 4}, intermediate_size=768, tie_word_embeddings=True)
        config = {"dense": dense, "small": small, "experts": experts}[name]
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        return folder / name

    return saved


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_the_estimated_peak_is_that_of_a_measured_step(
    models: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    folder = str(models(case.model))
    program = f"from {__name__} import main\nmain()"
    done = subprocess.run(
        [sys.executable, "-c", program, folder, name, str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    found = estimate(recipe_of(case), folder, ProgressWriter(tmp_path / "estimate.json"))
    assert found.notes == ("steps and tokens: unknown, because the rows are not on this machine yet",)
    assert found.parameters == found.trainable == measured["parameters"]
    for part in ("weights", "optimizer", "reference"):
        assert getattr(found.memory, part) == measured[part], part
    assert found.memory.gradients in {measured["gradients"], 0}  # 0: the peak comes before any of them
    assert found.peak == pytest.approx(measured["peak"], rel=0.03), (asdict(found.memory), measured)


def measure(folder: str, case: str, scratch: Path) -> dict[str, int]:
    """Bytes of two train steps."""
    recipe = recipe_of(CASES[case])
    torch.manual_seed(0)
    dtype = getattr(torch, recipe.train.master_dtype)
    rank = trainer_of(
        load_model(folder, dtype=dtype, gradient_checkpointing=recipe.policy.model_gradient_checkpointing),
        recipe.train, 0, ProgressWriter(scratch / "progress.json"),
    )  # fmt: skip
    policy = recipe.train.train_policy
    algorithm = make_algorithm(recipe)
    for name in policy.auxiliary_model_names:
        rank.weight_sets.add(name)
    random = np.random.default_rng(0)
    lengths = [CASES[case].length - 7 * (i % 3) for i in range(BATCH)]
    samples = [
        Sample(random.integers(0, VOCABULARY, n), np.ones(n, np.uint8), random.normal(), random.normal())
        for n in lengths
    ]
    weights = [*rank.adapter.model.parameters(), *rank.adapter.model.buffers()]
    held = {
        "weights": sum(t.nbytes for t in weights),
        "reference": sum(t.nbytes for named in rank.weight_sets.tensors.values() for t in named.values()),
    }
    # From the first step on, because the profiler does not see the end of what began before it.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        for update in (update for _ in range(2) for update in algorithm.updates(samples, rank)):
            rank.update(update)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    state = [value for entry in rank.optimizer.state.values() for value in entry.values()]
    return held | {
        "parameters": sum(p.numel() for p in rank.adapter.model.parameters()),
        "gradients": sum(p.grad.nbytes for p in rank.adapter.model.parameters() if p.grad is not None),
        "optimizer": sum(t.nbytes for t in state),
        "peak": sum(held.values()) + int(np.cumsum(changes).max()),
    }


def main() -> None:
    """Measure what the command line names."""
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))))  # noqa: T201 - read by the test
