"""Sampling path from noise to data along a table of noise levels, and the choice of its stochastic steps.

`denoise` takes a function for the velocity, so that tests need no model; `flow_sampler` passes the model's velocity.
The velocity is evaluated at exactly the noise levels of the table, as in training.

Shapes: B samples, N steps, dots for the dimensions of a latent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_core.data.order import shuffled_indices
from cosmos_core.models import flow
from cosmos_core.models.flow_steps import DpmSolver2M, NoiseLevels, compute_step_distribution, euler_step, log_prob
from cosmos_core.types import DiffusionSample, FlowSampling

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel

VelocityFn = Callable[[Tensor, Tensor], Tensor]
"""Function `(latents, sigma_B)` that returns the flow velocity at the noise level of each sample."""

SHARED_NOISE_INDEX = -1
"""Value that replaces the completion number in the seed of the initial noise that all completions of a group share."""
_STEP_WINDOW_SEED_OFFSET, _CONDITIONING_SEED = 0x77696E, 0x676976
"""Constants in the seeds of two random choices: that of the window of stochastic sampling steps, and that of the number
of conditioning frames."""


@dataclass(frozen=True, slots=True)
class SamplingPath:
    """Latents and log-probabilities of a batch of samples along the path from noise to data, on the CPU in float32."""

    latents: Tensor
    """Clean latents at the end of the sampling path."""
    steps: tuple[int, ...]
    """Numbers of the stochastic sampling steps that are recorded; each list of tensors in this class has one entry per
    recorded step."""
    latents_before: list[Tensor]
    latents_after: list[Tensor]
    transition_means: list[Tensor]
    """Means of the transitions of recorded steps; empty if `keeps_transition_means` is False."""
    log_probs: list[Tensor]
    """Log-probabilities of the transitions: a tensor of shape B for each recorded step."""
    num_conditioning_B: Tensor | None = None
    """Number of conditioning frames of each sample, shape B; None: no conditioning frames."""

    def to_diffusion_sample(self, sample_index: int, pixels: Tensor, sigmas_N: Tensor, version: int) -> DiffusionSample:
        """Return sample `sample_index` of the batch as a `DiffusionSample`; `version` is that of the weights that
        sampled it."""
        logprobs = tuple(log_prob[sample_index].item() for log_prob in self.log_probs)
        num_conditioning_frames = 0 if self.num_conditioning_B is None else int(self.num_conditioning_B[sample_index])
        latents_before, latents_after, transition_means = (
            torch.stack([tensor[sample_index] for tensor in step_tensors]) if step_tensors else None
            for step_tensors in (self.latents_before, self.latents_after, self.transition_means)
        )
        final_latents, sigmas = self.latents[sample_index].clone(), tuple(sigmas_N.tolist())
        transition_fields = (self.steps, latents_before, latents_after, transition_means, logprobs)
        return DiffusionSample(pixels, final_latents, sigmas, version, *transition_fields, num_conditioning_frames)


def get_noise_levels(model: "DiffusionModel", sampling: FlowSampling) -> Tensor:
    """Return the noise levels of `sampling.schedule` or, if it is empty, of the scheduler of the diffusion pipeline."""
    if not sampling.schedule:
        return model.set_scheduler_timestep(sampling.num_steps)
    return flow.SIGMA_SCHEDULES[sampling.schedule](sampling.num_steps, model.timestep_shift)


def choose_stochastic_steps(sampling: FlowSampling, seed: int, step: int) -> range:
    """Return the sampling steps that are stochastic in train step `step`. The last sampling step is never stochastic,
    because its noise would remain in the sample."""
    last_sampling_step, step_window = sampling.num_steps - 1, sampling.window
    if not sampling.stochastic_solver:
        return range(0)
    if step_window is None:
        return range(last_sampling_step)
    num_window_positions = max(1, step_window.end_step - step_window.first_step - step_window.size + 1)
    if step_window.steps_per_move:
        window_offset = step // step_window.steps_per_move % num_window_positions
    else:
        window_offset = int(shuffled_indices(num_window_positions, seed, step, _STEP_WINDOW_SEED_OFFSET)[0])
    first_step = step_window.first_step + window_offset
    return range(first_step, min(first_step + step_window.size, last_sampling_step))


@dataclass(frozen=True, slots=True)
class ConditioningFrames:
    """Conditioning frames: the first frames of each video, which are clean from the start and not trained on."""

    latents: Tensor
    num_frames_B: Tensor

    def insert_frames(self, x: Tensor) -> Tensor:
        """Return the latents `x` with the conditioning frames inserted."""
        return torch.where(flow.trained_frames_mask(x, self.num_frames_B), x, self.latents.to(x))


def draw_num_conditioning_frames(
    frame_count_range: tuple[int, int], max_frames: int, seed: int, step: int, prompt_id: int
) -> int:
    """Draw the number of conditioning frames for rollouts of a prompt in a train step: between the bounds
    `frame_count_range`, which are reduced to at most `max_frames`."""
    min_frame_count, max_frame_count = (min(count, max_frames) for count in frame_count_range)
    return min_frame_count + int(
        shuffled_indices(max_frame_count - min_frame_count + 1, seed, step, prompt_id, _CONDITIONING_SEED)[0]
    )


def denoise(  # noqa: PLR0913 - a sampler has this many parameters
    velocity: VelocityFn,
    noise: Tensor,
    sigmas_N: Tensor,
    sampling: FlowSampling,
    generators: Sequence[torch.Generator] = (),
    stochastic_step_range: range = range(0),
    conditioning_frames: ConditioningFrames | None = None,
) -> SamplingPath:
    """Return the sampling path from noise to clean latents.

    `velocity` returns the model's velocity for float32 latents and their noise levels; `noise`, of unit variance, are
    the latents at the first of the N + 1 noise levels `sigmas_N`. `sampling` has the solvers, and the steps to
    record. The stochastic steps `stochastic_step_range` draw noise from `generators`, one per sample. The clean first
    frames `conditioning_frames` are inserted at each step; None: no conditioning frames.
    """
    insert_conditioning_frames = conditioning_frames.insert_frames if conditioning_frames else lambda latents: latents
    x, solver = insert_conditioning_frames(noise.float()), DpmSolver2M(sigmas_N)
    recorded_steps = tuple(i for i in stochastic_step_range if i in sampling.trained_steps)
    sampling_path = SamplingPath(x, recorded_steps, [], [], [], [])
    for i in range(len(sigmas_N) - 1):
        v = velocity(x, sigmas_N[i].expand(len(x))).float()
        if i not in stochastic_step_range:
            x = solver.step(x, v, i) if sampling.solver == "dpm2" else euler_step(x, v, sigmas_N[i], sigmas_N[i + 1])
            continue
        solver.reset()
        noise_levels = NoiseLevels(sigmas_N[i], sigmas_N[i + 1], sigmas_N[1])
        transition = compute_step_distribution(sampling.stochastic_solver, x, v, noise_levels, sampling.noise_scale)
        step_noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators])
        next_latents = insert_conditioning_frames(transition.mean + transition.std.to(x) * step_noise.to(x))
        if i in sampling_path.steps:
            sampling_path.latents_before.append(x.cpu())
            sampling_path.latents_after.append(next_latents.cpu())
            frame_mask = flow.trained_frames_mask(x, conditioning_frames.num_frames_B) if conditioning_frames else None
            sampling_path.log_probs.append(log_prob(transition, next_latents, frame_mask).cpu())
            if sampling.keeps_transition_means:
                sampling_path.transition_means.append(transition.mean.cpu())
        x = next_latents
    num_conditioning_B = conditioning_frames.num_frames_B if conditioning_frames else None
    return replace(sampling_path, latents=insert_conditioning_frames(x).cpu(), num_conditioning_B=num_conditioning_B)
