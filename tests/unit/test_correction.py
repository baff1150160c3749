"""Importance weights against closed forms, and what they repair of a gradient under truncated sampling."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import compute_means
from cosmos_core.algorithms.correction import ImportanceWeightRule, importance_weights
from cosmos_core.rollout.hf import process_logits
from cosmos_core.types import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.5, -0.5, -1.0, -2.0], dtype=torch.float64)
ADVANTAGES = torch.tensor([0.3, -1.0, 2.0, 0.7, -0.4, 1.5], dtype=torch.float64)
T = 0.8


def test_weights_are_the_quotient_of_the_two_policies_truncated_at_the_cap() -> None:
    old = torch.tensor([[0.5, 0.2, 0.9, 0.1]]).log()
    rollout = torch.tensor([[0.25, 0.4, 0.3, 0.1]]).log()
    weights, metrics = importance_weights(
        old, rollout, torch.tensor([[1, 1, 1, 0]]), ImportanceWeightRule(max_weight=2.5)
    )
    torch.testing.assert_close(weights, torch.tensor([[2.0, 0.5, 2.5, 0.0]]))
    found = compute_means(metrics)
    assert found["rollout/weight"] == pytest.approx(5 / 3)
    assert found["rollout/weight_square"] == pytest.approx((4 + 0.25 + 6.25) / 3)
    assert found["rollout/weight_capped"] == pytest.approx(1 / 3)
    assert found["rollout/logprob_not_finite"] == 0.0


def test_equal_policies_have_weight_one_and_a_broken_log_probability_none() -> None:
    old = torch.tensor([[-1.0, -2.0, -3.0, math.nan]])
    rollout = torch.tensor([[-1.0, math.nan, -math.inf, -1.0]])
    weights, metrics = importance_weights(old, rollout, torch.tensor([[1, 1, 1, 0]]))
    assert weights.tolist() == [[1.0, 0.0, 0.0, 0.0]]
    assert compute_means(metrics)["rollout/logprob_not_finite"] == pytest.approx(2 / 3)


def test_weights_have_no_gradient_and_extreme_differences_stay_finite() -> None:
    old = torch.tensor([[0.0, -500.0]], requires_grad=True)
    weights, _ = importance_weights(
        old, torch.tensor([[-500.0, 0.0]]), torch.ones(1, 2), ImportanceWeightRule(max_weight=math.inf)
    )
    assert not weights.requires_grad
    torch.testing.assert_close(weights, torch.tensor([[math.exp(20.0), math.exp(-20.0)]]))


def expected_gradient(drawn_V: Tensor, weights_V: Tensor) -> Tensor:
    """Of the policy's objective by its logits, when token v is drawn with probability `drawn_V`."""
    logits = LOGITS.clone().requires_grad_()
    logprobs_V = (logits / T).log_softmax(-1)
    (gradient,) = torch.autograd.grad((drawn_V * weights_V * ADVANTAGES * logprobs_V).sum(), logits)
    return gradient


def sampled_by(sampling: Sampling) -> Tensor:
    """The engine's log-probability of each token; the first two are in the prompt."""
    seen = torch.tensor([[True, True, False, False, False, False]])
    return process_logits(LOGITS.unsqueeze(0), seen, sampling)[0].double()


def weights_of(engine_V: Tensor, cap: float = math.inf) -> Tensor:
    """The weight of each token that the engine can draw."""
    can_V = engine_V.isfinite()
    trainer_V = (LOGITS / T).log_softmax(-1)
    found, _ = importance_weights(
        trainer_V.unsqueeze(0), engine_V.unsqueeze(0), can_V.unsqueeze(0), ImportanceWeightRule(max_weight=cap)
    )
    return found[0].double()


def test_under_a_repetition_penalty_the_weighted_gradient_is_that_of_the_policy() -> None:
    policy = (LOGITS / T).softmax(-1)
    right = expected_gradient(policy, torch.ones(6))
    engine = sampled_by(Sampling(temperature=T, repetition_penalty=1.5))
    torch.testing.assert_close(expected_gradient(engine.exp(), weights_of(engine)), right, rtol=0, atol=1e-6)
    assert (expected_gradient(engine.exp(), torch.ones(6)) - right).abs().max() > 0.05, "without weights it is another"


@pytest.mark.parametrize("sampling", [Sampling(temperature=T, top_p=0.8), Sampling(temperature=T, top_k=3)])
def test_under_truncation_the_bias_is_that_of_the_tail_alone(sampling: Sampling) -> None:
    policy = (LOGITS / T).softmax(-1)
    engine = sampled_by(sampling)
    kept = engine.isfinite()
    tail = policy[~kept].sum().item()
    assert 0 < tail < 0.25
    weights = weights_of(engine)
    torch.testing.assert_close(weights[kept], torch.full((int(kept.sum()),), 1 - tail, dtype=torch.float64))
    corrected = expected_gradient(engine.exp(), weights)
    of_the_kept = expected_gradient(policy * kept, torch.ones(6))
    torch.testing.assert_close(corrected, of_the_kept, rtol=0, atol=1e-6)
    right = expected_gradient(policy, torch.ones(6))
    largest = (ADVANTAGES[~kept].abs().max() / T).item()  # no derivative of a log-softmax is larger than 1 / T
    assert (corrected - right).abs().max() <= tail * largest
    assert (expected_gradient(engine.exp(), torch.ones(6)) - of_the_kept).norm() > (corrected - of_the_kept).norm()
