"""Losses, weights and advantages that verl and TRL have, against plain transcriptions of theirs, in float64, on random
inputs with odd masks: DPPO, sequence rejection by k3, self-normalised weights, GDPO, truncated completions.

B sequences, T tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import aggregate_loss
from cosmos_core.algorithms.correction import ImportanceWeightRule, importance_weights, self_normalise_weights
from cosmos_core.algorithms.grpo import Grpo
from cosmos_core.algorithms.objectives.base import PolicySettings
from cosmos_core.algorithms.policy_loss import PolicyLossInputs, policy_loss
from cosmos_core.config.schema.grpo import GrpoConfig
from cosmos_core.types import Completion, Group, Prompt, Score, ScoredGroup, Segment
from tests.reference.test_reinforce import random_groups
from tests.unit.trainers import Given, micro_batch


def random_batch(seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities now and before, advantages (one of them 0), and a mask with holes and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    shape = {"dtype": torch.float64, "generator": generator}
    logprobs_BT = (-2 * torch.rand(6, 9, **shape) - 1e-3).requires_grad_()
    old_BT = (logprobs_BT.detach() + spread * torch.randn(6, 9, **shape)).clamp(max=-1e-3)
    advantages_B, mask_BT = torch.randn(6, **shape), torch.rand(6, 9, generator=generator) < 0.6
    advantages_B[2], mask_BT[3], mask_BT[4] = 0.0, False, torch.arange(9) == 5
    return logprobs_BT, old_BT, advantages_B, mask_BT


def dppo_of_verl(kind: str, logprobs_BT: Tensor, old_BT: Tensor, advantages_B1: Tensor, low: float, high: float):
    """`compute_policy_loss_dppo_tv` and `..._kl`, before the mean over tokens."""
    ratio_BT = torch.exp((logprobs_BT - old_BT).clamp(-20, 20)).clamp(max=20.0).detach()
    p_BT, q_BT = logprobs_BT.exp(), old_BT.exp()
    if kind == "dppo_tv":
        up_BT, down_BT = p_BT - q_BT <= high, p_BT - q_BT >= -low
    else:
        kl_BT = q_BT * (old_BT - logprobs_BT) + (1 - q_BT) * torch.log((1.0 - q_BT + 1e-8) / (1.0 - p_BT + 1e-8))
        up_BT, down_BT = (kl_BT <= high) | (p_BT <= q_BT), (kl_BT <= low) | (p_BT >= q_BT)
    valid_BT = torch.where(advantages_B1 > 0, up_BT, down_BT).detach().double()
    return -advantages_B1 * ratio_BT * logprobs_BT * valid_BT, valid_BT


@pytest.mark.parametrize("kind", ["dppo_tv", "dppo_kl"])
def test_dppo_with_negative_epsilons_has_no_bound(kind: str) -> None:
    inputs = PolicyLossInputs(*(random_batch(0)[i] for i in (0, 2, 3, 1)))
    losses = [policy_loss(inputs, PolicySettings(e, e, objective=kind)).loss_BT for e in (-1.0, math.inf)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(("kind", "low", "high"), [("dppo_tv", 0.1, 0.15), ("dppo_kl", 0.02, 0.05)])
@pytest.mark.parametrize("seed", range(5))
def test_dppo_equals_verl(kind: str, low: float, high: float, seed: int) -> None:
    logprobs_BT, old_BT, advantages_B, mask_BT = random_batch(seed)
    settings = PolicySettings(low, high, objective=kind, ratio_cap=20.0)
    found = policy_loss(PolicyLossInputs(logprobs_BT, advantages_B, mask_BT, old_BT), settings)
    loss = aggregate_loss(found.loss_BT, mask_BT, "token-mean", float(mask_BT.sum()))
    expected_BT, valid_BT = dppo_of_verl(kind, logprobs_BT, old_BT, advantages_B.unsqueeze(-1), low, high)
    expected = expected_BT[mask_BT].mean()
    assert 0 < valid_BT[mask_BT].mean() < 1
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    gradients = [torch.autograd.grad(value, logprobs_BT, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("mean", "most"), [(0.15, None), (None, 0.5), (0.2, 0.8)])
@pytest.mark.parametrize("seed", range(5))
def test_rejection_of_sequences_by_k3_equals_verl(mean: float | None, most: float | None, seed: int) -> None:
    old_BT, rollout_BT, _, mask_BT = random_batch(seed)
    correction = ImportanceWeightRule("none", max_weight=math.inf, max_mean_k3_kl=mean, max_token_k3_kl=most)
    weights_BT, _ = importance_weights(old_BT.detach(), rollout_BT, mask_BT, correction)
    log_ratio_BT = (old_BT.detach() - rollout_BT).clamp(-20, 20)
    k3_BT = torch.exp(log_ratio_BT) - 1.0 - log_ratio_BT
    expected_BT = torch.zeros_like(weights_BT)
    for b in range(6):
        own = k3_BT[b][mask_BT[b]]
        if len(own) and (mean is None or own.mean() <= mean) and (most is None or own.max() <= most):
            expected_BT[b] = mask_BT[b].double()
    assert torch.equal(weights_BT, expected_BT)


@pytest.mark.parametrize("rule", ["truncate", "sequence-truncate"])
@pytest.mark.parametrize("seed", range(5))
def test_self_normalised_weights_equal_verl(rule: str, seed: int) -> None:
    old_BT, rollout_BT, _, mask_BT = random_batch(seed)
    old_BT = old_BT.detach()
    correction = self_normalise_weights(
        ImportanceWeightRule(rule, max_weight=1.5), zip(old_BT, rollout_BT, mask_BT, strict=True)
    )
    weights_BT, metrics = importance_weights(old_BT, rollout_BT, mask_BT, correction)
    log_ratio_BT = (old_BT - rollout_BT) * mask_BT
    if rule == "truncate":
        expected_BT = log_ratio_BT.exp().clamp(max=1.5) * mask_BT
        expected_BT = expected_BT / expected_BT[mask_BT].mean()
        total, count = metrics["rollout/weight"].tolist()
        assert total / count == pytest.approx(1.0)
    else:
        each_B, length_B = log_ratio_BT.sum(-1).exp().clamp(max=1.5), mask_BT.sum(-1).double()
        mean = (each_B * length_B / (length_B + 1e-8))[length_B > 0].mean()  # as verl's masked mean
        expected_BT = each_B.unsqueeze(-1) / mean * mask_BT
    torch.testing.assert_close(weights_BT, expected_BT, rtol=0, atol=1e-9)


def gdpo_of_trl(rewards: np.ndarray, weights: list[float], size: int) -> np.ndarray:
    """`multi_objective_aggregation = "normalize_then_sum"` of GRPOTrainer; completions by functions."""
    grouped = rewards.reshape(-1, size, rewards.shape[1])
    each = (grouped - grouped.mean(1, keepdims=True)) / (grouped.std(1, ddof=1, keepdims=True) + 1e-4)
    total = (each.reshape(rewards.shape) * np.array(weights)).sum(1)
    return (total - total.mean()) / (total.std(ddof=1) + 1e-4)


def scored(values: list[dict[str, float] | None], weights: dict[str, float]) -> ScoredGroup:
    drawn = (Completion((Segment((i, 9), True, (-0.1, -0.2), 0),), "stop", "x") for i in range(len(values)))
    scores = (
        Score(None, error="x") if each is None else Score(sum(weights[n] * v for n, v in each.items()), dict(each))
        for each in values
    )
    return ScoredGroup(Group(Prompt(0, (5, 6), "", ""), tuple(drawn), 0), tuple(scores))


def test_gdpo_equals_trl() -> None:
    weights = {"one": 1.0, "other": 0.25}
    for seed in range(5):
        generator = np.random.default_rng(seed)
        rewards = generator.choice([0.0, 1.0, 3.0, 100.0], size=(12, 2))
        rewards[:4, 0], rewards[4:8] = 1.0, 0.5  # a function that does not differ, and a group without any difference
        values = [dict(zip(weights, row, strict=True)) for row in rewards.tolist()]
        groups = [scored(values[i : i + 4], weights) for i in (0, 4, 8)]
        found, _ = Grpo(GrpoConfig(algo="gdpo", reward_function=weights)).credit(groups)
        expected = gdpo_of_trl(rewards, list(weights.values()), 4)
        assert [sample.advantage for sample in found] == pytest.approx(expected.tolist(), abs=1e-9)


def test_gdpo_leaves_invalid_completions_out_and_takes_groups_of_any_size() -> None:
    weights = {"one": 1.0, "silent": 0.0}
    first = scored([{"one": 0.0, "silent": 9.0}, None, {"one": 1.0, "silent": 0.0}], weights)
    groups = [first, scored([{"one": 7.0, "silent": 0.0}], weights)]
    found, _ = Grpo(GrpoConfig(algo="gdpo", reward_function=weights)).credit(groups)
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    std = half + 1e-4  # of -half, half, 0
    assert [sample.advantage for sample in found] == pytest.approx([-half / std, half / std, 0.0])


def test_a_function_that_does_not_apply_to_a_row_adds_nothing_to_gdpo() -> None:
    weights = {"one": 1.0, "other": 3.0}
    groups = [scored([{"one": 0.0}, {"one": 1.0}], weights), scored([{"other": 0.0}, {"other": 2.0}], weights)]
    found, _ = Grpo(GrpoConfig(algo="gdpo", reward_function=weights)).credit(groups)
    one, other = 0.5 / (math.sqrt(0.5) + 1e-4), 3.0 / (math.sqrt(2.0) + 1e-4)
    sums = np.array([-one, one, -other, other])
    assert [sample.advantage for sample in found] == pytest.approx((sums / (sums.std(ddof=1) + 1e-4)).tolist())


def test_gdpo_without_rewards_as_in_distillation_has_no_advantages() -> None:
    config = GrpoConfig.model_validate({"algo": "gdpo", "bypass_reward": True})
    found, _ = Grpo(config).credit([scored([{}, {}], {})])
    assert [sample.advantage for sample in found] == [0.0, 0.0]


def truncated(scored_group: ScoredGroup, indices: list[int]) -> ScoredGroup:
    group = scored_group.group
    completions = (
        replace(c, finish_reason="length" if k in indices else "stop") for k, c in enumerate(group.completions)
    )
    return replace(scored_group, group=replace(group, completions=tuple(completions)))


def test_truncated_completions_are_compared_but_not_learned() -> None:
    for algo in ("grpo", "rloo", "maxrl"):
        groups = random_groups(0) if algo != "maxrl" else random_groups(0)[3:]
        cut = [truncated(group, [k for k in range(len(group.group.completions)) if k % 2]) for group in groups]
        whole, _ = Grpo(GrpoConfig(algo=algo)).credit(cut)
        kept, _ = Grpo(GrpoConfig(algo=algo, mask_truncated_completions=True)).credit(cut)
        reasons = [c.finish_reason for g in cut for c, s in zip(g.group.completions, g.scores, strict=True)
                   if s.value is not None]  # fmt: skip
        stopped = [s for s, reason in zip(whole, reasons, strict=True) if reason == "stop"]
        assert [s.advantage for s in kept] == [s.advantage for s in stopped] and 0 < len(kept) < len(whole)
        assert all(np.array_equal(a.input_ids, b.input_ids) for a, b in zip(kept, stopped, strict=True))


def test_whitening_over_tokens_does_not_count_those_of_truncated_completions() -> None:
    cut = truncated(scored([{"one": 0.0}, {"one": 1.0}, {"one": 9.0}], {"one": 1.0}), [2])
    found, _ = Grpo(GrpoConfig(algo="reinforce++", mask_truncated_completions=True)).credit([cut])
    value = 0.5 / math.sqrt(1 / 3 + 1e-8)  # two tokens each
    assert [sample.advantage for sample in found] == pytest.approx([-value, value])


def step(config: GrpoConfig, size: int) -> tuple[float, Tensor]:
    """Loss and gradient of one optimizer step in micro-batches of `size`, with made-up outputs."""
    samples, _ = Grpo(config).credit(random_groups(3))
    generator = torch.Generator().manual_seed(0)
    width = max(len(sample.input_ids) for sample in samples) - 1
    logprobs_BT = -torch.rand(len(samples), width, generator=generator, dtype=torch.float64)
    entropy_BT = torch.rand(len(samples), width, generator=generator, dtype=torch.float64)
    lengths = [len(sample.input_ids) - 1 for sample in samples]

    class View(Given):
        def evaluate(self, samples, *_, **__):  # type: ignore[no-untyped-def]
            rows = zip(logprobs_BT.detach(), entropy_BT, lengths, strict=True)
            return [{"logprobs": a[:n], "entropy": b[:n]} for a, b, n in rows]

    (update,) = Grpo(config).updates(samples, View())
    logprobs_BT.requires_grad_()
    masks = [torch.as_tensor(sample.loss_mask[1:]).bool() for sample in samples]
    mask_BT = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(samples), size):
        rows = slice(start, start + size)
        micro = micro_batch(samples[rows], logprobs_BT[rows], mask_BT[rows], range(len(samples))[rows])
        total = total + update.loss(micro).value
    return total.item(), torch.autograd.grad(total, logprobs_BT)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"top_entropy_quantile": 0.3},
        {"rollout_correction": "truncate", "self_normalised_weights": True},
        {"rollout_correction": "sequence-truncate", "self_normalised_weights": True, "top_entropy_quantile": 0.5},
        {"mean_k3_mask": 0.25, "max_k3_mask": 0.6},
        {"variant": "sapo"},
        {"variant": "dppo_tv"},
        {"variant": "dppo_kl"},
    ],
)
def test_loss_and_gradient_do_not_depend_on_micro_batches(settings: dict[str, object]) -> None:
    config = GrpoConfig(**settings)
    whole, gradient = step(config, 99)
    assert gradient.abs().max() > 0
    for size in (1, 3):
        loss, own = step(config, size)
        assert loss == pytest.approx(whole, abs=1e-9)
        torch.testing.assert_close(own, gradient, rtol=0, atol=1e-9)
