"""Objectives, advantages and corrections of the GRPO family against closed forms, in float64.

The expectation over a categorical of V tokens is exact: tokens are enumerated, each with its probability.

B sequences, T tokens, V vocabulary.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cosmos_core.algorithms.advantages import ADVANTAGE_RULES, advantages, whitened_returns
from cosmos_core.algorithms.aggregate import add_metrics, compute_means, token_metric
from cosmos_core.algorithms.correction import ImportanceWeightRule, importance_weights
from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import PolicyLossInputs, policy_loss
from cosmos_core.algorithms.selection import excluded_prefix_lengths
from cosmos_core.data.sample import Sample
from cosmos_core.errors import RewardError

V = 5


@pytest.fixture
def categorical():
    """Logits, rewards of each token, and the log-probabilities of another policy."""
    generator = torch.Generator().manual_seed(7)
    logits_V, rewards_V, other_V = torch.randn(3, V, dtype=torch.float64, generator=generator)
    return logits_V.requires_grad_(), rewards_V, other_V.log_softmax(-1)


def gradient_of(settings, logits_V, advantages_V, drawn_V, **others):
    """The exact expected gradient when token v is drawn with probability drawn_V[v], each a sequence of its own."""
    logprobs_V1 = logits_V.log_softmax(-1).unsqueeze(-1)
    inputs = PolicyLossInputs(logprobs_V1, advantages_V, torch.ones(V, 1), **others)
    loss_V1 = policy_loss(inputs, settings).loss_BT
    (gradient_V,) = torch.autograd.grad((drawn_V * loss_V1.squeeze(-1)).sum(), logits_V)
    return gradient_V


@pytest.mark.parametrize("objective", ["clip", "gspo", "cispo", "aipo_clamped"])
def test_on_policy_every_objective_has_the_policy_gradient(categorical, objective):
    logits_V, rewards_V, _ = categorical
    pi_V = logits_V.detach().softmax(-1)
    expected_V = -pi_V * (rewards_V - (pi_V * rewards_V).sum())
    found_V = gradient_of(PolicySettings(objective=objective), logits_V, rewards_V, pi_V)
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-14)


def test_aipo_weights_tokens_of_another_policy_up_to_its_cap(categorical):
    logits_V, rewards_V, mu_V = categorical
    settings = PolicySettings(objective="aipo", ratio_cap=1.2)
    found_V = gradient_of(settings, logits_V, rewards_V, mu_V.exp(), rollout_logprobs_BT=mu_V.unsqueeze(-1))
    pi_V = logits_V.detach().softmax(-1)
    drawn_V = mu_V.exp() * (pi_V / mu_V.exp()).clamp(max=1.2) * rewards_V  # E_mu[w A grad log pi]
    assert (pi_V / mu_V.exp() > 1.2).any()
    torch.testing.assert_close(found_V, -(drawn_V - pi_V * drawn_V.sum()), rtol=0, atol=1e-14)


def test_the_form_of_cosmos_rl_has_no_gradient_above_the_cap(categorical):
    logits_V, rewards_V, _ = categorical
    old_V1 = (logits_V.detach().log_softmax(-1) - 1.0).unsqueeze(-1)  # every ratio is e
    settings = PolicySettings(objective="aipo_clamped", ratio_cap=2.0)
    found_V = gradient_of(settings, logits_V, rewards_V, torch.ones(V), old_logprobs_BT=old_V1)
    assert found_V.abs().max() == 0


def test_cispo_keeps_the_gradient_of_tokens_that_a_clip_cuts_off(categorical):
    logits_V, _, _ = categorical
    old_V1 = (logits_V.detach().log_softmax(-1) - 1.0).unsqueeze(-1)
    clipped_V = gradient_of(PolicySettings(), logits_V, torch.ones(V).double(), torch.ones(V), old_logprobs_BT=old_V1)
    assert clipped_V.abs().max() == 0
    pi_V, settings = logits_V.detach().softmax(-1), PolicySettings(objective="cispo", ratio_cap=2.0)
    weighted_V = gradient_of(settings, logits_V, torch.ones(V).double(), torch.ones(V), old_logprobs_BT=old_V1)
    torch.testing.assert_close(weighted_V, -2.0 * (1.0 - V * pi_V), rtol=0, atol=1e-14)


def test_the_entropy_bonus_has_a_gradient(categorical):
    logits_V, _, _ = categorical
    logprobs_V = logits_V.log_softmax(-1)
    entropy_11 = -(logprobs_V.exp() * logprobs_V).sum().view(1, 1)
    inputs = PolicyLossInputs(
        logprobs_V[:1].unsqueeze(0), torch.zeros(1).double(), torch.ones(1, 1), entropy_BT=entropy_11
    )
    loss_11 = policy_loss(inputs, PolicySettings(entropy_coeff=0.3)).loss_BT
    (found_V,) = torch.autograd.grad(loss_11.sum(), logits_V)
    pi_V = logits_V.detach().softmax(-1)
    expected_V = 0.3 * pi_V * (pi_V.log() + entropy_11.detach().squeeze())  # -dH/dz = pi (log pi + H)
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("estimator", "unbiased"), [("k2", False), ("k3", True), ("k3", False)])
def test_k2_and_weighted_k3_pull_with_the_gradient_of_the_reverse_kl_and_k3_of_the_forward(
    categorical, estimator, unbiased
):
    logits_V, _, ref_V = categorical
    logprobs_V, pi_V = logits_V.log_softmax(-1), logits_V.detach().softmax(-1)
    settings = PolicySettings(kl_beta=1.0, kl_estimator=estimator, unbiased_kl_estimate=unbiased)
    found_V = gradient_of(settings, logits_V, torch.zeros(V).double(), pi_V, ref_logprobs_BT=ref_V.unsqueeze(-1))
    is_reverse = (estimator, unbiased) != ("k3", False)
    kl = (logprobs_V.exp() * (logprobs_V - ref_V)).sum() if is_reverse else (ref_V.exp() * (ref_V - logprobs_V)).sum()
    (expected_V,) = torch.autograd.grad(kl, logits_V)
    torch.testing.assert_close(found_V, expected_V, rtol=0, atol=1e-14)


def test_weights_touch_the_objective_and_neither_the_kl_nor_the_entropy(categorical):
    logits_V, rewards_V, ref_V = categorical
    logprobs_V1 = logits_V.log_softmax(-1).unsqueeze(-1)
    settings = PolicySettings(kl_beta=0.5, entropy_coeff=0.1)
    inputs = PolicyLossInputs(
        logprobs_V1, rewards_V, torch.ones(V, 1), ref_logprobs_BT=ref_V.unsqueeze(-1), entropy_BT=-logprobs_V1
    )
    whole_V1 = policy_loss(inputs, settings).loss_BT
    none_V1 = policy_loss(replace(inputs, weights_BT=torch.zeros(V, 1)), settings).loss_BT
    torch.testing.assert_close(whole_V1 - none_V1, -rewards_V.unsqueeze(-1))


def test_advantages_of_tokens_leave_out_sequences_not_tokens():
    """Else a stale sequence would keep the tokens that are rewarded and lose those that are not."""
    inputs = PolicyLossInputs(
        torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True), torch.zeros(2).double(),
        torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]), rollout_logprobs_BT=torch.full((2, 4), -0.8).double(),
        token_advantages_BT=torch.tensor([[1.0, 1.0, -1.0, -1.0], [1.0, -2.0, -2.0, 9.0]]).double(),
    )  # fmt: skip
    result = policy_loss(inputs, PolicySettings(off_policy_masking_delta=0.1))
    assert result.loss_BT.detach().tolist() == [[-1.0, -1.0, 1.0, 1.0], [0.0] * 4]


def test_the_geometric_mask_leaves_out_whole_sequences():
    rollout_BT = torch.tensor([[-1.0, -1.0], [-1.0, -1.2]], dtype=torch.float64)
    old_BT, correction = (
        torch.full((2, 2), -1.0, dtype=torch.float64),
        ImportanceWeightRule(geometric_mean_range=(0.99, 1.01)),
    )
    weights_BT, metrics = importance_weights(old_BT, rollout_BT, torch.ones(2, 2), correction)
    assert weights_BT.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    assert compute_means(metrics)["rollout/weight_refused"] == 0.5


GROUPS = [[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, 1.0, None, 2.0]]


@pytest.mark.parametrize("algo", ADVANTAGE_RULES)
def test_advantages_by_a_plain_computation(algo):
    values, constant_fraction = advantages(GROUPS, algo=algo)
    flat = np.array([r for group in GROUPS for r in group if r is not None])
    centred = np.array(
        [r - np.mean([x for x in group if x is not None]) for group in GROUPS for r in group if r is not None]
    )
    for group, found in zip(GROUPS, values, strict=True):
        valid = [r for r in group if r is not None]
        for reward, value in zip(group, found, strict=True):
            if reward is None:
                assert value is None
                continue
            distance = reward - np.mean(valid)
            expected = {
                "grpo": distance / (np.std(valid) + 1e-6),
                "rloo": reward - (sum(valid) - reward) / (len(valid) - 1),
                "batch-std": distance / (flat.std() + 1e-6),
                "reinforce++": (reward - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8),
                "reinforce++-baseline": (distance - centred.mean()) / np.sqrt(centred.var(ddof=1) + 1e-8),
                "maxrl": distance / np.mean(valid),
            }[algo]
            assert value == pytest.approx(expected, abs=1e-12)
    assert constant_fraction == 1 / 3


@pytest.mark.parametrize("algo", ADVANTAGE_RULES)
def test_odd_groups_have_finite_advantages(algo):
    values, _ = advantages([[], [None, float("nan")], [2.0], [0.0, 0.0]], algo=algo)
    assert all(value is None or np.isfinite(value) for group in values for value in group)
    assert [len(group) for group in values] == [0, 2, 1, 2]


def test_maxrl_refuses_rewards_whose_mean_may_be_nothing_or_turn_the_sign():
    assert advantages([[1.0, 0.0], [0.0, 0.0]], algo="maxrl")[0] == [[1.0, -1.0], [0.0, 0.0]]
    with pytest.raises(RewardError, match="algo = 'maxrl' divides by the mean reward of a group, and a reward is -1"):
        advantages([[1.0, 0.0], [1.0, -1.0]], algo="maxrl")


def test_the_effective_sample_size_is_that_of_the_weights_of_all_micro_batches_together():
    weights = [torch.tensor([[2.0, 0.5]]), torch.tensor([[1.0, 9.0]])]
    masks = [torch.tensor([[1, 1]]), torch.tensor([[1, 0]])]
    total = {}
    for each, mask in zip(weights, masks, strict=True):
        added = {"weight": token_metric(each, mask), "weight_square": token_metric(each.square(), mask)}
        total = add_metrics(total, added)
    assert compute_means(total)["weight_effective_sample_size"] == pytest.approx(3.5**2 / (3 * 5.25))
    assert "weight_effective_sample_size" not in compute_means({"weight": torch.tensor([0.0, 0.0])})


@pytest.mark.parametrize("objective", ["cispo", "aipo", "aipo_clamped"])
def test_weights_above_the_cap_are_counted_by_the_sign_of_their_advantage(objective):
    ratio = torch.tensor([[9.0, 1.0], [9.0, 9.0], [9.0, 1.0]], dtype=torch.float64).log()
    inputs = PolicyLossInputs(
        torch.zeros(3, 2).double(), torch.tensor([1.0, -2.0, 0.0]).double(), torch.ones(3, 2),
        old_logprobs_BT=-ratio, rollout_logprobs_BT=-ratio,
    )  # fmt: skip
    found = compute_means(policy_loss(inputs, PolicySettings(objective=objective, ratio_cap=5.0)).metrics)
    shares = [found[f"clip_high{sign}"] * 6 for sign in ("", "_positive", "_negative")]
    assert shares == pytest.approx([4, 1, 2])


@pytest.mark.parametrize(
    ("completions", "rewards", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 3, 5], [9]], [1.0, 0.0, 0.0], [3, 3, 0]),
        ([[1, 2, 3, 4], [1, 2, 3, 5], [9]], [1.0, 1.0, 0.0], [0, 0, 0]),  # equal rewards
        ([[1, 2, 3, 4], [1, 2, 3, 5], [9]], [1.0, None, 0.0], [0, 0, 0]),  # an invalid one differs from none
        ([[1, 2, 4], [1, 2, 5]], [1.0, 0.0], [0, 0]),  # shorter than three
        ([[1, 2, 3], [1, 2, 3, 5]], [1.0, 0.0], [0, 3]),  # the first is nothing but the prefix
        # the second and third share more than the first does with them, so its prefix is not a longest one
        ([[1, 2, 3, 7], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], [1.0, 0.0, 1.0], [0, 4, 4]),
    ],
)
def test_prefixes_that_completions_of_different_rewards_share(completions, rewards, expected):
    assert excluded_prefix_lengths(completions, rewards, 3) == expected


def test_returns_with_the_kl_in_the_reward_are_whitened_over_the_learned_tokens_of_the_step():
    generator = np.random.default_rng(5)
    masks = ([0, 0, 1, 1, 0, 1], [0, 1, 1, 1])  # the fifth token of the first is a tool's
    rewards, beta = (1.0, -0.5), 0.3
    old, reference = ([torch.tensor(generator.normal(size=len(mask) - 1)) for mask in masks] for _ in range(2))
    rows = zip(masks, rewards, strict=True)
    samples = [Sample(np.arange(len(mask)), np.array(mask, np.uint8), 9.0, reward) for mask, reward in rows]

    expected = {}  # the plain double loop of arXiv 2501.03262
    for i, mask in enumerate(masks):
        learned = [t for t in range(1, len(mask)) if mask[t]]
        for t in learned:
            kl = sum((old[i][u - 1] - reference[i][u - 1]).item() for u in learned if u >= t)
            expected[i, t - 1] = rewards[i] - beta * kl
    mean, std = np.mean(list(expected.values())), np.sqrt(np.var(list(expected.values()), ddof=1) + 1e-8)
    found = whitened_returns(samples, old, reference, beta)
    for i, mask in enumerate(masks):
        for t in range(len(mask) - 1):
            value = (expected[i, t] - mean) / std if (i, t) in expected else 0.0
            assert found[i][t].item() == pytest.approx(value, abs=1e-12)

    same = [replace(sample, reward=1.0) for sample in samples]
    assert not any(row.any() for row in whitened_returns(same, old, old, beta)), "equal returns teach exactly nothing"
