"""A data term beside rollouts of text: its gradient, the order of its rows, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.base import Algorithm, Update
from cosmos_core.algorithms.data_term import DataTermAlgorithm, make_sft_update
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import StageContext
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.kinds.base import PreparedRows
from cosmos_core.data.sample import Sample
from cosmos_core.errors import DataError
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train import check
from cosmos_core.train.feeds import make_sft_loss
from cosmos_core.train.trainer import Trainer
from tasks.kinds import all_kinds
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import Given, NoView, grpo, score_in, trainer_of

TRAIN = TrainConfig.model_validate(
    {"param_dtype": "float32", "optm_grad_norm_clip": 0.0, "optm_lr": 1e-9, "train_policy": {"type": "grpo"}}
)
VARIANTS: dict[str, dict[str, Any]] = {
    "dapo": {"variant": "dapo", "epsilon_high": 0.28, "entropy_coeff": 0.1},
    "dr.grpo": {"loss_type": "seq-mean-token-mean", "unbiased_loss_max_tokens": 8},
    "aipo": {"aipo_rho": 2.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def trainer(folder: Path, tmp_path: Path) -> Trainer:
    made = trainer_of(load_model(str(folder), dtype=torch.float64), TRAIN, 0, ProgressWriter(tmp_path / "p.json"))
    score_in(made, torch.float64)
    return made


def rollouts() -> list[Sample]:
    random, mask = np.random.default_rng(0), np.array([0, 0, 1, 1, 1, 1], dtype=np.uint8)
    return [
        Sample(random.integers(0, 64, 6), mask, advantage, float(advantage > 0), np.full(4, -4.0, dtype=np.float32))
        for advantage in (1.0, -1.0, 0.5)
    ]


def rows() -> list[Sample]:
    """Of unequal lengths, so that a mean of means would not be the mean of all tokens."""
    random = np.random.default_rng(1)
    return [Sample(random.integers(0, 64, n), np.array([0] + [1] * (n - 1), dtype=np.uint8)) for n in (3, 9, 5, 4)]


def plain_gradient(model: torch.nn.Module, samples: Sequence[Sample]) -> tuple[float, dict[str, Tensor]]:
    """The loss of SFT and its gradient, written out: the mean over all labels of all rows."""
    model.zero_grad(set_to_none=True)
    losses = []
    for sample in samples:
        ids = torch.tensor(sample.input_ids)
        logprobs = model(input_ids=ids[None]).logits[0, :-1].double().log_softmax(-1)
        losses.append(-logprobs.gather(-1, ids[1:, None])[torch.tensor(sample.loss_mask[1:]) == 1])
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name", ["dr.grpo", *(pytest.param(each, marks=pytest.mark.full) for each in ("dapo", "aipo"))]
)
def test_the_gradient_is_that_of_the_algorithm_plus_weight_times_that_of_sft(
    folder: Path, tmp_path: Path, name: str
) -> None:
    config = GrpoConfig.model_validate({"type": "grpo", **VARIANTS[name]})

    def step(algorithm: Algorithm) -> tuple[dict[str, float], dict[str, Tensor]]:
        rank = trainer(folder, tmp_path)
        [update] = algorithm.updates(rollouts(), NoView())
        metrics = rank.update(update)
        return metrics, {name: p.grad.clone() for name, p in rank.adapter.model.named_parameters()}

    alone, of_rl = step(grpo(config))
    both, of_both = step(DataTermAlgorithm(grpo(config), lambda number: make_sft_update(rows(), 0.25)))
    nll, of_sft = plain_gradient(load_model(str(folder), dtype=torch.float64), rows())
    assert both["data/nll"] == pytest.approx(nll, rel=1e-9)
    assert both["loss"] == pytest.approx(alone["loss"] + 0.25 * nll, rel=1e-9)
    for key, gradient in of_both.items():
        torch.testing.assert_close(gradient, of_rl[key] + 0.25 * of_sft[key], rtol=1e-9, atol=1e-12)


class Numbered(PreparedRows):
    """Rows of three tokens, each its own number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def samples(self, positions: Any, seed: Any = None, micro_batch: int | None = None) -> list[Sample]:
        return [Sample(np.full(3, i), np.ones(3, dtype=np.uint8), micro_batch=micro_batch) for i in positions]


def recipe(**term: Any) -> Recipe:
    policy = {"type": "grpo", "data_term": {"name": "rows", "weight": 0.5, "batch_size": 4, **term}}
    return Recipe.model_validate({"train": {"train_policy": policy}})


def learned(algorithm: Algorithm, steps: int) -> list[list[int]]:
    """The rows beside the rollouts of train steps, of two optimizer steps each."""
    updates = [update for _ in range(steps) for update in algorithm.updates(rollouts()[:2], NoView())]
    return [[int(sample.input_ids[0]) for sample in update.data.samples] for update in updates if update.data]


def _make_sft_loss(recipe: Recipe) -> Callable[[int], Update]:
    term = recipe.train.train_policy.supervised_rows
    assert term is not None
    return make_sft_loss(Numbered(12), recipe.train, term)


def beside(**term: Any) -> DataTermAlgorithm:
    config = GrpoConfig.model_validate(
        {"batch_size_per_optimize": 1, "mini_batch": 1, "use_rollout_logprobs_for_loss": True}
    )
    return DataTermAlgorithm(grpo(config), _make_sft_loss(recipe(**term)))


def test_each_optimizer_step_has_rows_of_its_own_and_each_row_comes_once_an_epoch() -> None:
    steps = learned(beside(), 3)
    assert [len(step) for step in steps] == [4] * 6
    epochs = [[row for step in steps[start : start + 3] for row in step] for start in (0, 3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(12))] * 2
    assert epochs[0] != epochs[1]


def test_every_row_comes_before_any_comes_again_whatever_their_number_in_a_step() -> None:
    steps = learned(beside(batch_size=5), 6)
    rows = [row for step in steps for row in step]
    assert [len(step) for step in steps] == [5] * 12
    assert [sorted(rows[start : start + 12]) for start in range(0, 60, 12)] == [list(range(12))] * 5


def test_a_resumed_training_goes_on_with_the_rows_behind_those_it_has_learned() -> None:
    whole = learned(beside(), 3)
    first = beside()
    begun = learned(first, 1)
    second = beside()
    second.load_state_dict(first.state_dict())
    assert begun + learned(second, 2) == whole
    assert second.state_dict() == {"algorithm": {}, "num_updates": 6}


def test_it_goes_on_from_a_checkpoint_that_had_no_data_term() -> None:
    found = beside()
    found.load_state_dict({"num_steps": 7})
    assert found.state_dict() == {"algorithm": {}, "num_updates": 0}


def test_the_reference_is_reset_after_train_steps_whether_or_not_they_had_samples() -> None:
    algorithm = DataTermAlgorithm(
        grpo(GrpoConfig(kl_beta=0.1, reference_reset_interval=2)), lambda _: make_sft_update([], 0.1)
    )
    view = Given()
    for step in range(3, 7):  # a resumed training goes on counting
        algorithm.after_train_step(step, view)
    assert view.resets == [("reference", True)] * 2


def test_fewer_rows_than_a_step_has_are_told() -> None:
    with pytest.raises(DataError, match="data_term has 12 rows, fewer than batch_size = 13; lower it, or give more"):
        beside(batch_size=13)
    term = {"name": "a.jsonl", "weight": 0.5, "batch_size": 13}
    recipe = Recipe.model_validate({"train": {"train_policy": {"type": "grpo", "data_term": term}}})
    for num_rows, expected in ((12, "data_term has 12 rows, fewer than"), (13, "None")):
        splits = {"validation": {}, "data_term": {"rows": num_rows}}
        errors = check._check_row_counts(recipe.train, recipe.group_size, 10_000, splits, [])
        assert expected in str(errors.get("too_few")), num_rows


@pytest.mark.parametrize(
    ("term", "pp_size", "told"),
    [
        ({"name": ""}, 1, "train.train_policy.data_term.weight = 0.5 names no rows: set"),
        ({"weight": 0.0}, 1, "train.train_policy.data_term.weight = 0 leaves out the rows of"),
        ({"name": "mine.py:Rows"}, 1, "train.train_policy.data_term.name = 'mine.py:Rows': a data set class of your"),
        ({}, 2, "policy.parallelism.pp_size excludes train.train_policy.data_term; set it to 1"),
    ],
)
def test_what_a_data_term_cannot_be_is_refused_in_one_line(term: dict[str, Any], pp_size: int, told: str) -> None:
    made = recipe(**term)
    mesh = made.policy.parallelism.copy_with(pp_size=pp_size)
    made = made.copy_with(policy=made.policy.copy_with(parallelism=mesh))
    [line] = made.train.train_policy.unsupported_setting_errors(StageContext(made, all_kinds()["rl"]))
    assert line.startswith(told)
