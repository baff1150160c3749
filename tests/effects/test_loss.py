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
from cosmos_core.train.rollout_feed import make_training_sampling
from cosmos_core.types import Sampling
from tests.effects.change import GRPO, Change, changes, recipe
from tests.unit.trainers import Given, grpo, micro_batch

TWICE = {**GRPO, "train.train_policy.mu_iterations": 2}  # only then is a ratio not 1
WITH_KL = {**TWICE, "train.train_policy.kl_beta": 0.1}
PLUS_PLUS = {**WITH_KL, "train.train_policy.algo": "reinforce++"}
SAPO = {**TWICE, "train.train_policy.variant": "sapo"}
CISPO = {**TWICE, "train.train_policy.variant": "cispo"}
AIPO = {**TWICE, "train.train_policy.aipo_rho": 3.0}
DECOUPLED = {**TWICE, "train.train_policy.use_decoupled_loss": True}
TRUNCATED = {**TWICE, "train.train_policy.rollout_correction": "truncate"}
MASKED = {**TWICE, "train.train_policy.rollout_correction": "mask"}
RESET = {**GRPO, "train.train_policy.kl_beta": 0.1, "train.train_policy.reference_reset_interval": 2}
BY_SEQUENCE = {**TWICE, "train.train_policy.loss_type": "seq-mean-token-mean"}

# Token losses by default: two of -min(2, 1.2) = -1.2; min(4, 3) = 3 by dual clip; 0.8 by clip.
ADVANTAGES, LENGTHS, RATIOS = (1.0, -1.0, -1.0), (2, 1, 1), (2.0, 4.0, 0.5)
LOGPROB, ENTROPY = -1.0, 0.5
ENTROPIES = (0.9, 0.1, 0.2)  # of each sample's tokens, before the update
WEIGHTS = (2.0, 0.5, 1.0)  # old policy / rollout policy
K3 = 2 - math.log(2) - 1  # the reference finds every token twice as likely


def kl_in_reward() -> float:
    """The loss of tokens whose returns are those of REINFORCE++ with the KL in the reward."""
    cost = [0.1 * -math.log(2 * ratio) for ratio in (2, 2, 4, 0.5)]  # beta * log(old policy / reference)
    returns = np.array([1 - cost[0] - cost[1], 1 - cost[1], -cost[2], -cost[3]])
    whitened = (returns - returns.mean()) / returns.std(ddof=1)
    first, second, third, fourth = whitened.tolist()
    assert first > second > 0 > third > fourth
    return (-1.2 * first - 1.2 * second - 3 * third - 0.8 * fourth) / 4


def soft(positive: float, negative: float) -> float:
    """The loss of SAPO with these temperatures."""

    def gate(ratio: float, temperature: float) -> float:
        return 4 / temperature / (1 + math.exp(-temperature * (ratio - 1)))

    return (-gate(2, positive) + gate(4, negative) + gate(0.5, negative)) / 3


def samples() -> list[Sample]:
    return [
        Sample(
            np.arange(1 + n),
            np.array([0] + [1] * n, dtype=np.uint8),
            advantage,
            reward=float(advantage > 0),
            rollout_logprobs=np.full(n, LOGPROB - math.log(ratio * weight), dtype=np.float32),
        )
        for advantage, n, ratio, weight in zip(ADVANTAGES, LENGTHS, RATIOS, WEIGHTS, strict=True)
    ]


def updates(recipe: Recipe, sampling: Sampling | None = None) -> list[Update]:
    policy = recipe.train.train_policy
    assert isinstance(policy, GrpoConfig)

    old = [torch.full((n,), LOGPROB - math.log(r)) for n, r in zip(LENGTHS, RATIOS, strict=True)]
    reference = [torch.full((n,), LOGPROB + math.log(2)) for n in LENGTHS]
    view = Given(policy=old, reference=reference)
    view.entropies = [torch.full((n,), value) for n, value in zip(LENGTHS, ENTROPIES, strict=True)]
    return list(grpo(policy, sampling).updates(samples(), view))


def loss(recipe: Recipe, sampling: Sampling | None = None) -> float:
    """Of the last optimizer step of a train step."""
    update = updates(recipe, sampling)[-1]
    mask_BS = torch.tensor([[position < n for position in range(2)] for n in LENGTHS])
    logprobs_BS, entropy_BS = torch.full((3, 2), LOGPROB), torch.full((3, 2), ENTROPY)
    return update.loss(micro_batch(update.samples, logprobs_BS, mask_BS, entropy=entropy_BS)).value.item()


@changes(
    (Change("train.train_policy.epsilon_low", 0.4, TWICE), (-2.4 + 3 + 0.6) / 4),
    (Change("train.train_policy.epsilon_high", 0.5, TWICE), (-3.0 + 3 + 0.8) / 4),
    (Change("train.train_policy.lower_bound_ratio", 2.0, TWICE), (-2.4 + 2 + 0.8) / 4),
    (Change("train.train_policy.positive_nll_coef", 0.1, TWICE), (-2.4 + 3 + 0.8) / 4 + 0.1 * 1.0),
    (Change("train.train_policy.kl_beta", 0.1, TWICE), (-2.4 + 3 + 0.8) / 4 + 0.1 * K3),
    (Change("train.train_policy.kl_in_reward", True, PLUS_PLUS), kl_in_reward()),
    (Change("train.train_policy.unbiased_kl_estimate", True, WITH_KL),
     (-2.4 + 3 + 0.8) / 4 + 0.1 * K3 * (2 + 2 + 4 + 0.5) / 4),
    (Change("train.train_policy.kl_estimator", "k2", WITH_KL), (-2.4 + 3 + 0.8) / 4 + 0.1 * math.log(2) ** 2 / 2),
    (Change("train.train_policy.entropy_coeff", 0.1, TWICE), (-2.4 + 3 + 0.8) / 4 - 0.1 * ENTROPY),
    (Change("train.train_policy.variant", "gspo", TWICE), (-1.2 + 4 + 0.8) / 3),
    (Change("train.train_policy.variant", "cispo", TWICE), (2 * 2 - 4 - 0.5) / 4),
    (Change("train.train_policy.ratio_cap", 3.0, CISPO), (2 * 2 - 3 - 0.5) / 4),
    (Change("train.train_policy.sapo_temperature_pos", 0.5, SAPO), soft(0.5, 1.05)),
    (Change("train.train_policy.sapo_temperature_neg", 2.0, SAPO), soft(1.0, 2.0)),
    (Change("train.train_policy.top_entropy_quantile", 0.3, TWICE), -2.4 / 4),
    (Change("train.train_policy.aipo_rho", 3.0, TWICE), (2 * 3 - 2 - 0.5) / 4),
    (Change("train.train_policy.aipo_form", "clamped", AIPO), (-2 * 2 + 3 + 0.5) / 4),
    (Change("train.train_policy.off_policy_masking_delta", 0.5, TWICE), (-2.4 + 3) / 4),
    (Change("train.train_policy.use_decoupled_loss", True, TWICE), (-2.4 * 2 + 3 * 0.5 + 0.8) / 4),
    (Change("train.train_policy.behav_imp_weight_cap", 1.5, DECOUPLED), (3 * 0.5 + 0.8) / 4),
    (Change("train.train_policy.use_rollout_logprobs_for_loss", True, TWICE), (-2.4 + 2 + 0.8) / 4),
    (Change("train.train_policy.rollout_correction", "truncate", TWICE), (-2.4 * 2 + 3 * 0.5 + 0.8) / 4),
    (Change("train.train_policy.rollout_correction_high", 1.5, TRUNCATED), (-2.4 * 1.5 + 3 * 0.5 + 0.8) / 4),
    (Change("train.train_policy.rollout_correction_low", 0.6, MASKED), (-2.4 * 2 + 0.8) / 4),
    (Change("train.train_policy.geometric_mask", 0.6, TWICE), (3 + 0.8) / 4),
    (Change("train.train_policy.mean_k3_mask", 0.25, TWICE), (3 + 0.8) / 4),
    (Change("train.train_policy.max_k3_mask", 0.25, TWICE), (3 + 0.8) / 4),
    (Change("train.train_policy.self_normalised_weights", True, TRUNCATED), (-2.4 * 2 + 3 * 0.5 + 0.8) / 4 / 1.375),
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


@changes(
    (Change("train.train_policy.reference_reset_interval", 3, RESET), [("reference", True)]),
    (Change("train.train_policy.reset_optimizer_with_reference", False, RESET), [("reference", False)] * 2),
)
def test_it_changes_when_the_reference_is_reset(change: Change, expected: list[tuple[str, bool]]) -> None:
    found = []
    for side in (change.before, change.after):
        view = Given(reference=[torch.zeros(n) for n in LENGTHS])
        policy = side.train.train_policy
        assert isinstance(policy, GrpoConfig)
        algorithm = grpo(policy)
        for step in range(1, 5):
            assert len(list(algorithm.updates(samples(), view))) == 1
            algorithm.after_train_step(step, view)
        found.append(view.resets)
    assert found == [[("reference", True)] * 2, expected]


def test_weights_of_older_rollouts_are_cut_at_what_the_recipe_says() -> None:
    higher = Change("train.train_policy.rollout_correction_high", 1.5, TWICE)
    outdated = Sampling(may_use_old_weights=True)
    assert loss(higher.before, outdated) == pytest.approx((-2.4 * 2 + 3 * 0.5 + 0.8) / 4)
    assert loss(higher.after, outdated) == pytest.approx((-2.4 * 1.5 + 3 * 0.5 + 0.8) / 4)


def test_tokens_that_are_drawn_at_another_temperature_are_weighted_as_those_of_a_nucleus() -> None:
    weighted = pytest.approx((-2.4 * 2 + 3 * 0.5 + 0.8) / 4)
    for settings, expected in (
        ({"rollout.sampling_config.temperature": 0.7}, weighted),
        ({"rollout.sampling_config.top_p": 0.9}, weighted),
        ({"train.train_policy.temperature": 0.7}, weighted),
        (
            {"rollout.sampling_config.temperature": 0.7, "train.train_policy.temperature": 0.7},
            pytest.approx((-2.4 + 3 + 0.8) / 4),
        ),
    ):
        drawn = recipe({**TWICE, "rollout.n_generation": 2, **settings})  # in whole groups
        assert loss(drawn, make_training_sampling(drawn)) == expected


def test_a_form_of_aipo_that_compares_with_the_old_policy_weights_tokens_of_another_distribution() -> None:
    clamped = Change("train.train_policy.aipo_form", "clamped", AIPO)
    cut = Sampling(temperature=1.0, top_k=3)
    assert loss(clamped.before, cut) == pytest.approx(loss(clamped.before)), "its ratio is that to the rollout policy"
    assert loss(clamped.after, cut) == pytest.approx((-2 * 2 * 2 + 3 * 0.5 + 0.5) / 4)
