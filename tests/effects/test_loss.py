"""Keys of the policy loss, on four tokens whose losses can be worked out by hand; the formulas are held against TRL
and closed forms in tests/reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.base import Update
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.sample import Sample
from tests.effects.change import GRPO, Change, changes
from tests.unit.trainers import Given, grpo, micro_batch

TWICE = {**GRPO, "train.train_policy.mu_iterations": 2}  # only then is a ratio not 1
WITH_KL = {**TWICE, "train.train_policy.kl_beta": 0.1}
BY_SEQUENCE = {**TWICE, "train.train_policy.loss_type": "seq-mean-token-mean"}

# Token losses by default: two of -min(2, 1.2) = -1.2; min(4, 3) = 3 by dual clip; 0.8 by clip.
ADVANTAGES, LENGTHS, RATIOS = (1.0, -1.0, -1.0), (2, 1, 1), (2.0, 4.0, 0.5)
LOGPROB = -1.0
K3 = 2 - math.log(2) - 1  # the reference finds every token twice as likely


def samples() -> list[Sample]:
    return [
        Sample(np.arange(1 + n), np.array([0] + [1] * n, dtype=np.uint8), advantage, reward=float(advantage > 0))
        for advantage, n in zip(ADVANTAGES, LENGTHS, strict=True)
    ]


def updates(recipe: Recipe) -> list[Update]:
    policy = recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)

    old = [torch.full((n,), LOGPROB - math.log(r)) for n, r in zip(LENGTHS, RATIOS, strict=True)]
    reference = [torch.full((n,), LOGPROB + math.log(2)) for n in LENGTHS]
    return list(grpo(policy).updates(samples(), Given(policy=old, reference=reference)))


def loss(recipe: Recipe) -> float:
    """Of the last optimizer step of a train step."""
    update = updates(recipe)[-1]
    mask_BS = torch.tensor([[position < n for position in range(2)] for n in LENGTHS])
    return update.loss(micro_batch(update.samples, torch.full((3, 2), LOGPROB), mask_BS)).value.item()


@changes(
    (Change("train.train_policy.epsilon_low", 0.4, TWICE), (-2.4 + 3 + 0.6) / 4),
    (Change("train.train_policy.epsilon_high", 0.5, TWICE), (-3.0 + 3 + 0.8) / 4),
    (Change("train.train_policy.lower_bound_ratio", 2.0, TWICE), (-2.4 + 2 + 0.8) / 4),
    (Change("train.train_policy.positive_nll_coef", 0.1, TWICE), (-2.4 + 3 + 0.8) / 4 + 0.1 * 1.0),
    (Change("train.train_policy.kl_beta", 0.1, TWICE), (-2.4 + 3 + 0.8) / 4 + 0.1 * K3),
    (Change("train.train_policy.unbiased_kl_estimate", True, WITH_KL),
     (-2.4 + 3 + 0.8) / 4 + 0.1 * K3 * (2 + 2 + 4 + 0.5) / 4),
    (Change("train.train_policy.loss_type", "seq-mean-token-mean", TWICE), (-1.2 + 3 + 0.8) / 3),
    (Change("train.train_policy.unbiased_loss_max_tokens", 8, BY_SEQUENCE), (-2.4 + 3 + 0.8) / (3 * 8)),
)  # fmt: skip
def test_it_changes_the_loss(change: Change, expected: float) -> None:
    assert loss(change.after) == pytest.approx(expected, rel=1e-5)
    assert loss(change.before) != pytest.approx(expected, rel=1e-5)


@changes(
    (Change("train.train_policy.mu_iterations", 3, GRPO), [3, 3, 3]),
    (Change("train.train_policy.batch_size_per_optimize", 2, GRPO), [2, 1]),
)
def test_it_changes_the_optimizer_steps_of_a_train_step(change: Change, expected: list[int]) -> None:
    assert [len(update.samples) for update in updates(change.before)] == [3]
    assert [len(update.samples) for update in updates(change.after)] == expected
