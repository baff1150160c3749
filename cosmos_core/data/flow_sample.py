"""What a denoiser is given: latents at a noise level with their text. The diffusion counterpart of `sample.py`.

Drawing noise and noise level of a row is a pure function of the row and a seed, so that no split of the work over ranks
or micro-batches, and no resumption, changes what is learned.

Shapes: C channels, F frames (videos alone), H height, W width, all of the latent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.data.media_rows import MediaRow
from cosmos_core.models.flow import draw_noise_levels, loss_weights


@dataclass(frozen=True, slots=True)
class FlowSample:
    """Latents of one image or clip at a noise level; nothing in it has the dimension of a batch."""

    latents: Tensor
    """(C, [F,] H, W): clean, or, where `noise` is None, already at the noise level."""
    sigma: float
    """Noise level from 0, clean, to 1, pure noise."""
    text: Mapping[str, Tensor]
    """What `text_embedding` gave for the prompt."""
    noise: Tensor | None = None
    """Is put onto clean latents by the adapter's `add_noise`."""
    num_given: int = 0
    """Latent frames that the network is given clean, from the first on, and that are not learned."""
    weight: float = 1.0
    """Weight of its loss."""
    negative: Mapping[str, Tensor] | None = None
    """Text to guide away from; None: no guidance."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What an algorithm wants to find again beside it, such as an advantage."""


@dataclass(frozen=True, slots=True)
class Draws:
    """How noise levels, dropped prompts and given frames are drawn for rows."""

    config: DiffusersConfig
    null_text: Mapping[str, Tensor]
    """Stands for a dropped prompt."""
    shift: float
    """Moves noise levels towards noise, as larger images need."""
    max_given: int = 0
    """Most latent frames that may be given; 0: none ever is."""

    def sample(self, row: MediaRow, seed: int, *, dropout: float | None = None) -> FlowSample:
        """Return a row with noise, noise level, text and given frames drawn by `seed`; `dropout`: the probability of
        a dropped prompt in place of the configured one."""
        generator = torch.Generator().manual_seed(seed)
        config = self.config
        sigma_1 = draw_noise_levels(
            1, config.weighting_scheme, generator, logit_mean=config.logit_mean, logit_std=config.logit_std,
            shift=self.shift,
        )  # fmt: skip
        is_dropped = torch.rand((), generator=generator).item() < (
            config.prompt_dropout if dropout is None else dropout
        )
        given = self._given(row, generator)
        latents = row.mean
        if row.logvar is not None:
            spread = torch.exp(0.5 * row.logvar)
            latents = row.mean + spread * torch.randn(row.mean.shape, generator=generator, dtype=row.mean.dtype)
        noise = torch.randn(row.mean.shape, generator=generator, dtype=row.mean.dtype)
        return FlowSample(
            latents,
            sigma_1.item(),
            self.null_text if is_dropped else row.text,
            noise,
            num_given=given,
            weight=loss_weights(sigma_1, config.weighting_scheme).item(),
        )

    def _given(self, row: MediaRow, generator: torch.Generator) -> int:
        """Return how many latent frames are given, at least one fewer than there are."""
        frames = row.mean.shape[1] if row.mean.ndim == 4 else 1
        low = min(self.config.min_given_frames, frames - 1)
        high = min(self.config.max_given_frames, self.max_given, frames - 1)
        return int(torch.randint(low, max(low, high) + 1, (), generator=generator)) if self.max_given else 0


def seed_of(*numbers: int) -> int:
    """Return a seed that is a digest of numbers, such as those of the run, the step and the row."""
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:7])
