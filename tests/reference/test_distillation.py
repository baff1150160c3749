"""Distillation against closed forms in float64: the divergence against TRL, the whole gradient against enumeration."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.distillation import append_other_logprob, discounted_sums, jensen_shannon, teacher_loss
from cosmos_core.config.schema.distillation import DistillationConfig

V, S = 3, 3
DISCOUNT = 0.7


def config(**values: object) -> DistillationConfig:
    return DistillationConfig.model_validate({"enable": True, **values})


def logprobs(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_divergence_over_the_whole_vocabulary_is_that_of_trl(beta: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="TRL is not installed")
    student_BSV = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    teacher_BSV = logprobs(2, 5, 7, seed=1)
    ours = jensen_shannon(student_BSV.log_softmax(-1), teacher_BSV, beta).sum()
    theirs = gkd.GKDTrainer.generalized_jsd_loss(student_BSV, teacher_BSV, beta=beta, reduction="sum")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(value, student_BSV)[0] for value in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_with_the_rest_as_one_event_the_teacher_is_where_the_gradient_ends(beta: float) -> None:
    teacher_V = logprobs(9, seed=2)
    ids = teacher_V.topk(3).indices
    for offset, is_there in ((0.0, True), (0.3, False)):
        logits_V = (teacher_V + offset * torch.arange(9)).requires_grad_()
        student_K = logits_V.log_softmax(-1)[ids]
        value = jensen_shannon(append_other_logprob(student_K), append_other_logprob(teacher_V[ids]), beta)
        (gradient,) = torch.autograd.grad(value, logits_V)
        assert (gradient.abs().max().item() < 1e-12) == is_there
        assert (value.item() < 1e-12) == is_there


def test_where_k_tokens_have_all_the_mass_value_and_gradient_are_finite() -> None:
    teacher_K = torch.tensor([0.0, -200.0], dtype=torch.float32)
    student_K = torch.tensor([-1e-9, -30.0], requires_grad=True)
    for beta in (0.0, 0.5, 1.0):
        value = jensen_shannon(append_other_logprob(student_K), append_other_logprob(teacher_K), beta)
        (gradient,) = torch.autograd.grad(value, student_K)
        assert torch.isfinite(value) and torch.isfinite(gradient).all()


def test_the_future_of_a_token_is_a_discounted_sum() -> None:
    values_BS = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float64)
    expected = [sum(DISCOUNT ** (j - i) * (j + 1) for j in range(i + 1, 5)) for i in range(5)]
    assert discounted_sums(values_BS, DISCOUNT)[0].tolist() == pytest.approx(expected, rel=1e-12)
    assert discounted_sums(values_BS, 0.0)[0].tolist() == [0.0] * 5


class Chain:
    """A policy over completions of S tokens: logits by position and the token before."""

    def __init__(self, seed: int) -> None:
        self.logits = torch.randn(S, V, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def of(self, tokens: tuple[int, ...]) -> Tensor:
        """Return the log-probabilities of every token at each position of a completion: SV."""
        return torch.stack([self.logits[s, tokens[s - 1] if s else 0].log_softmax(-1) for s in range(S)])


def expected_gradient(settings: DistillationConfig) -> Tensor:
    """Return the gradient of our loss, averaged over all completions by their probability."""
    policy, teacher = Chain(0), Chain(1)
    policy.logits.requires_grad_()
    total = torch.zeros_like(policy.logits)
    ones = torch.ones(1, S)
    for tokens in itertools.product(range(V), repeat=S):
        policy_SV, teacher_SV = policy.of(tokens), teacher.of(tokens).detach()
        chosen = torch.tensor(tokens).unsqueeze(-1)
        policy_S, teacher_S = (each.gather(-1, chosen).squeeze(-1) for each in (policy_SV, teacher_SV))
        if settings.top_k:
            found = teacher_loss(settings, policy_SV[None, :, : V - 1], teacher_SV[None, :, : V - 1], ones, ones)
        else:
            found = teacher_loss(settings, policy_S[None], teacher_S[None], ones, ones)
        loss = torch.zeros((), dtype=torch.float64)
        if found.advantages_BS is not None:
            loss = loss - (found.advantages_BS[0] * policy_S).sum()
        if found.loss_BS is not None:
            loss = loss + found.loss_BS.sum()
        (gradient,) = torch.autograd.grad(loss, policy.logits)
        total += policy_S.sum().exp().detach() * gradient
    return total


def gradient_of_the_divergence(beta: float, coefficient: float) -> Tensor:
    """Return the gradient of the expected sum of the divergences at each position, by enumeration."""
    policy, teacher = Chain(0), Chain(1)
    policy.logits.requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    for tokens in itertools.product(range(V), repeat=S):
        policy_SV, teacher_SV = policy.of(tokens), teacher.of(tokens)
        weight = policy_SV.gather(-1, torch.tensor(tokens).unsqueeze(-1)).sum().exp()
        value = value + weight * jensen_shannon(policy_SV, teacher_SV, beta).sum()
    (gradient,) = torch.autograd.grad(coefficient * value, policy.logits)
    return gradient


def test_undiscounted_the_advantages_make_the_gradient_of_the_completions_reverse_kl() -> None:
    ours = expected_gradient(config(kl_discount_factor=1.0, kl_penalty_coef=0.3))
    torch.testing.assert_close(ours, gradient_of_the_divergence(1.0, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_undiscounted_the_divergence_and_its_advantages_make_the_whole_gradient(beta: float) -> None:
    ours = expected_gradient(config(top_k=V - 1, jsd_beta=beta, kl_discount_factor=1.0, kl_penalty_coef=0.3))
    torch.testing.assert_close(ours, gradient_of_the_divergence(beta, 0.3), rtol=0, atol=1e-12)


def test_without_a_discount_each_token_answers_for_itself() -> None:
    by_token = expected_gradient(config())
    by_divergence = expected_gradient(config(top_k=V - 1, jsd_beta=1.0))
    torch.testing.assert_close(by_token, by_divergence, rtol=0, atol=1e-12)


def test_what_nobody_drew_answers_for_itself_alone_and_what_is_not_learned_for_nothing() -> None:
    policy_BS, teacher_BS = torch.tensor([[3.0, 5.0, 7.0, 9.0]]).double(), torch.ones(1, 4).double()
    mask_BS, drawn_BS = torch.tensor([[1, 1, 1, 0]]), torch.tensor([[0, 1, 1, 0]])
    found = teacher_loss(config(kl_discount_factor=0.5), policy_BS, teacher_BS, mask_BS, drawn_BS)
    assert found.advantages_BS is not None
    assert found.advantages_BS[0].tolist() == [-2.0, -(4.0 + 0.5 * 6.0), -6.0, 0.0]
    assert found.metrics["teacher/reverse_kl"].tolist() == [12.0, 3.0]
