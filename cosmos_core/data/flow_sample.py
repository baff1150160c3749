"""Training samples of a denoiser: latents at a noise level with their text. The diffusion counterpart of `sample.py`.

Noise and noise level are pure functions of the row and a seed, so neither the division of work over ranks and
micro-batches nor resuming a run changes what is learned.

Shapes: C channels, F frames (videos alone), H height, W width, all of the latent.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cosmos_core.config.schema.diffusers import DiffusersConfig
from cosmos_core.data.media_rows import MediaRow
from cosmos_core.models.flow import compute_loss_weights, sample_noise_levels


@dataclass(frozen=True, slots=True)
class FlowSample:
    """Training sample of a denoiser: latents of one image or clip at a noise level. No tensor has a batch dimension."""

    latents: Tensor
    """Latents (channels, [frames,] height, width): clean, or already at the noise level if `noise` is None."""
    sigma: float
    """Noise level from 0, clean, to 1, pure noise."""
    text: Mapping[str, Tensor]
    """Embedding of the prompt, as the model adapter's `text_embedding` returns it."""
    noise: Tensor | None = None
    """Noise that the adapter's `add_noise` adds to clean latents; None if `latents` are already noisy."""
    num_conditioning_frames: int = 0
    """Number of leading latent frames that are clean conditioning frames of the network and have no loss."""
    weight: float = 1.0
    """Weight of the sample's loss."""
    negative_text: Mapping[str, Tensor] | None = None
    """Embedding of the negative prompt for guidance; None disables guidance."""
    algorithm_values: Mapping[str, Any] = field(default_factory=dict)
    """Additional values of the sample by name, which the training algorithm needs for its loss."""


@dataclass(frozen=True, slots=True)
class NoiseSampler:
    """Sampler of noise, noise level, prompt dropout and conditioning frames for the rows of a diffusion model."""

    config: DiffusersConfig
    null_text: Mapping[str, Tensor]
    """Embedding that replaces the embedding of a dropped prompt."""
    timestep_shift: float
    """Timestep shift: moves noise levels towards pure noise, which larger images need."""
    max_conditioning_frames: int = 0
    """Maximum number of conditioning frames that the model supports, in latent frames; 0: no conditioning."""

    def sample(self, row: MediaRow, seed: int, *, prompt_dropout: float | None = None) -> FlowSample:
        """Return a training sample of a row, whose noise, noise level, prompt dropout and conditioning frames are drawn
        with `seed`. `prompt_dropout` overrides the configured probability of dropping the prompt."""
        generator = torch.Generator().manual_seed(seed)
        config = self.config
        sigma_1 = sample_noise_levels(
            1, config.weighting_scheme, generator, logit_mean=config.logit_mean, logit_std=config.logit_std,
            shift=self.timestep_shift,
        )  # fmt: skip
        dropout_probability = config.prompt_dropout if prompt_dropout is None else prompt_dropout
        embedding = self.null_text if torch.rand((), generator=generator).item() < dropout_probability else row.text
        num_frames = self._sample_num_conditioning_frames(row, generator)
        latents = row.mean
        if row.logvar is not None:
            posterior_std = torch.exp(0.5 * row.logvar)
            latents = row.mean + posterior_std * torch.randn(row.mean.shape, generator=generator, dtype=row.mean.dtype)
        noise = torch.randn(row.mean.shape, generator=generator, dtype=row.mean.dtype)
        weight = compute_loss_weights(sigma_1, config.weighting_scheme).item()
        return FlowSample(latents, sigma_1.item(), embedding, noise, num_conditioning_frames=num_frames, weight=weight)

    def _sample_num_conditioning_frames(self, row: MediaRow, generator: torch.Generator) -> int:
        """Return a random number of clean conditioning frames in the configured range, at most the number of the row's
        latent frames minus 1."""
        num_latent_frames = row.mean.shape[1] if row.mean.ndim == 4 else 1
        min_frames = min(self.config.min_given_frames, num_latent_frames - 1)
        max_conditioning_frames = min(self.config.max_given_frames, self.max_conditioning_frames, num_latent_frames - 1)
        if not self.max_conditioning_frames:
            return 0
        return int(torch.randint(min_frames, max(min_frames, max_conditioning_frames) + 1, (), generator=generator))


def derive_seed(*seed_values: int) -> int:
    """Return a seed that is a digest of numbers, such as the run's seed, the step and the row."""
    return int.from_bytes(hashlib.sha256(repr(seed_values).encode()).digest()[:7])
