"""Sampling path from noise to data along a table of noise levels, and the choice of its stochastic steps.

The velocity is a parameter, so that tests need no model; `flow_sampler` supplies that of the model. The velocity is
evaluated at exactly the noise levels of the table, as in training.

Shapes: B samples, N steps, dots for the dimensions of a latent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_core.data.order import shuffled
from cosmos_core.models import flow
from cosmos_core.models.flow_steps import DpmSolver2M, NoiseLevels, compute_transition, euler_step, log_prob
from cosmos_core.types import DiffusionSample, FlowSampling

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Function of latents and of the noise level of each sample that returns the flow velocity."""

SHARED_NOISE = -1
"""Value that replaces the completion number in the seed of the initial noise that all completions of a group share."""
_WINDOWS, _CONDITIONING_SEED = 0x77696E, 0x676976
"""Seed offsets of the random numbers that choose step windows and numbers of conditioning frames."""


@dataclass(frozen=True, slots=True)
class Path:
    """Latents and log-probabilities along the sampling path of a batch, on the CPU in float32."""

    latents: Tensor
    """Clean latents at the end of the sampling path."""
    steps: tuple[int, ...]
    """Numbers of the recorded stochastic steps; each list of tensors of the path has one entry per recorded step."""
    latents_before: list[Tensor]
    latents_after: list[Tensor]
    transition_means: list[Tensor]
    """Means of the transitions of recorded steps; empty if means were not requested."""
    log_probs: list[Tensor]
    """Log-probability of each transition, shape B."""
    num_conditioning_B: Tensor | None = None
    """Number of conditioning frames of each sample, shape B; None: no conditioning frames."""

    def to_sample(self, b: int, pixels: Tensor, sigmas_N: Tensor, version: int) -> DiffusionSample:
        """Return sample `b` of the batch as the `DiffusionSample` of a completion."""

        def stack_steps(tensors: Sequence[Tensor]) -> Tensor | None:
            return torch.stack([each[b] for each in tensors]) if tensors else None

        before, after, means = map(stack_steps, (self.latents_before, self.latents_after, self.transition_means))
        sigmas, log_probs = tuple(sigmas_N.tolist()), tuple(each[b].item() for each in self.log_probs)
        num_frames = 0 if self.num_conditioning_B is None else int(self.num_conditioning_B[b])
        latents = self.latents[b].clone()
        return DiffusionSample(
            pixels, latents, sigmas, version, self.steps, before, after, means, log_probs, num_frames
        )


def table_of(model: DiffusionModel, settings: FlowSampling) -> Tensor:
    """Return the noise levels of a sampler: from the pipeline's scheduler, or from a named schedule with the model's
    shift."""
    if not settings.schedule:
        return model.set_scheduler_timestep(settings.num_steps)
    return flow.SCHEDULES[settings.schedule](settings.num_steps, model.timestep_shift)


def stochastic_steps(sampling: FlowSampling, seed: int, step: int) -> range:
    """Return the stochastic sampling steps of train step `step`, without the last sampling step, whose noise would
    remain in the sample."""
    last, window = sampling.num_steps - 1, sampling.window
    if not sampling.kernel:
        return range(0)
    if window is None:
        return range(last)
    count = max(1, window.end - window.first - window.size + 1)
    if window.steps_per_move:
        offset = step // window.steps_per_move % count
    else:
        offset = int(shuffled(count, seed, step, _WINDOWS)[0])
    first = window.first + offset
    return range(first, min(first + window.size, last))


@dataclass(frozen=True, slots=True)
class ConditioningFrames:
    """Conditioning frames: the first frames of each video, which are clean from the start and not trained on."""

    latents: Tensor
    num_B: Tensor

    def insert_frames(self, x: Tensor) -> Tensor:
        """Return the latents `x` with the conditioning frames inserted."""
        return torch.where(self.trained_frames_mask(x), x, self.latents.to(x))

    def trained_frames_mask(self, x: Tensor) -> Tensor:
        """Return a mask of the frames that are not conditioning frames, (B, 1, F, 1, 1)."""
        frames_F = torch.arange(x.shape[2], device=x.device)
        return (frames_F[None] >= self.num_B.to(x.device)[:, None])[:, None, :, None, None]


def num_conditioning_frames(bounds: tuple[int, int], max_frames: int, seed: int, step: int, prompt_id: int) -> int:
    """Return the number of conditioning frames for rollouts of a prompt in a train step, at most `max_frames`."""
    low, high = (min(frame_bound, max_frames) for frame_bound in bounds)
    return low + int(shuffled(high - low + 1, seed, step, prompt_id, _CONDITIONING_SEED)[0])


def denoise(  # noqa: PLR0913 - a sampler has this many parameters
    velocity: Velocity,
    noise: Tensor,
    sigmas_N: Tensor,
    sampling: FlowSampling,
    generators: Sequence[torch.Generator] = (),
    stochastic: range = range(0),
    conditioning: ConditioningFrames | None = None,
) -> Path:
    """Return the sampling path from noise to clean latents.

    Args:
        velocity: function that returns the model's velocity for float32 latents and their noise levels.
        noise: noise of unit variance, the latents at the first noise level.
        sigmas_N: table of N + 1 noise levels.
        sampling: sampling settings: solver, kernel, and the steps to record.
        generators: one generator per sample, for the noise of stochastic steps.
        stochastic: numbers of the stochastic steps.
        conditioning: clean first frames that are inserted at each step; None: no conditioning frames.
    """
    insert_conditioning = conditioning.insert_frames if conditioning else lambda x: x
    x, solver = insert_conditioning(noise.float()), DpmSolver2M(sigmas_N)
    path = Path(x, tuple(i for i in stochastic if i in sampling.trained_on), [], [], [], [])
    for i in range(len(sigmas_N) - 1):
        v = velocity(x, sigmas_N[i].expand(len(x))).float()
        if i not in stochastic:
            x = solver.step(x, v, i) if sampling.solver == "dpm2" else euler_step(x, v, sigmas_N[i], sigmas_N[i + 1])
            continue
        solver.restart()
        levels = NoiseLevels(sigmas_N[i], sigmas_N[i + 1], sigmas_N[1])
        step = compute_transition(sampling.kernel, x, v, levels, sampling.eta)
        step_noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators])
        next_x = insert_conditioning(step.mean + step.std.to(x) * step_noise.to(x))
        if i in path.steps:
            path.latents_before.append(x.cpu())
            path.latents_after.append(next_x.cpu())
            mask = conditioning.trained_frames_mask(x) if conditioning else None
            path.log_probs.append(log_prob(step, next_x, mask).cpu())
            if sampling.keeps_means:
                path.transition_means.append(step.mean.cpu())
        x = next_x
    kept_steps = (path.latents_before, path.latents_after, path.transition_means, path.log_probs)
    return Path(insert_conditioning(x).cpu(), path.steps, *kept_steps, conditioning.num_B if conditioning else None)


def apply_guidance(velocity: Velocity, unconditional: Velocity, rule: Callable[..., Any], scale: float) -> Velocity:
    """Return the velocity of classifier-free guidance; for a scale of at most 1, the velocity of the prompt alone."""
    if scale <= 1:
        return velocity
    return lambda x, sigma_B: rule(velocity(x, sigma_B), unconditional(x, sigma_B), scale)
