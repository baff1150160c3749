"""Inputs of the engines of diffusion models: the model family, the trainer's denoiser, and its named weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cosmos_core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from cosmos_core.models.diffusion import DiffusionModel


@dataclass(frozen=True)
class FlowSource:
    """Denoiser and named weights that the engine of a diffusion model samples with."""

    model: DiffusionModel
    predict: Callable[..., Tensor]
    """Function `(latents, sigma_B, text, num_conditioning_B)` that returns the velocity of the trainer's denoiser,
    which is 0 in conditioning frames."""
    weights: Callable[[str], AbstractContextManager[None]]
    """Function that returns a context manager in which the denoiser uses named weights, no dropout and no gradients."""
    device: torch.device
    mesh: Mesh | None = None
    null_text: dict[str, Tensor] | None = None
    """Embedding of the empty prompt, used for classifier-free guidance; None: guidance is unavailable."""
