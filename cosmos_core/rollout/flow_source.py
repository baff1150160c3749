"""What engines of diffusion models draw with: the family, the trainer's denoiser, and its named weights."""

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
    """What an engine draws with."""

    model: DiffusionModel
    predict: Callable[..., Tensor]
    """The velocity of the trainer's denoiser: `(latents, sigma_B, text, num_given_B)`; it is 0 in given frames."""
    weights: Callable[[str], AbstractContextManager[None]]
    """Has the denoiser compute with named weights inside a block, without dropout and gradients."""
    device: torch.device
    mesh: Mesh | None = None
    null_text: dict[str, Tensor] | None = None
    """The embedding of the empty prompt; None: guidance cannot be had."""
