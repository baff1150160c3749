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
    """What an engine of a diffusion model samples with."""

    model: DiffusionModel
    predict: Callable[..., Tensor]
    """Returns the velocity of the trainer's denoiser, `(latents, sigma_B, text, num_given_B)`; 0 in conditioning
    frames."""
    weights: Callable[[str], AbstractContextManager[None]]
    """Returns a context manager in which the denoiser computes with named weights, without dropout and gradients."""
    device: torch.device
    mesh: Mesh | None = None
    null_text: dict[str, Tensor] | None = None
    """The embedding of the empty prompt; None: guidance is unavailable."""
