"""Steps of a sampler from one noise level to the next: stochastic steps with their log-probability, and ODE solvers.

A stochastic step is a Gaussian around a mean. Rollouts and, with gradient, training call the same function
`compute_step_distribution`, which computes mean and standard deviation from a velocity. All values are computed at
least in float32, whatever the dtype of the network.

`flow` has the tables of noise levels.

Shapes: B samples, dots for the dimensions of a latent.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_core.models.flow import broadcast_per_sample, estimate_clean_latents, estimate_noise, mean_per_sample

_PURE_NOISE_SIGMA = 0.999
"""Noise level above which latents count as pure noise."""
_MIN_SIGMA_OF_NOISE_LIMIT = 0.99
"""Noise level above which `flow_grpo_step` limits the noise of a long first step, unlike the original FlowGRPO."""


@dataclass(frozen=True, slots=True)
class NoiseLevels:
    """Noise levels at the start and at the end of a sampler step, with one value per sample or one for all samples."""

    sigma: Tensor
    next_sigma: Tensor
    second_schedule_sigma: Tensor
    """Second noise level of the sampler's schedule, which replaces a sigma at or near 1 in 1 / (1 - sigma)."""


class StepDistribution(NamedTuple):
    """Gaussian distribution of the latents after a stochastic step."""

    mean: Tensor
    std: Tensor
    """Standard deviation of each element, one value per sample or one for all; 0: the step is deterministic."""
    noise_rate: Tensor
    """Noise rate, by whose square the KL divergence is divided: std / sqrt(sigma - next_sigma), the noise rate of the
    stochastic differential equation, or `std` in a step of FlowCPS."""
    has_log_density: bool = True
    """Whether `log_prob` returns the log-density of this Gaussian; False: minus the mean squared distance from the
    mean, as in FlowCPS."""


StochasticStep = Callable[[Tensor, Tensor, NoiseLevels, float], StepDistribution]
"""Function from latents, velocity, noise levels and noise strength to the distribution after a step."""


def flow_grpo_step(x: Tensor, v: Tensor, noise_levels: NoiseLevels, noise_strength: float) -> StepDistribution:
    """Return the distribution of the latents after a stochastic step of FlowGRPO (arXiv 2505.05470).

    The noise rate is noise_strength sqrt(sigma / (1 - sigma)), and the drift preserves the distribution of latents at
    each noise level. The second noise level replaces sigma in 1 - sigma in two cases: sigma is above 0.999, where the
    noise rate is unbounded; or sigma is above 0.99 and the first step is longer than 1 - sigma, so that its noise would
    be larger than the latents.
    """
    sigma, sigma_change = noise_levels.sigma, noise_levels.next_sigma - noise_levels.sigma
    is_first_step = (sigma > noise_levels.second_schedule_sigma) & (sigma > _MIN_SIGMA_OF_NOISE_LIMIT)
    is_sigma_replaced = (sigma > _PURE_NOISE_SIGMA) | (is_first_step & (1 - sigma < -sigma_change))
    sigma_for_noise_rate = torch.where(is_sigma_replaced, noise_levels.second_schedule_sigma, sigma)
    noise_rate = noise_strength * torch.sqrt(sigma / (1 - sigma_for_noise_rate))
    drift_factor = noise_rate**2 / (2 * sigma)
    velocity_factor = (1 + drift_factor * (1 - sigma)) * sigma_change
    mean = x * broadcast_per_sample(1 + drift_factor * sigma_change, x) + v * broadcast_per_sample(velocity_factor, x)
    return StepDistribution(mean, noise_rate * torch.sqrt(-sigma_change), noise_rate)


def dance_grpo_step(x: Tensor, v: Tensor, noise_levels: NoiseLevels, noise_strength: float) -> StepDistribution:
    """Return the distribution of the latents after a stochastic step of DanceGRPO (arXiv 2505.07818), whose noise rate
    is constant and whose drift is along the score."""
    sigma, sigma_change = noise_levels.sigma, noise_levels.next_sigma - noise_levels.sigma
    clean_latents = estimate_clean_latents(x, v, sigma)
    score = (broadcast_per_sample(1 - sigma, x) * clean_latents - x) / broadcast_per_sample(sigma**2, x)
    score_factor = broadcast_per_sample(0.5 * noise_strength**2 * sigma_change, x)
    mean = x + v * broadcast_per_sample(sigma_change, x) - score * score_factor
    noise_rate = torch.full_like(sigma, noise_strength)
    return StepDistribution(mean, noise_rate * torch.sqrt(-sigma_change), noise_rate)


def flow_cps_step(x: Tensor, v: Tensor, noise_levels: NoiseLevels, noise_strength: float) -> StepDistribution:
    """Return the distribution of the latents after a stochastic step of FlowCPS (arXiv 2509.05952), in which the
    fraction sin(noise_strength pi / 2) of the noise is new. The total noise after the step is exactly that of the next
    noise level."""
    new_noise_std = noise_levels.next_sigma * math.sin(noise_strength * math.pi / 2)
    predicted_noise_std = torch.sqrt((noise_levels.next_sigma**2 - new_noise_std**2).clamp(min=0))
    clean_latents, noise = estimate_clean_latents(x, v, noise_levels.sigma), estimate_noise(x, v, noise_levels.sigma)
    clean_latents_scale = broadcast_per_sample(1 - noise_levels.next_sigma, x)
    mean = clean_latents_scale * clean_latents + broadcast_per_sample(predicted_noise_std, x) * noise
    return StepDistribution(mean, new_noise_std, new_noise_std, has_log_density=False)


def ddim_step(x: Tensor, v: Tensor, noise_levels: NoiseLevels, noise_strength: float) -> StepDistribution:
    """Return the distribution of the latents after a step of DDIM (arXiv 2010.02502) for a flow. Noise strength 0 gives
    the Euler step, noise strength 1 the posterior of the forward process."""
    sigma, next_sigma = noise_levels.sigma, noise_levels.next_sigma
    noise_variance = (sigma**2 - ((1 - sigma) / (1 - next_sigma) * next_sigma) ** 2).clamp(min=0)
    std = torch.minimum(noise_strength * next_sigma / sigma * torch.sqrt(noise_variance), next_sigma)
    kept_noise_std = torch.sqrt(next_sigma**2 - std**2)
    clean_latents, noise = estimate_clean_latents(x, v, sigma), estimate_noise(x, v, sigma)
    mean = broadcast_per_sample(1 - next_sigma, x) * clean_latents + broadcast_per_sample(kept_noise_std, x) * noise
    return StepDistribution(mean, std, std / torch.sqrt(sigma - next_sigma))


STOCHASTIC_STEPS: dict[str, StochasticStep] = {
    "flow": flow_grpo_step, "dance": dance_grpo_step, "cps": flow_cps_step, "ddim": ddim_step
}  # fmt: skip
"""Functions that compute a stochastic sampler step, by the solver's name in `policy.diffusers.sample.solver`."""


def compute_step_distribution(
    solver: str, x: Tensor, v: Tensor, noise_levels: NoiseLevels, noise_strength: float
) -> StepDistribution:
    """Return the distribution of the latents after a stochastic step from the latents `x` with the predicted velocity
    `v`; `solver` is a key of `STOCHASTIC_STEPS`, and `noise_strength` scales the noise that the step adds."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return STOCHASTIC_STEPS[solver](x.to(dtype), v.to(dtype), noise_levels, noise_strength)


def log_prob(distribution: StepDistribution, next_latents: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return for each sample the log-probability of the latents `next_latents` after a step, as the *mean* over the
    elements with mask 1 (None: all elements); conditioning frames have mask 0. Because the value is a mean, clip ranges
    are as small as 1e-4."""
    mean, next_latents = distribution.mean, next_latents.to(distribution.mean.dtype)
    squared_error_B = mean_per_sample((next_latents - mean) ** 2, mask)
    if not distribution.has_log_density:
        return -squared_error_B
    std = distribution.std.to(squared_error_B)
    return -squared_error_B / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)


def euler_step(x: Tensor, v: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """Return the latents after an Euler step from noise level `sigma` to `next_sigma`. DDIM with noise
    strength 0 and DPM-Solver++ of order 1 are the same step."""
    return x + v * broadcast_per_sample(next_sigma - sigma, x)


class DpmSolver2M:
    """DPM-Solver++(2M) (arXiv 2211.01095) on a flow: a step also uses the previous estimate of the clean latents.

    The first step, the second step if sampling starts from pure noise, and the last step are of order 1, because
    log((1 - sigma) / sigma) is infinite at sigma 0 and 1.
    """

    def __init__(self, sigmas_N: Tensor) -> None:
        self._sigmas_N = sigmas_N
        self._previous_clean_latents: Tensor | None = None

    def step(self, x: Tensor, v: Tensor, step_index: int) -> Tensor:
        """Return the latents after step `step_index` of the schedule, from the latents `x` before the step and the
        velocity `v`. Call this method for the steps in order."""
        sigma, next_sigma = self._sigmas_N[step_index], self._sigmas_N[step_index + 1]
        clean_latents, previous_clean_latents = estimate_clean_latents(x, v, sigma), self._previous_clean_latents
        self._previous_clean_latents = clean_latents
        if previous_clean_latents is None or next_sigma == 0 or self._sigmas_N[step_index - 1] >= 1:
            return euler_step(x, v, sigma, next_sigma)
        log_snrs = [torch.log((1 - s) / s).item() for s in (self._sigmas_N[step_index - 1], sigma, next_sigma)]
        log_snr_step, previous_log_snr_step = log_snrs[2] - log_snrs[1], log_snrs[1] - log_snrs[0]
        clean_latents_slope = (clean_latents - previous_clean_latents) / (previous_log_snr_step / log_snr_step)
        clean_factor = (1 - next_sigma).item() * math.expm1(-log_snr_step)
        return (next_sigma / sigma).item() * x - clean_factor * clean_latents - 0.5 * clean_factor * clean_latents_slope

    def reset(self) -> None:
        """Discard the estimate of the clean latents of the previous step, for example after a stochastic step; the next
        step is then of order 1."""
        self._previous_clean_latents = None
