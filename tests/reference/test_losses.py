"""Losses against numbers worked out by hand, plain Python loops and closed-form gradients, in float64.

B sequences, T tokens, V vocabulary.
"""

import math
from itertools import pairwise

import pytest
import torch

from cosmos_core.algorithms.advantages import advantages
from cosmos_core.algorithms.aggregate import add_metrics, aggregate_loss, compute_denominator, compute_means
from cosmos_core.algorithms.kl import k3
from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import PolicyLossInputs, policy_loss, positive_nll_loss
from cosmos_core.algorithms.sft import sft_loss

LOSS_TYPES = [
    ("token-mean", None),
    ("seq-mean-token-sum", None),
    ("seq-mean-token-mean", None),
    ("seq-mean-token-mean", 7),
]


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


# --- SFT


def test_the_sft_loss_of_three_shifted_rows_is_the_hand_computed_mean():
    logits_TV = f64([[0, 0, 0], [2, 0, 0], [0, 1, 0]])  # the last row of four predicts nothing
    labels_T, mask_BT = torch.tensor([0, 0, 2]), torch.tensor([[1, 0, 1]])
    logprobs_BT = logits_TV.log_softmax(-1)[range(3), labels_T].unsqueeze(0)
    loss, metrics = sft_loss(logprobs_BT, mask_BT, compute_denominator("token-mean", [2]))
    assert loss.item() == pytest.approx((math.log(3) + math.log(2 + math.e)) / 2, abs=1e-15)
    assert loss.item() == pytest.approx(1.325029, abs=1e-6)
    assert metrics["nll"].tolist() == pytest.approx([2.650057, 2], abs=1e-6)


# --- Advantages


def test_without_std_the_advantage_is_the_distance_to_the_mean():
    assert advantages([[1.0, 2.0, 6.0]], normalise_std=False)[0] == [[-2.0, -1.0, 3.0]]


@pytest.mark.parametrize("reward", [0.1, 0.3, 0.7, 0.9, -1e9])
@pytest.mark.parametrize("size", [2, 6, 11])
def test_equal_rewards_have_exactly_no_advantage(reward, size):
    values, constant_fraction = advantages([[reward] * size], normalise_std=True)
    assert values == [[0.0] * size]
    assert constant_fraction == 1


def test_invalid_rewards_are_dropped_and_the_others_compared_among_themselves():
    groups = [[1.0, None, 3.0], [float("nan"), 2.0], [None, float("inf")], [], [5.0, None, 5.0]]
    values, constant_fraction = advantages(groups, normalise_std=True)
    one = 1 / (1 + 1e-6)
    assert values == [[pytest.approx(-one), None, pytest.approx(one)], [None, 0.0], [None, None], [], [0.0, None, 0.0]]
    assert constant_fraction == 1 / 5


# --- Policy loss


LOGPROBS = [[-0.5, -2.0, -1.0], [-0.1, -3.0, -0.7]]
OLD = [[-0.9, -1.6, -1.0], [-1.6, -2.2, -0.8]]
REF = [[-0.6, -1.9, -1.3], [-0.4, -2.5, -9.0]]
MASK = [[1, 1, 1], [1, 1, 0]]
ADVANTAGES = [1.5, -0.8]


def token_loss_by_hand(b, t, *, unbiased, low=0.2, high=0.28, dual=3.0):
    """The same loss for one token, written out with floats; a None bound is open."""
    ratio, a = math.exp(LOGPROBS[b][t] - OLD[b][t]), ADVANTAGES[b]
    clipped = max(ratio, 1 - low) if low is not None else ratio
    clipped = min(clipped, 1 + high) if high is not None else clipped
    loss = -min(ratio * a, clipped * a)
    if a < 0:
        loss = min(loss, -dual * a)
    difference = REF[b][t] - LOGPROBS[b][t]
    kl = math.exp(difference) - difference - 1
    return loss + 0.1 * kl * (ratio if unbiased else 1)


def two_by_three():
    return PolicyLossInputs(f64(LOGPROBS), f64(ADVANTAGES), torch.tensor(MASK), f64(OLD), f64(REF), f64(REF).abs())


@pytest.mark.parametrize("unbiased", [False, True])
def test_two_answers_of_three_tokens_match_a_plain_loop(unbiased):
    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=0.1, unbiased_kl_estimate=unbiased)
    result = policy_loss(two_by_three(), settings)
    expected = [[token_loss_by_hand(b, t, unbiased=unbiased) * MASK[b][t] for t in range(3)] for b in range(2)]
    torch.testing.assert_close(result.loss_BT, f64(expected), rtol=0, atol=1e-14)
    # Ratios: e^0.4, e^-0.4, 1 with A > 0; e^1.5 = 4.48 (beyond 3) and e^-0.8 with A < 0.
    ratios = [math.exp(LOGPROBS[b][t] - OLD[b][t]) for b, t in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))]
    figures = compute_means(result.metrics)
    assert figures["clip_high"] == 1 / 5
    assert figures["clip_low"] == 1 / 5
    assert figures["clip_dual"] == 1 / 5
    assert figures["ratio"] == pytest.approx(sum(ratios) / 5, rel=1e-14)
    assert figures["approx_kl"] == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5, rel=1e-13)
    assert figures["entropy"] == pytest.approx((0.6 + 1.9 + 1.3 + 0.4 + 2.5) / 5, rel=1e-14)
    assert figures["kl_clamped"] == 0


def test_a_negative_epsilon_leaves_its_side_open():
    for low, high in ((-1.0, 0.28), (0.2, -1.0), (-1.0, -1.0)):
        settings = PolicySettings(low, high, 1e9, kl_beta=0.1)
        bounds = {"low": low if low >= 0 else None, "high": high if high >= 0 else None, "dual": 1e9}
        expected = [
            [token_loss_by_hand(b, t, unbiased=False, **bounds) * MASK[b][t] for t in range(3)] for b in range(2)
        ]
        torch.testing.assert_close(policy_loss(two_by_three(), settings).loss_BT, f64(expected), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_first_update_has_a_ratio_of_exactly_one(dtype):
    logprobs_BT = (-torch.rand(4, 50) * 20).to(dtype).requires_grad_()
    values_B = f64([1.0, -2.0, 0.5, 0.0])
    result = policy_loss(PolicyLossInputs(logprobs_BT, values_B, torch.ones(4, 50)), PolicySettings())
    assert torch.equal(result.loss_BT.double(), -values_B.unsqueeze(-1).expand(4, 50))
    assert compute_means(result.metrics) == {"clip_low": 0, "clip_high": 0, "clip_dual": 0, "ratio": 1, "approx_kl": 0}
    result.loss_BT.sum().backward()
    assert torch.equal(logprobs_BT.grad.double(), -values_B.unsqueeze(-1).expand(4, 50))


def test_what_stands_under_the_mask_has_no_influence_even_when_it_is_not_finite():
    mask_BT = torch.tensor([[1, 0, 0], [0, 0, 0]])
    rubbish_BT = f64([[-1.0, float("nan"), float("-inf")], [float("inf"), float("nan"), 0.0]])
    logprobs_BT = rubbish_BT.clone().requires_grad_()
    inputs = PolicyLossInputs(logprobs_BT, f64([2.0, float("nan")]), mask_BT, rubbish_BT, rubbish_BT, rubbish_BT)
    result = policy_loss(inputs, PolicySettings(kl_beta=0.5, unbiased_kl_estimate=True))
    loss = aggregate_loss(
        result.loss_BT, mask_BT, "seq-mean-token-mean", compute_denominator("seq-mean-token-mean", [1, 0])
    )
    loss.backward()
    assert loss.item() == -2
    assert torch.equal(logprobs_BT.grad, f64([[-2.0, 0, 0], [0, 0, 0]]))
    assert all(math.isfinite(value) for value in compute_means(result.metrics).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_drift_stays_finite_and_is_counted(dtype):
    logprobs_BT = f64([[-100.0, -1.0, -30.0]]).to(dtype).requires_grad_()
    inputs = PolicyLossInputs(
        logprobs_BT, f64([-1.0]), torch.ones(1, 3), f64([[-1.0, -100.0, -30.0]]), f64([[-1.0] * 3])
    )
    result = policy_loss(inputs, PolicySettings(kl_beta=1.0))
    result.loss_BT.sum().backward()
    assert torch.isfinite(result.loss_BT).all()
    assert torch.isfinite(logprobs_BT.grad).all()
    assert result.metrics["kl_clamped"].tolist() == [2, 3]
    assert result.loss_BT[0, 1].item() == 3.0  # dual clip: -3 A
    assert logprobs_BT.grad[0, 1].item() == 0


def test_positive_nll_is_the_mean_over_tokens_of_answers_with_a_positive_reward():
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]])
    logprobs_BT = f64([[-1, -2, -9], [-4, -4, -4], [-5, -9, -9]]).requires_grad_()
    loss = positive_nll_loss(logprobs_BT, mask_BT, f64([1.0, 0.0, 0.5]), compute_denominator("token-mean", [2, 1]))
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 5) / 3, rel=1e-15)
    torch.testing.assert_close(logprobs_BT.grad, f64([[-1, -1, 0], [0, 0, 0], [-1, 0, 0]]) / 3, rtol=0, atol=1e-15)


def test_k3_estimates_the_kl_without_bias_and_is_never_negative():
    logprobs_V, ref_V = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    estimate_V, clamped_V = k3(logprobs_V, ref_V)
    exact = torch.nn.functional.kl_div(ref_V, logprobs_V, log_target=True, reduction="sum")
    assert (logprobs_V.exp() * estimate_V).sum().item() == pytest.approx(exact.item(), rel=1e-14)
    assert (estimate_V >= 0).all()
    assert not clamped_V.any()


# --- Splitting a step


@pytest.mark.parametrize(
    ("loss_type", "max_tokens", "count", "expected"),
    [
        ("token-mean", None, 4.0, (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", None, 2.0, (6 + 10) / 2),
        ("seq-mean-token-mean", None, 2.0, (2 + 10) / 2),
        ("seq-mean-token-mean", 7, 14.0, (6 / 7 + 10 / 7) / 2),
    ],
)
def test_a_sequence_without_tokens_does_not_count(loss_type, max_tokens, count, expected):
    values_BT = f64([[1, 2, 3], [9, 9, 9], [10, 9, 9]])
    mask_BT = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 0]])
    assert compute_denominator(loss_type, [3, 0, 1], max_tokens) == count
    assert compute_denominator(loss_type, [0, 0], max_tokens) == 1.0
    assert aggregate_loss(values_BT, mask_BT, loss_type, count, max_tokens).item() == pytest.approx(expected, rel=1e-15)


def random_step():
    """Eight answers of unequal length, one without a token, to a vocabulary of six."""
    generator = torch.Generator().manual_seed(2)
    shape = {"dtype": torch.float64, "generator": generator}
    logits_BTV = torch.randn(8, 9, 6, **shape)
    lengths = [9, 1, 4, 0, 7, 2, 9, 3]
    mask_BT = torch.arange(9) < torch.tensor(lengths).unsqueeze(-1)
    old_BT, ref_BT = (-3 * torch.rand(8, 9, **shape) for _ in range(2))
    return logits_BTV, mask_BT, old_BT, ref_BT, torch.randn(8, **shape), lengths


def loss_of_split(sizes, loss_type, max_tokens, order=None):
    """Loss, gradient and metrics when the step is done in micro-batches of `sizes`, sequences in `order`."""
    logits_BTV, mask_BT, old_BT, ref_BT, values_B, lengths = random_step()
    logits_BTV.requires_grad_()
    logprobs_BT = logits_BTV.log_softmax(-1)[..., 0]
    order = torch.arange(8) if order is None else order
    settings = PolicySettings(0.2, 0.28, 3.0, kl_beta=0.3, unbiased_kl_estimate=True)
    d, total, metrics = compute_denominator(loss_type, lengths, max_tokens), 0.0, {}
    d_positive = compute_denominator("token-mean", [n for n, value in zip(lengths, values_B, strict=True) if value > 0])
    for start, end in pairwise([sum(sizes[:k]) for k in range(len(sizes) + 1)]):
        rows = order[start:end]
        inputs = PolicyLossInputs(logprobs_BT[rows], values_B[rows], mask_BT[rows], old_BT[rows], ref_BT[rows])
        result = policy_loss(inputs, settings)
        loss = aggregate_loss(result.loss_BT, mask_BT[rows], loss_type, d, max_tokens)
        loss = loss + 0.1 * positive_nll_loss(logprobs_BT[rows], mask_BT[rows], values_B[rows], d_positive)
        loss.backward(retain_graph=True)
        total, metrics = total + loss.item(), add_metrics(metrics, result.metrics)
    return total, logits_BTV.grad, compute_means(metrics)


@pytest.mark.parametrize(("loss_type", "max_tokens"), LOSS_TYPES)
def test_loss_gradient_and_metrics_depend_neither_on_micro_batches_nor_on_the_order_of_sequences(loss_type, max_tokens):
    loss, gradient, metrics = loss_of_split([8], loss_type, max_tokens)
    shuffled = torch.tensor([5, 3, 0, 7, 1, 2, 6, 4])
    for sizes, order in (([4, 4], None), ([1] * 8, None), ([3, 1, 4], None), ([3, 5], shuffled)):
        split_loss, split_gradient, split_metrics = loss_of_split(sizes, loss_type, max_tokens, order)
        assert split_loss == pytest.approx(loss, rel=1e-12)
        assert (split_gradient - gradient).abs().max() <= 1e-12 * gradient.abs().max()
        assert split_metrics == pytest.approx(metrics, rel=1e-12)
