"""Keys of the model in memory: its precision, its blocks, its passes, and where it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.checkpoint import export
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from cosmos_core.train.measure import row_metrics
from cosmos_core.train.setup import open_trainer
from cosmos_core.train.trainer import Trainer
from tests.effects.change import EAGER, GRPO, SFT, Change, changes, difference, stage_of
from tests.unit.tiny_families import save_family
from tests.unit.trainers import NoView, grpo, logprobs, sft

EAGER_GRPO = {**EAGER, **GRPO}


def rank_of(recipe: Recipe, model: Path | str, folder: Path) -> Trainer:
    return open_trainer(stage_of(folder / "stage", recipe, model=model))


def samples(count: int = 8) -> list[Sample]:
    mask = np.array([0, 0, 0, 1, 1, 1], dtype=np.uint8)
    return [Sample(np.arange(i, i + 6), mask, advantage=(-1.0) ** i, reward=i % 2) for i in range(count)]


def facts(recipe: Recipe, model: Path, folder: Path) -> dict[str, Any]:
    """What is seen of a model that is ready to be trained."""
    rank = rank_of(recipe, model, folder)
    blocks = [block for block in rank.adapter.model.modules() if block._compiled_call_impl is not None]
    found = {
        "compiled": len(blocks),
        "weights": {parameter.dtype for parameter in rank.adapter.model.parameters()},
        "recomputes": rank.adapter.model.is_gradient_checkpointing,
        "seed": torch.initial_seed(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    for block in blocks:
        block._compiled_call_impl = None  # what it would compute is tested elsewhere, and compiling takes its time
    found["logprobs"] = logprobs(rank, samples(1), 1.0)[0].dtype
    return found


_FACTS: dict[str, dict[str, Any]] = {}


@changes(
    (Change("train.compile", True), {"compiled": 2}),
    (Change("train.master_dtype", "bfloat16"), {"weights": {torch.bfloat16}}),
    (Change("train.logprob_dtype", "bfloat16"), {"logprobs": torch.bfloat16}),
    (Change("train.seed", 7), {"seed": 7}),
    (Change("train.deterministic", True), {"deterministic": True}),
    (Change("policy.model_gradient_checkpointing", False), {"recomputes": False}),
)
def test_it_changes_the_model_that_is_trained(
    change: Change, expected: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    if (key := repr(change.before)) not in _FACTS:
        _FACTS[key] = facts(change.before, model, tmp_path)
    before, after = _FACTS[key], facts(change.after, model, tmp_path)
    assert before["compiled"] == 0 and before["weights"] == {torch.float32}
    assert difference(before, after) == expected


@changes(Change("train.param_dtype", "float32", {**SFT, "train.compile": False}))
def test_it_changes_what_is_computed_and_what_is_exported(change: Change, model: Path, tmp_path: Path) -> None:
    before, after = (
        logprobs(rank_of(side, model, tmp_path), samples(1), 1.0)[0] for side in (change.before, change.after)
    )
    assert not torch.equal(before, after)
    torch.testing.assert_close(before, after, rtol=0.05, atol=0.05)

    stage = stage_of(tmp_path / "export", change.after, kind="export", model=model)
    export.run(stage)
    (file,) = stage.path.glob("safetensors/*/model.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.float32}


class Passes:
    """Counts the rows of each forward pass, and the threads that it has."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.rows: list[int] = []
        self.threads: list[int] = []
        model.base_model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: torch.nn.Module, args: tuple[()], kwargs: dict[str, Any]) -> None:
        self.rows.append(len(kwargs["input_ids"]))
        self.threads.append(torch.get_num_threads())


def train_passes(recipe: Recipe, model: Path, folder: Path) -> Passes:
    rank = rank_of(recipe, model, folder)
    logprobs(rank, samples(1), 1.0)  # the first call looks at the head too
    passes = Passes(rank.adapter.model)
    logprobs(rank, samples(), 1.0)
    return passes


@changes(
    (Change("train.train_policy.mini_batch", 4, EAGER), [1, 1]),
    (Change("train.train_policy.mini_batch", 4, EAGER_GRPO), [1, 1]),
    (Change("train.sequence_packing", False, EAGER), [2, 2, 2, 2]),
)
def test_it_changes_the_rows_of_a_forward_pass(
    change: Change, expected: list[int], model: Path, tmp_path: Path
) -> None:
    assert train_passes(change.before, model, tmp_path).rows == [1, 1, 1, 1]
    assert train_passes(change.after, model, tmp_path).rows == expected


@changes(Change("train.num_threads", 3, EAGER))
def test_it_changes_the_threads_of_a_forward_pass(change: Change, model: Path, tmp_path: Path) -> None:
    def threads(recipe: Recipe, kind: str) -> set[int]:
        stage = stage_of(tmp_path / f"{kind}-{recipe.train.num_threads}", recipe, kind=kind, model=model)
        trainer = open_trainer(stage)
        passes = Passes(trainer.adapter.model)
        logprobs(trainer, samples(), 1.0)
        return {*passes.threads}

    default = torch.get_num_threads()
    assert threads(change.before, "sft") == {default} != {3} and threads(change.after, "sft") == {3}
    assert threads(change.after, "validate") == {default} == {torch.get_num_threads()}


class Rows(list[Any]):
    """Prepared rows, as samples."""

    has_sample_pairs = False

    def samples(self, positions: Sequence[int]) -> list[Any]:
        return [self[i] for i in positions]


@changes(Change("validation.batch_size", 8, EAGER))
def test_it_changes_the_rows_of_a_forward_pass_in_validation(change: Change, model: Path, tmp_path: Path) -> None:
    def passes(recipe: Recipe) -> list[int]:
        rank = rank_of(recipe, model, tmp_path)
        rows: Any = Rows(samples())
        logprobs(rank, samples(1), 1.0)
        passes = Passes(rank.adapter.model)
        row_metrics(stage_of(tmp_path, recipe), rank, sft(), rows, recipe.held_out_rows_per_pass)
        return passes.rows

    assert passes(change.before) == [1, 1, 1, 1]
    assert passes(change.after) == [1]


@changes(Change("policy.model_revision", "v2"))
@pytest.mark.usefixtures("hub")
def test_it_changes_which_revision_is_taken_from_the_hub(change: Change, tmp_path: Path) -> None:
    assert rank_of(change.before, "org/tiny", tmp_path).adapter.model.config.tie_word_embeddings
    assert not rank_of(change.after, "org/tiny", tmp_path).adapter.model.config.tie_word_embeddings


@changes(Change("train.train_policy.temperature", 2.0, EAGER_GRPO))
def test_it_flattens_the_distribution_that_is_trained(change: Change, model: Path, tmp_path: Path) -> None:
    def entropy(recipe: Recipe) -> float:
        policy = recipe.train.train_policy
        assert isinstance(policy, GrpoConfig)
        algorithm, rank = grpo(policy), rank_of(recipe, model, tmp_path)
        (update,) = algorithm.updates(samples(), NoView())
        return rank.update(update)["entropy"]

    assert entropy(change.after) > entropy(change.before) + 0.1


@changes(Change("train.train_policy.log_entropy", False, EAGER_GRPO))
def test_it_changes_whether_the_entropy_is_computed(change: Change, model: Path, tmp_path: Path) -> None:
    def computed(recipe: Recipe) -> tuple[str, bool]:
        (update,) = grpo(recipe.train.train_policy).updates(samples(), NoView())
        return update.request.entropy, "entropy" in rank_of(recipe, model, tmp_path).update(update)

    assert computed(change.before) == ("value", True)
    assert computed(change.after) == ("", False)


@changes(Change("policy.aux_loss_coeff", 0.5, {**EAGER, "train.optm_grad_norm_clip": 0.0}))
def test_it_changes_what_routers_learn(change: Change, tmp_path: Path) -> None:
    folder = save_family("qwen3-moe", tmp_path / "experts")

    def learned(recipe: Recipe) -> tuple[dict[str, float], torch.Tensor]:
        rank = rank_of(recipe, folder, tmp_path)
        (update,) = sft().updates(samples(), NoView())
        metrics = rank.update(update)
        (router, *_) = (p for name, p in rank.adapter.model.named_parameters() if name.endswith("gate.weight"))
        return metrics, router.grad

    (before, plain), (after, balanced) = learned(change.before), learned(change.after)
    assert "model_loss" not in before and after["model_loss"] > 0.4
    assert after["loss"] == pytest.approx(before["loss"], rel=1e-6)
    assert (plain - balanced).abs().max() > 1e-3 * plain.abs().max()
