"""The losses of DiffusionNFT and FlowGRPO against their papers, element by element in double precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_core.algorithms.flow_objectives import (
    FlowGrpoInputs,
    NftInputs,
    flow_grpo_loss,
    nft_loss,
    optimality_probability,
)
from cosmos_core.models.flow_steps import NoiseLevels, compute_step_distribution, log_prob

SHAPE = (3, 2, 2, 3)


def drawn(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float32) for _ in range(count)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.4, 0.5, 0.6, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.6, 1.0]),
        ("negative_only", [0.0, 0.4, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_the_optimality_of_a_sample(mode: str, expected: list[float]) -> None:
    advantages_B = torch.tensor([-7.0, -1.0, 0.0, 1.0, 9.0], dtype=torch.float64)
    assert optimality_probability(advantages_B, -5.0, 5.0, mode).tolist() == pytest.approx(expected)


def nft_of_paper(rows: list[list[float]], s: float, r: float, beta: float) -> tuple[float, float]:
    """Loss without KL, times the scale 5, and the KL, of one sample as lists of numbers."""
    v, old, ref, x, x0 = rows
    losses = []
    for sign in (1, -1):
        mixed = [
            beta * a + (1 - beta) * b if sign > 0 else (1 + beta) * b - beta * a for a, b in zip(v, old, strict=True)
        ]
        errors = [one - s * velocity - clean for one, velocity, clean in zip(x, mixed, x0, strict=True)]
        weight = max(sum(map(abs, errors)) / len(errors), 1e-5)
        losses.append(sum(e**2 for e in errors) / len(errors) / weight)
    kl = sum((a - b) ** 2 for a, b in zip(v, ref, strict=True)) / len(v)
    return 5 * (r * losses[0] + (1 - r) * losses[1]) / beta, kl


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_the_loss_of_diffusion_nft_is_that_of_the_paper(beta: float) -> None:
    v, old, ref, x, x0 = drawn(0, 5)
    x0[2], x[2], v[2], old[2] = 0, 0, 0, 0  # no error at all: the least weight
    sigma_B, r_B = torch.tensor([0.2, 0.9, 1.0]), torch.tensor([0.0, 0.3, 1.0])
    terms = nft_loss(NftInputs(v, old, ref, x, x0, sigma_B, r_B), beta, 5.0)
    for b in range(3):
        flat = [each[b].double().flatten().tolist() for each in (v, old, ref, x, x0)]
        policy, kl = nft_of_paper(flat, sigma_B[b].item(), r_B[b].item(), beta)
        assert terms.policy_loss_B[b].item() == pytest.approx(policy, rel=2e-6, abs=1e-6)
        assert terms.kl_B[b].item() == pytest.approx(kl, rel=2e-6, abs=1e-6)


def test_diffusion_nft_pulls_towards_samples_that_are_good_and_away_from_bad_ones() -> None:
    x0, noise = drawn(1, 2)
    sigma_B = torch.full((3,), 0.5)
    x, target = 0.5 * x0 + 0.5 * noise, noise - x0
    old = target + 0.3
    v = old.clone().requires_grad_()
    nft_loss(
        NftInputs(v, old, None, x, x0, sigma_B, torch.tensor([1.0, 0.5, 0.0])), 1.0, 5.0
    ).policy_loss_B.sum().backward()
    assert v.grad is not None
    assert (v.grad[0] > 0).all() and (v.grad[2] < 0).all()  # the target is below
    assert torch.allclose(v.grad[1], torch.zeros_like(v.grad[1]), atol=1e-7)


def step_inputs(name: str, guarded: bool) -> tuple[FlowGrpoInputs, Tensor, dict[str, Any]]:
    x, v, v_old, v_ref, noise = (each.double() for each in drawn(2, 5))
    sigma_B = torch.tensor([0.9, 0.6, 0.4], dtype=torch.float64)
    levels = NoiseLevels(sigma_B, sigma_B - 0.1, torch.tensor(0.95, dtype=torch.float64))
    v.mul_(0.01).add_(v_old)
    v.requires_grad_()
    old = compute_step_distribution(name, x, v_old, levels, 0.7)
    later = old.mean + old.std.reshape(-1, 1, 1, 1) * noise
    inputs = FlowGrpoInputs(
        compute_step_distribution(name, x, v, levels, 0.7),
        later,
        log_prob(old, later),
        torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64),
        old.mean if guarded else None,
        compute_step_distribution(name, x, v_ref, levels, 0.7),
        levels.sigma - levels.next_sigma,
    )
    return inputs, v, {"old": old, "next_latents": later}


@pytest.mark.parametrize("name", ["flow", "dance", "cps"])
@pytest.mark.parametrize("guarded", [False, True])
def test_the_loss_of_flow_grpo_is_that_of_the_paper(name: str, guarded: bool) -> None:
    inputs, _, known = step_inputs(name, guarded)
    terms = flow_grpo_loss(inputs, 1e-3, 2e-3, uses_grpo_guard=guarded)
    found, reference = inputs.step_distribution, inputs.reference_distribution
    assert reference is not None
    for b in range(3):
        std, rate = found.std[b].item(), found.noise_rate[b].item()
        means = [
            each[b].flatten().tolist()
            for each in (found.mean, known["old"].mean, reference.mean, known["next_latents"])
        ]
        squares = [(end - new) ** 2 - (end - old) ** 2 for new, old, _, end in zip(*means, strict=True)]
        log_ratio = -sum(squares) / len(squares) / (1 if name == "cps" else 2 * std**2)
        if guarded:
            bias = sum((new - old) ** 2 for new, old, _, _ in zip(*means, strict=True)) / len(squares)
            bias /= 1 if name == "cps" else 2 * std**2
            log_ratio = (log_ratio + bias) * std
        ratio, advantage = math.exp(log_ratio), inputs.advantages_B[b].item()
        expected = max(-advantage * ratio, -advantage * min(max(ratio, 1 - 1e-3), 1 + 2e-3))
        if guarded:
            expected /= 0.1
        distance = sum((new - ref) ** 2 for new, _, ref, _ in zip(*means, strict=True)) / len(squares)
        assert terms.ratio_B[b].item() == pytest.approx(ratio, abs=1e-9)
        assert terms.policy_loss_B[b].item() == pytest.approx(expected, abs=1e-7)
        assert terms.kl_B[b].item() == pytest.approx(distance / (2 if name == "cps" else 2 * rate**2), rel=1e-7)


def test_given_frames_are_no_part_of_any_mean() -> None:
    """A loss with a mask is that of the elements which are learned, whatever the others are."""
    mask = torch.ones(3, 1, 1, 3)
    mask[..., 0] = 0
    inputs, _, known = step_inputs("flow", True)
    reference = inputs.reference_distribution
    assert reference is not None and inputs.old_step_mean is not None
    learned = FlowGrpoInputs(
        inputs.step_distribution._replace(mean=inputs.step_distribution.mean[..., 1:]),
        inputs.next_latents[..., 1:],
        log_prob(known["old"], inputs.next_latents, mask),
        inputs.advantages_B,
        inputs.old_step_mean[..., 1:],
        reference._replace(mean=reference.mean[..., 1:]),
        inputs.step_sizes_B,
    )
    with_mask = replace(inputs, old_log_prob_B=learned.old_log_prob_B, mask=mask)
    masked, alone = (flow_grpo_loss(each, 1e-3, 2e-3, uses_grpo_guard=True) for each in (with_mask, learned))
    for name in ("policy_loss_B", "kl_B", "ratio_B"):
        assert torch.allclose(getattr(masked, name), getattr(alone, name), atol=1e-12), name

    v, old, ref, x, x0 = drawn(0, 5)
    sigma_B, r_B = torch.tensor([0.2, 0.9, 1.0]), torch.tensor([0.0, 0.3, 1.0])
    whole = nft_loss(NftInputs(v, old, ref, x, x0, sigma_B, r_B, mask), 0.1, 5.0)
    parts = [each[..., 1:] for each in (v, old, ref, x, x0)]
    part = nft_loss(NftInputs(*parts, sigma_B, r_B), 0.1, 5.0)
    for name in ("policy_loss_B", "kl_B", "old_policy_distance_B"):
        assert torch.allclose(getattr(whole, name), getattr(part, name), rtol=1e-5), name


def test_a_ratio_that_is_clipped_has_no_gradient() -> None:
    inputs, v, _ = step_inputs("flow", False)
    inputs = replace(inputs, advantages_B=inputs.advantages_B * torch.tensor([-1, -1, 1]))
    terms = flow_grpo_loss(inputs, 1e-9, 1e-9)
    terms.policy_loss_B.sum().backward()
    assert v.grad is not None and terms.is_clipped_B.any()
    for b in range(3):
        assert bool(v.grad[b].any()) != bool(terms.is_clipped_B[b])
