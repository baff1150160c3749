"""The way from noise to data along a table of noise levels, and which of its steps are stochastic.

Pure functions of a velocity, so that a test can give one; the engine (`flow_sampler`) has the model. The velocity is
asked at exactly the noise levels of the table, which training asks it at too.

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
from cosmos_core.models.flow_steps import Dpm2, Levels, euler, log_prob, transition
from cosmos_core.types import Drawn, FlowSampling, Window

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel

Velocity = Callable[[Tensor, Tensor], Tensor]
"""Takes latents and the noise level of each sample."""

SHARED_NOISE = -1
"""Stands for the number of a completion in the seed of noise that all of a group start from."""
_WINDOWS, _GIVEN = 0x77696E, 0x676976
"""Keep the draws of windows and of given frames apart from others of the same seed."""


@dataclass(frozen=True, slots=True)
class Path:
    """Where the samples of a batch went, on the CPU in float32."""

    latents: Tensor
    """The last: clean ones."""
    steps: tuple[int, ...]
    """The stochastic steps that were kept; what follows has an entry for each."""
    before: list[Tensor]
    after: list[Tensor]
    means: list[Tensor]
    """Empty: they were not asked for."""
    log_probs: list[Tensor]
    """B each."""
    num_given_B: Tensor | None = None
    """Frames that were given; None: none."""

    def drawn(self, b: int, pixels: Tensor, sigmas_N: Tensor, version: int) -> Drawn:
        """Return sample `b` as a completion has it."""

        def of_steps(kept: Sequence[Tensor]) -> Tensor | None:
            return torch.stack([each[b] for each in kept]) if kept else None

        return Drawn(
            pixels,
            self.latents[b].clone(),
            tuple(sigmas_N.tolist()),
            version,
            self.steps,
            of_steps(self.before),
            of_steps(self.after),
            of_steps(self.means),
            tuple(each[b].item() for each in self.log_probs),
            0 if self.num_given_B is None else int(self.num_given_B[b]),
        )


def table_of(model: DiffusionModel, settings: FlowSampling) -> Tensor:
    """Return the noise levels of a sampler: those of the pipeline's scheduler, or of another table with its shift."""
    if not settings.schedule:
        return model.set_scheduler_timestep(settings.num_steps)
    return flow.SCHEDULES[settings.schedule](settings.num_steps, model.shift)


def stochastic_steps(sampling: FlowSampling, seed: int, step: int) -> range:
    """Return the steps that are stochastic in train step `step`: never the last, whose noise would stay."""
    last = sampling.num_steps - 1
    if not sampling.kernel:
        return range(0)
    if sampling.window is None:
        return range(last)
    first = _first(sampling.window, seed, step)
    return range(first, min(first + sampling.window.size, last))


def _first(window: Window, seed: int, step: int) -> int:
    count = max(1, window.end - window.first - window.size + 1)
    if window.moves_every:
        return window.first + step // window.moves_every % count
    return window.first + int(shuffled(count, seed, step, _WINDOWS)[0])


@dataclass(frozen=True, slots=True)
class Given:
    """The first frames of each sample, which are clean from the start and never learned."""

    latents: Tensor
    num_B: Tensor

    def put(self, x: Tensor) -> Tensor:
        """Return latents with these frames in them."""
        return torch.where(self.is_learned(x), x, self.latents.to(x))

    def is_learned(self, x: Tensor) -> Tensor:
        """Return which frames of latents are not given, (B, 1, F, 1, 1)."""
        frames_F = torch.arange(x.shape[2], device=x.device)
        return (frames_F[None] >= self.num_B.to(x.device)[:, None])[:, None, :, None, None]


def num_given(bounds: tuple[int, int], most: int, seed: int, step: int, prompt_id: int) -> int:
    """Return how many frames the rollouts of a prompt are given in a train step, at most `most`."""
    low, high = (min(bound, most) for bound in bounds)
    return low + int(shuffled(high - low + 1, seed, step, prompt_id, _GIVEN)[0])


def denoise(  # noqa: PLR0913 - what a way from noise to data is made of
    velocity: Velocity,
    noise: Tensor,
    sigmas_N: Tensor,
    sampling: FlowSampling,
    generators: Sequence[torch.Generator] = (),
    stochastic: range = range(0),
    given: Given | None = None,
) -> Path:
    """Return the way from noise to clean latents.

    Args:
        velocity: of the model, at latents in float32.
        noise: the latents at the first noise level, for unit variance.
        sigmas_N: the table, N + 1 levels.
        sampling: solver, kernel, and which steps to keep.
        generators: one for each sample, for the noise of stochastic steps.
        stochastic: these.
        given: frames that are given; None: none.
    """
    put = given.put if given else lambda x: x
    x, solver = put(noise.float()), Dpm2(sigmas_N)
    found = Path(x, tuple(i for i in stochastic if i in sampling.trained_on), [], [], [], [])
    for i in range(len(sigmas_N) - 1):
        v = velocity(x, sigmas_N[i].expand(len(x))).float()
        if i not in stochastic:
            x = solver.step(x, v, i) if sampling.solver == "dpm2" else euler(x, v, sigmas_N[i], sigmas_N[i + 1])
            continue
        solver.restart()
        levels = Levels(sigmas_N[i], sigmas_N[i + 1], sigmas_N[1])
        step = transition(sampling.kernel, x, v, levels, sampling.eta)
        drawn = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators])
        later = put(step.mean + step.std.to(x) * drawn.to(x))
        if i in found.steps:
            found.before.append(x.cpu())
            found.after.append(later.cpu())
            found.log_probs.append(log_prob(step, later, given.is_learned(x) if given else None).cpu())
            if sampling.keeps_means:
                found.means.append(step.mean.cpu())
        x = later
    kept = (found.before, found.after, found.means, found.log_probs)
    return Path(put(x).cpu(), found.steps, *kept, given.num_B if given else None)


def guided(velocity: Velocity, unconditional: Velocity, rule: Callable[..., Any], scale: float) -> Velocity:
    """Return the velocity of classifier-free guidance; up to a scale of 1 that of the prompt alone."""
    if scale <= 1:
        return velocity
    return lambda x, sigma_B: rule(velocity(x, sigma_B), unconditional(x, sigma_B), scale)
