"""Completions without a gradient are left out of the training: the update is the same as if they were run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.data_term import DataTermAlgorithm, make_sft_update
from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.algorithms.policy_loss import scales_with_advantage
from cosmos_core.algorithms.zero_gradient import MIN_COMPARED_COMPLETIONS, ZERO_GRADIENT_METRIC, can_skip_zero_advantage
from cosmos_core.config.schema.distillation import DistillationConfig
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.data.sample import Sample, batch_within_token_limit
from cosmos_core.models.hf import load_model
from cosmos_core.run.progress import ProgressWriter
from cosmos_core.train.trainer import Trainer
from cosmos_core.types import ImageRef
from tests.unit.tiny_model import save_tiny_model
from tests.unit.trainers import Given, NoView, score_in, trainer_of

NUM_GROUPS, GROUP = 5, 4
CONSTANT = (0, 3, 4)
"""Groups whose completions have equal rewards."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def samples(constant: tuple[int, ...] = CONSTANT) -> list[Sample]:
    random = np.random.default_rng(0)
    found = []
    for group in range(NUM_GROUPS):
        for _ in range(GROUP):
            length = int(random.integers(8, 40))
            mask = np.zeros(length, dtype=np.uint8)
            mask[4:] = 1
            logprobs = -5 - random.random(length - 4).astype(np.float32)
            advantage = 0.0 if group in constant else float(random.normal())
            found.append(Sample(random.integers(0, 250, length), mask, advantage, 1.0, logprobs))
    return found


def trained(
    folder: Path,
    tmp_path: Path,
    policy: dict[str, Any],
    steps: list[list[Sample]],
    *,
    skips: bool,
    dtype: torch.dtype = torch.float32,
) -> tuple[list[dict[str, float]], list[dict[str, Tensor]], dict[str, Tensor], int]:
    """Return figures and gradients of each update, the last weights, and how many samples were run with a gradient."""
    train = TrainConfig.model_validate(
        {"param_dtype": "float32", "optm_lr": 1e-3, "train_policy": {"type": "grpo", "mini_batch": 8, **policy}}
    )
    trainer = trainer_of(load_model(str(folder), dtype=dtype), train, 0, ProgressWriter(tmp_path / "p.json"))
    score_in(trainer, dtype)
    assert isinstance(train.train_policy, GrpoConfig)
    algorithm = Grpo(train.train_policy)
    assert trainer.has_separate_gradients
    algorithm.has_separate_gradients = skips
    figures, gradients, num_run = [], [], 0
    for number, batch in enumerate(steps):
        trainer.set_learning_rate(number, 20)
        batch = batch_within_token_limit(batch, train.train_policy.max_token_len_per_mini_batch)
        for update in DataTermAlgorithm(algorithm, lambda _: make_sft_update(samples()[:3], 0.1)).updates(
            batch, trainer
        ):
            figures.append(trainer.update(update))
            num_run += len(update.samples)
            named = trainer.adapter.model.named_parameters()
            gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})
    weights = {name: p.detach().clone() for name, p in trainer.adapter.model.named_parameters()}
    return figures, gradients, weights, num_run


@pytest.mark.parametrize(
    "policy",
    [
        {},
        pytest.param({"loss_type": "seq-mean-token-mean", "variant": "gspo"}, marks=pytest.mark.full),
        pytest.param(
            {"loss_type": "seq-mean-token-sum", "variant": "cispo", "mu_iterations": 2}, marks=pytest.mark.full
        ),
        {"batch_size_per_optimize": 8, "mu_iterations": 2, "unbiased_loss_max_tokens": 64,
         "loss_type": "seq-mean-token-mean"},
        {"variant": "sapo", "max_token_len_per_mini_batch": 90, "rollout_correction": "truncate"},
        pytest.param({"variant": "dppo_kl", "batch_size_per_optimize": 8}, marks=pytest.mark.full),
        pytest.param({"variant": "dppo_tv", "use_rollout_logprobs_for_loss": True}, marks=pytest.mark.full),
        pytest.param({"aipo_rho": 2.0}, marks=pytest.mark.full),
    ],
    ids=lambda policy: ", ".join(map(str, policy.values())) or "default",
)  # fmt: skip
def test_an_update_is_the_same_without_the_completions_that_have_no_gradient(
    folder: Path, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """Of the steps one has some constant groups, one has only such groups, and by default one has none."""
    steps = [samples(), samples(tuple(range(NUM_GROUPS))), *([] if policy else [samples(())])]
    plain = trained(folder, tmp_path, policy, steps, skips=False, dtype=torch.float64)
    found = trained(folder, tmp_path, policy, steps, skips=True, dtype=torch.float64)
    for one, other in zip(found[0], plain[0], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-6)
    for one_step, other_step in zip(found[1], plain[1], strict=True):
        assert one_step.keys() == other_step.keys()
        for name, gradient in one_step.items():
            torch.testing.assert_close(gradient, other_step[name], rtol=1e-6, atol=1e-6)
    for name, tensor in found[2].items():
        torch.testing.assert_close(tensor, plain[2][name], rtol=0, atol=1e-6)
    assert found[3] < plain[3]
    per_step = len(plain[0]) // len(steps)
    counts = [figures[ZERO_GRADIENT_METRIC] for figures in found[0][::per_step]]
    assert counts == [len(CONSTANT) * GROUP, NUM_GROUPS * GROUP, 0][: len(steps)]
    assert all("rollout/logprob_difference_mean" in each for each in found[0][:1])


def test_an_update_in_single_precision_is_the_same_to_a_millionth(folder: Path, tmp_path: Path) -> None:
    (one,), (other,) = (trained(folder, tmp_path, {}, [samples()], skips=skips)[1] for skips in (True, False))
    for name, gradient in one.items():
        torch.testing.assert_close(gradient, other[name], rtol=0, atol=1e-6 * max(1.0, other[name].abs().max().item()))


def test_a_step_of_constant_groups_runs_few_completions_and_moves_the_weights_as_before(
    folder: Path, tmp_path: Path
) -> None:
    """Momentum and weight decay are applied to every weight, because its gradient is 0 and not missing."""
    steps = [samples(()), samples(tuple(range(NUM_GROUPS)))]
    found = trained(folder, tmp_path, {}, steps, skips=True)
    plain = trained(folder, tmp_path, {}, steps, skips=False)
    assert found[3] == NUM_GROUPS * GROUP + MIN_COMPARED_COMPLETIONS
    for name, tensor in found[2].items():
        torch.testing.assert_close(tensor, plain[2][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [
        {"kl_beta": 0.01}, {"kl_beta": 0.01, "kl_in_reward": True, "algo": "reinforce++"}, {"entropy_coeff": 0.01},
        {"positive_nll_coef": 0.1}, {"top_entropy_quantile": 0.5},
        {"rollout_correction": "truncate", "self_normalised_weights": True},
    ],
    ids=str,
)  # fmt: skip
def test_nothing_is_left_out_where_an_advantage_of_zero_has_a_gradient_or_others_need_the_outputs(
    policy: dict[str, Any],
) -> None:
    plain, other = (Grpo(GrpoConfig(**each)) for each in ({}, policy))
    assert can_skip_zero_advantage(plain.config, plain._policy_settings) and not can_skip_zero_advantage(
        other.config, other._policy_settings
    )


@pytest.mark.parametrize("is_taught", [False, True])
def test_nothing_is_left_out_of_a_distillation_or_of_a_training_that_does_not_allow_it(is_taught: bool) -> None:
    batch, algorithm = samples(), Grpo(GrpoConfig())
    algorithm.has_separate_gradients = is_taught
    algorithm.teacher = DistillationConfig(enable=True) if is_taught else None
    given = Given(teacher=[torch.zeros(len(sample.input_ids) - 1) for sample in batch])
    (update,) = algorithm.updates(batch, given)
    assert len(update.samples) == len(batch) and update.metrics == {ZERO_GRADIENT_METRIC: 0.0}


def test_an_objective_that_declares_nothing_has_a_gradient_at_every_advantage() -> None:
    settings = Grpo(GrpoConfig())._policy_settings
    assert scales_with_advantage(settings)
    assert not scales_with_advantage(replace(settings, objective="base"))


def test_rows_with_and_without_images_are_both_run() -> None:
    batch = samples(tuple(range(NUM_GROUPS)))
    batch[3] = replace(batch[3], images=(ImageRef("a.png", None, ""),))
    algorithm = Grpo(GrpoConfig())
    algorithm.has_separate_gradients = True
    (update,) = algorithm.updates(batch, NoView())
    assert len(update.samples) == MIN_COMPARED_COMPLETIONS + 1 and any(sample.images for sample in update.samples)


def test_dropout_and_router_losses_keep_every_completion(folder: Path, tmp_path: Path) -> None:
    def trainer(**settings: float) -> Trainer:
        model = load_model(str(folder), dtype=torch.float32)
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = settings.get("dropout", 0.0)
        return trainer_of(model, TrainConfig(), 0, ProgressWriter(tmp_path / "p.json"))

    assert trainer().has_separate_gradients and not trainer(dropout=0.1).has_separate_gradients
    routed = trainer()
    routed.adapter.has_auxiliary_loss = True
    assert not routed.has_separate_gradients
    stage = trainer(dropout=0.1)  # a pipeline stage whose own layers have no dropout decides as the others do
    stage.adapter.mesh, stage.adapter.meta_copy, stage.adapter.model = object(), stage.adapter.model, torch.nn.Module()
    assert not stage.has_separate_gradients and stage._find_sets_equal_to_policy(["reference"]) == []
