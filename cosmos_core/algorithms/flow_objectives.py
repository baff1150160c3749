"""What diffusion models learn from scored samples: the losses of DiffusionNFT and FlowGRPO, per sample.

Pure functions in float32 or better: velocities, or means of stochastic steps, to a loss of each sample. Not here:
rewards to advantages (`flow_credit`), forward passes, and the sum over samples.

Shapes: B samples, dots for the dimensions of a latent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_core.models.flow import clean_estimate, mean_per_sample
from cosmos_core.models.flow_steps import Transition, log_prob

_LEAST_WEIGHT = 1e-5

MODES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda a: a,
    "positive_only": lambda a: a.clamp(min=0),
    "negative_only": lambda a: a.clamp(max=0),
    "one_only": lambda a: (a > 0).to(a),
    "binary": lambda a: a.sign(),
}
"""What is made of clipped advantages, by the names of DiffusionNFT."""


def optimality(advantages_B: Tensor, low: float, high: float, mode: str = "all") -> Tensor:
    """Return the probability r that a sample is optimal: 0.5 where the advantage is 0, 1 at `high`
    (arXiv 2509.16117, equation 12)."""
    clipped_B = MODES[mode](advantages_B.clamp(low, high))
    return (clipped_B / high / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class NftTerms:
    """The terms of DiffusionNFT, each with a value for each sample."""

    policy_B: Tensor
    """What the optimizer sees, the KL term aside."""
    unweighted_B: Tensor
    """Without beta and scale: r times the loss of the positive policy, 1 - r times that of the negative one."""
    kl_B: Tensor
    """Mean squared distance to the reference's velocity; 0 without one."""
    deviation_B: Tensor
    """Mean squared distance to the old policy's velocity."""


@dataclass(frozen=True, slots=True)
class NftInputs:
    """What the loss of DiffusionNFT looks at."""

    velocity: Tensor
    """Of the policy, with gradient."""
    old: Tensor
    """Of the policy that drew the samples."""
    reference: Tensor | None
    x: Tensor
    """The noisy latents that all of them saw."""
    x0: Tensor
    """The latents of the sample."""
    sigma_B: Tensor
    optimality_B: Tensor
    mask: Tensor | None = None
    """1 for what is learned, 0 for frames that are given; None: all is learned."""


def nft_loss(inputs: NftInputs, beta: float, scale: float) -> NftTerms:
    """Return the loss of DiffusionNFT (arXiv 2509.16117): the positive policy beta v + (1 - beta) v_old learns the
    sample with weight r, the negative one (1 + beta) v_old - beta v with weight 1 - r. Each is a regression of x0,
    divided by its own mean error, which has no gradient."""
    v, old = inputs.velocity.float(), inputs.old.detach().float()
    positive_B = _regression(inputs, beta * v + (1 - beta) * old)
    negative_B = _regression(inputs, (1 + beta) * old - beta * v)
    r_B = inputs.optimality_B.to(positive_B)
    unweighted_B = r_B * positive_B + (1 - r_B) * negative_B
    kl_B = torch.zeros_like(unweighted_B)
    if inputs.reference is not None:
        kl_B = mean_per_sample((v - inputs.reference.detach().float()) ** 2, inputs.mask)
    deviation_B = mean_per_sample((v - old).detach() ** 2, inputs.mask)
    return NftTerms(scale * unweighted_B / beta, unweighted_B, kl_B, deviation_B)


def _regression(inputs: NftInputs, velocity: Tensor) -> Tensor:
    """Return the squared error of the clean estimate of a velocity over its mean absolute error, per sample."""
    error = clean_estimate(inputs.x.float(), velocity, inputs.sigma_B) - inputs.x0.float()
    weight_B = mean_per_sample(error.detach().double().abs(), inputs.mask).clamp(min=_LEAST_WEIGHT)
    return mean_per_sample(error**2, inputs.mask) / weight_B.to(error)


@dataclass(frozen=True, slots=True)
class RatioSettings:
    """How FlowGRPO compares a step with the one that was taken."""

    epsilon_low: float
    epsilon_high: float
    """Ratios are clipped outside of 1 - low and 1 + high; below 0: that side is open."""
    is_guarded: bool = False
    """GRPO-Guard (arXiv 2510.22319)."""


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the loss of FlowGRPO looks at: one stochastic step of each sample."""

    found: Transition
    """Of the policy, with gradient."""
    later: Tensor
    """The latents after the step, as drawn."""
    old_log_prob_B: Tensor
    """Of the policy that drew them."""
    advantages_B: Tensor
    old_mean: Tensor | None = None
    """Of the policy that drew them; GRPO-Guard needs it."""
    reference: Transition | None = None
    sizes_B: Tensor | None = None
    """How far the step went, sigma - next; GRPO-Guard needs it."""
    mask: Tensor | None = None
    """1 for what is learned, 0 for frames that are given; None: all is learned."""


@dataclass(frozen=True, slots=True)
class StepTerms:
    """The terms of FlowGRPO, each with a value for each sample."""

    policy_B: Tensor
    kl_B: Tensor
    ratio_B: Tensor
    is_clipped_B: Tensor
    """Whether clipping took the gradient."""


def flow_grpo_loss(inputs: StepInputs, settings: RatioSettings) -> StepTerms:
    """Return the clipped loss of a step (arXiv 2505.05470) and its KL to the reference, mean (mu - mu_ref)^2 /
    (2 rate^2), for steps without a density mean (mu - mu_ref)^2 / 2."""
    log_ratio_B = log_prob(inputs.found, inputs.later, inputs.mask) - inputs.old_log_prob_B.to(inputs.later)
    if settings.is_guarded:
        assert inputs.old_mean is not None
        std_B = inputs.found.std.to(log_ratio_B)
        bias_B = mean_per_sample((inputs.found.mean - inputs.old_mean) ** 2, inputs.mask)
        if inputs.found.has_density:
            bias_B = bias_B / (2 * std_B**2)
        log_ratio_B = (log_ratio_B + bias_B) * std_B
    ratio_B, advantages_B = log_ratio_B.exp(), inputs.advantages_B.to(log_ratio_B)
    low = 1 - settings.epsilon_low if settings.epsilon_low >= 0 else 0.0
    high = 1 + settings.epsilon_high if settings.epsilon_high >= 0 else math.inf
    plain_B, clipped_B = -advantages_B * ratio_B, -advantages_B * ratio_B.clamp(low, high)
    policy_B = torch.maximum(plain_B, clipped_B)
    if settings.is_guarded:
        assert inputs.sizes_B is not None
        policy_B = policy_B / inputs.sizes_B.to(policy_B)
    kl_B = torch.zeros_like(policy_B)
    if inputs.reference is not None:
        squared_B = mean_per_sample((inputs.found.mean - inputs.reference.mean.detach()) ** 2, inputs.mask)
        rate = inputs.found.rate.to(squared_B) if inputs.found.has_density else torch.ones_like(squared_B)
        kl_B = squared_B / (2 * rate**2)
    return StepTerms(policy_B, kl_B, ratio_B.detach(), clipped_B > plain_B)
