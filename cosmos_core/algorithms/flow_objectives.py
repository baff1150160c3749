"""Losses of DiffusionNFT and FlowGRPO, per sample.

Pure functions in float32 or wider, from velocities or means of stochastic steps to a loss of each sample. Callers run
the forward passes, compute the advantages (`flow_credit`), and sum over samples.

Shapes: B samples, dots for the dimensions of a latent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_core.models.flow import estimate_clean_latents, mean_per_sample
from cosmos_core.models.flow_steps import StepDistribution, log_prob

_MIN_ABS_ERROR = 1e-5

ADVANTAGE_TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda a: a,
    "positive_only": lambda a: a.clamp(min=0),
    "negative_only": lambda a: a.clamp(max=0),
    "one_only": lambda a: (a > 0).to(a),
    "binary": lambda a: a.sign(),
}
"""Functions that transform clipped advantages, by the value of the setting `advantage_mode`, as in the published code
of DiffusionNFT."""


def optimality_probability(
    advantages_B: Tensor, min_advantage: float, max_advantage: float, advantage_mode: str = "all"
) -> Tensor:
    """Return the probability r that a sample is optimal (arXiv 2509.16117): 0.5 for an advantage of 0, 1 for
    `max_advantage`. Advantages are first clipped to [`min_advantage`, `max_advantage`], and then transformed by the
    function that `advantage_mode` selects from `ADVANTAGE_TRANSFORMS`."""
    clipped_advantages_B = ADVANTAGE_TRANSFORMS[advantage_mode](advantages_B.clamp(min_advantage, max_advantage))
    return (clipped_advantages_B / max_advantage / 2 + 0.5).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class NftLosses:
    """Terms of the DiffusionNFT loss, one value per sample."""

    policy_loss_B: Tensor
    """Policy loss of each sample, with the factor `loss_scale` / beta, without the KL term; it is minimized."""
    unscaled_policy_loss_B: Tensor
    """Policy loss of each sample without the factor `loss_scale` / beta, for metrics."""
    kl_B: Tensor
    """Mean squared distance of the policy's velocity to that of the reference policy; 0 without a reference policy."""
    old_policy_distance_B: Tensor
    """Mean squared distance of the policy's velocity to that of the old policy."""


@dataclass(frozen=True, slots=True)
class NftInputs:
    """Inputs of the DiffusionNFT loss."""

    velocity: Tensor
    """Velocity of the policy, with gradient."""
    old_velocity: Tensor
    """Velocity of the old policy, which sampled the completions."""
    reference_velocity: Tensor | None
    x: Tensor
    """The noisy latents at which all velocities were computed."""
    x0: Tensor
    """The clean latents of the sample."""
    sigma_B: Tensor
    optimality_B: Tensor
    mask: Tensor | None = None
    """Mask of video frames: 1 for trained frames, 0 for conditioning frames; None: all frames are trained."""


def nft_loss(inputs: NftInputs, beta: float, loss_scale: float) -> NftLosses:
    """Return the terms of the DiffusionNFT loss (arXiv 2509.16117).

    The positive policy beta v + (1 - beta) v_old is trained on the sample with the weight r, its probability of being
    optimal, and the negative policy (1 + beta) v_old - beta v with the weight 1 - r. The loss of either policy is the
    squared error of its estimate of x0, divided by the mean absolute error without gradient. The policy loss has the
    factor `loss_scale` / `beta`.
    """
    velocity, old_velocity = inputs.velocity.float(), inputs.old_velocity.detach().float()
    positive_loss_B = _normalised_latent_error(inputs, beta * velocity + (1 - beta) * old_velocity)
    negative_loss_B = _normalised_latent_error(inputs, (1 + beta) * old_velocity - beta * velocity)
    optimality_B = inputs.optimality_B.to(positive_loss_B)
    unscaled_policy_loss_B = optimality_B * positive_loss_B + (1 - optimality_B) * negative_loss_B
    kl_B = torch.zeros_like(unscaled_policy_loss_B)
    if inputs.reference_velocity is not None:
        kl_B = mean_per_sample((velocity - inputs.reference_velocity.detach().float()) ** 2, inputs.mask)
    old_policy_distance_B = mean_per_sample((velocity - old_velocity).detach() ** 2, inputs.mask)
    return NftLosses(loss_scale * unscaled_policy_loss_B / beta, unscaled_policy_loss_B, kl_B, old_policy_distance_B)


def _normalised_latent_error(inputs: NftInputs, velocity: Tensor) -> Tensor:
    """Return for each sample the mean squared error of the clean latents that `velocity` predicts, divided by their
    mean absolute error."""
    latent_error = estimate_clean_latents(inputs.x.float(), velocity, inputs.sigma_B) - inputs.x0.float()
    mean_abs_error_B = mean_per_sample(latent_error.detach().double().abs(), inputs.mask).clamp(min=_MIN_ABS_ERROR)
    return mean_per_sample(latent_error**2, inputs.mask) / mean_abs_error_B.to(latent_error)


@dataclass(frozen=True, slots=True)
class FlowGrpoInputs:
    """Inputs of the FlowGRPO loss: one stochastic step of each sample."""

    step_distribution: StepDistribution
    """Distribution of the latents after the stochastic step under the current policy, with gradient."""
    next_latents: Tensor
    """Latents after the stochastic step, as the rollout sampled them."""
    old_log_prob_B: Tensor
    """Log-probability of each sample's stochastic step under the policy that sampled the rollout."""
    advantages_B: Tensor
    old_step_mean: Tensor | None = None
    """Mean of the distribution of the latents after the step under the policy that sampled the rollout; GRPO-Guard
    needs it."""
    reference_distribution: StepDistribution | None = None
    step_sizes_B: Tensor | None = None
    """Step size of each sample: noise level before the step minus noise level after it; GRPO-Guard needs the sizes."""
    mask: Tensor | None = None
    """Mask of video frames: 1 for trained frames, 0 for conditioning frames; None: all frames are trained."""


@dataclass(frozen=True, slots=True)
class FlowGrpoLosses:
    """Terms of the FlowGRPO loss, one value per sample."""

    policy_loss_B: Tensor
    kl_B: Tensor
    ratio_B: Tensor
    is_clipped_B: Tensor
    """Whether clipping of the probability ratio removed the gradient of the sample."""


def flow_grpo_loss(
    inputs: FlowGrpoInputs, epsilon_low: float, epsilon_high: float, *, uses_grpo_guard: bool = False
) -> FlowGrpoLosses:
    """Return the clipped loss of a sampler step of each sample (arXiv 2505.05470), and its KL to the reference policy.

    The probability ratio is clipped to [1 - epsilon_low, 1 + epsilon_high]; a negative epsilon disables its bound. With
    `uses_grpo_guard`, the log-ratio is normalized, and the loss divided by the step size, as in GRPO-Guard (arXiv
    2510.22319). With the mean mu and the noise rate of the step's distribution, the KL is mean (mu - mu_ref)^2 / (2
    rate^2), or mean (mu - mu_ref)^2 / 2 if the sampler's steps have no density."""
    log_prob_B = log_prob(inputs.step_distribution, inputs.next_latents, inputs.mask)
    log_ratio_B = log_prob_B - inputs.old_log_prob_B.to(inputs.next_latents)
    if uses_grpo_guard:
        assert inputs.old_step_mean is not None
        std_B = inputs.step_distribution.std.to(log_ratio_B)
        log_ratio_bias_B = mean_per_sample((inputs.step_distribution.mean - inputs.old_step_mean) ** 2, inputs.mask)
        if inputs.step_distribution.has_log_density:
            log_ratio_bias_B = log_ratio_bias_B / (2 * std_B**2)
        log_ratio_B = (log_ratio_B + log_ratio_bias_B) * std_B
    ratio_B, advantages_B = log_ratio_B.exp(), inputs.advantages_B.to(log_ratio_B)
    min_ratio = 1 - epsilon_low if epsilon_low >= 0 else 0.0
    max_ratio = 1 + epsilon_high if epsilon_high >= 0 else math.inf
    unclipped_loss_B, clipped_loss_B = -advantages_B * ratio_B, -advantages_B * ratio_B.clamp(min_ratio, max_ratio)
    policy_loss_B = torch.maximum(unclipped_loss_B, clipped_loss_B)
    if uses_grpo_guard:
        assert inputs.step_sizes_B is not None
        policy_loss_B = policy_loss_B / inputs.step_sizes_B.to(policy_loss_B)
    kl_B = torch.zeros_like(policy_loss_B)
    if inputs.reference_distribution is not None:
        step_mean_difference = inputs.step_distribution.mean - inputs.reference_distribution.mean.detach()
        step_mean_distance_B = mean_per_sample(step_mean_difference**2, inputs.mask)
        kl_B = step_mean_distance_B / 2
        if inputs.step_distribution.has_log_density:
            kl_B = step_mean_distance_B / (2 * inputs.step_distribution.noise_rate.to(step_mean_distance_B) ** 2)
    return FlowGrpoLosses(policy_loss_B, kl_B, ratio_B.detach(), clipped_loss_B > unclipped_loss_B)
