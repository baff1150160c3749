"""Rectified flow: the path from data to noise, and the noise levels of training and of samplers.

One convention for all families: sigma is in [0, 1] and 1 is pure noise, so x = (1 - sigma) x0 + sigma e with e sampled
from N(0, I), and a network predicts the velocity v = e - x0. Tables of noise levels are computed by this module in
float64 on the CPU, because the integer timesteps of a scheduler are inexact by up to 1/1000, and a call of the pipeline
modifies the scheduler. If no formula of this module matches the settings of a scheduler, the scheduler's own table is
used (`DiffusionModel.set_scheduler_timestep`).

`flow_steps` has the steps from one noise level to the next.

Shapes: B samples, N noise levels, dots for the dimensions of a latent.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

_MODE_SCHEME_SCALE = 1.29
_NUM_TRAIN_NOISE_LEVELS = 1000
"""Number of noise levels that diffusers' schedulers use in training (`num_train_timesteps`)."""


def add_noise(x0: Tensor, noise: Tensor, sigma_B: Tensor) -> Tensor:
    """Return the noisy latents (1 - sigma) x0 + sigma noise, with the noise level sigma of each sample."""
    sigma = broadcast_per_sample(sigma_B, x0)
    return (1 - sigma) * x0 + sigma * noise


def compute_velocity(x0: Tensor, noise: Tensor) -> Tensor:
    """Return the velocity that a network is trained to predict, `noise` - `x0`, the same at every noise level."""
    return noise - x0


def estimate_clean_latents(x: Tensor, v: Tensor, sigma_B: Tensor) -> Tensor:
    """Return the estimate of the clean latents x0 from noisy latents `x` and a predicted velocity `v`."""
    return x - broadcast_per_sample(sigma_B, x) * v


def estimate_noise(x: Tensor, v: Tensor, sigma_B: Tensor) -> Tensor:
    """Return the estimate of the noise from noisy latents `x` and a predicted velocity `v`."""
    return x + (1 - broadcast_per_sample(sigma_B, x)) * v


def broadcast_per_sample(values_B: Tensor, latents: Tensor) -> Tensor:
    """Return values per sample, or a scalar, in the dtype of `latents` and a shape that broadcasts over `latents`."""
    return values_B.to(latents).reshape(-1, *[1] * (latents.ndim - 1)) if values_B.ndim else values_B.to(latents)


def trained_frames_mask(latents: Tensor, num_conditioning_B: Tensor) -> Tensor:
    """Return a mask (B, 1, F, 1, 1) that is False for the first `num_conditioning_B` frames of each sample, which are
    clean conditioning frames, and True for all others."""
    frame_index_F = torch.arange(latents.shape[2], device=latents.device)
    is_trained_BF = frame_index_F[None] >= num_conditioning_B.to(latents.device)[:, None]
    return is_trained_BF[:, None, :, None, None]


def mean_per_sample(latent_values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean of the elements of `latent_values` in each sample. Only elements with mask 1 count; conditioning
    frames have mask 0. If the mask is None or a scalar, all elements count."""
    if mask is None or not mask.ndim:
        return latent_values.flatten(1).mean(1)
    mask_weights = mask.to(latent_values).expand_as(latent_values).flatten(1)
    return (latent_values.flatten(1) * mask_weights).sum(1) / mask_weights.sum(1)


def shift_sigmas(sigmas: Tensor, shift: float) -> Tensor:
    """Return noise levels that are moved towards pure noise if `shift` exceeds 1. Larger images need a larger shift.

    Source: arXiv 2403.03206, section 5.3.2.
    """
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def sample_noise_levels(
    num_samples: int,
    sampling_scheme: str,
    generator: torch.Generator | None = None,
    *,
    logit_mean: float = 0.0,
    logit_std: float = 1.0,
    shift: float = 1.0,
) -> Tensor:
    """Sample `num_samples` noise levels in float64 from the density that `sampling_scheme` names, and shift them.

    `logit_normal` is sigmoid(logit_mean + logit_std z) with z from N(0, 1); `mode` prefers medium levels; all other
    schemes are uniform (arXiv 2403.03206, section 3.1).
    """
    if sampling_scheme == "logit_normal":
        normal_samples_N = torch.randn(num_samples, generator=generator, dtype=torch.float64)
        sigmas_N = torch.sigmoid(logit_mean + logit_std * normal_samples_N)
    else:
        sigmas_N = torch.rand(num_samples, generator=generator, dtype=torch.float64)
        if sampling_scheme == "mode":
            mode_scheme_offset_N = torch.cos(math.pi * sigmas_N / 2) ** 2 - 1 + sigmas_N
            sigmas_N = 1 - sigmas_N - _MODE_SCHEME_SCALE * mode_scheme_offset_N
    return shift_sigmas(sigmas_N, shift)


def compute_loss_weights(sigma_B: Tensor, weighting_scheme: str) -> Tensor:
    """Return the loss weight of each sample at its noise level, by the name of a weighting scheme.

    The weight is sigma^-2 for `sigma_sqrt`, 2 / (pi (1 - 2 sigma + 2 sigma^2)) for `cosmap`, and 1 for all other
    schemes, for which only the density of `sample_noise_levels` favours some noise levels.
    """
    if weighting_scheme == "sigma_sqrt":  # sigma is clamped, because the weight is unbounded at sigma = 0
        return sigma_B.clamp(min=1 / _NUM_TRAIN_NOISE_LEVELS) ** -2
    if weighting_scheme == "cosmap":
        return 2 / (math.pi * (1 - 2 * sigma_B + 2 * sigma_B**2))
    return torch.ones_like(sigma_B)


def flow_schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """Return the `num_steps` + 1 noise levels of a sampler from 1 to 0: evenly spaced, then shifted."""
    return shift_sigmas(torch.linspace(1, 0, num_steps + 1, dtype=torch.float64), shift)


def euler_schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """Return the noise levels of diffusers' FlowMatchEulerDiscreteScheduler, which the papers on RL with flows used.
    The last level before 0 is 0.001, shifted twice, so that the last step is very small."""
    min_sigma = shift_sigmas(torch.tensor(1 / _NUM_TRAIN_NOISE_LEVELS, dtype=torch.float64), shift).item()
    return _append_zero(shift_sigmas(torch.linspace(1, min_sigma, num_steps, dtype=torch.float64), shift))


def dpm_schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """Return the noise levels of diffusers' DPMSolverMultistepScheduler for flows: from 0.999 to 0, shifted."""
    max_sigma = 1 - 1 / _NUM_TRAIN_NOISE_LEVELS
    return _append_zero(shift_sigmas(torch.linspace(max_sigma, 0, num_steps + 1, dtype=torch.float64)[:-1], shift))


def unipc_schedule(num_steps: int, shift: float = 1.0) -> Tensor:
    """Return the noise levels of diffusers' UniPCMultistepScheduler for flows: from 1 to slightly above 0.001, shifted,
    followed by 0. The scheduler itself starts at 1 - 1e-6, because its steps take a logarithm."""
    min_sigma = 1 / _NUM_TRAIN_NOISE_LEVELS
    return _append_zero(shift_sigmas(torch.linspace(1, min_sigma, num_steps + 1, dtype=torch.float64)[:-1], shift))


def karras_schedule(num_steps: int, shift: float = 1.0, *, max_sigma: float = 200.0, min_sigma: float = 0.01) -> Tensor:
    """Return the noise levels of diffusers' UniPCMultistepScheduler with the setting `use_karras_sigmas`.

    The EDM noise levels s from `max_sigma` to `min_sigma` by the rule of Karras et al. (arXiv 2206.00364, rho = 7) are
    converted to noise levels s / (1 + s) of a flow; `shift` is ignored. The default range is that of Cosmos-Predict2.5.
    """
    rho = 7.0
    step_fraction_N = torch.linspace(0, 1, num_steps, dtype=torch.float64)
    edm_sigma_N = (max_sigma ** (1 / rho) + step_fraction_N * (min_sigma ** (1 / rho) - max_sigma ** (1 / rho))) ** rho
    return _append_zero(edm_sigma_N / (1 + edm_sigma_N))


SIGMA_SCHEDULES: dict[str, Callable[[int, float], Tensor]] = {
    "flow": flow_schedule,
    "euler": euler_schedule,
    "dpm": dpm_schedule,
    "unipc": unipc_schedule,
    "karras": karras_schedule,
}
"""Schedules of samplers, by name: functions from a number of steps and a timestep shift to the noise levels."""


def _append_zero(sigmas_N: Tensor) -> Tensor:
    return torch.cat([sigmas_N, sigmas_N.new_zeros(1)])
