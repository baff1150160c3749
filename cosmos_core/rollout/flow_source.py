"""What engines of diffusion models draw with: the family, the trainer's denoiser, and its named weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cosmos_core.parallel.mesh import Mesh


class FlowModel(Protocol):
    """What sampling asks of a family of diffusion models; `models.diffusion.DiffusionModel` has it all."""

    is_video: ClassVar[bool]
    """Whether latents have frames."""
    max_given: ClassVar[int]
    """Most latent frames that the network can be given clean."""

    @property
    def shift(self) -> float:
        """Return how far the scheduler shifts noise levels towards noise."""
        ...

    def set_scheduler_timestep(self, num_steps: int) -> Tensor:
        """Return the table of noise levels of the pipeline's scheduler."""
        ...

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the latents of one image or clip."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Return latents as pixels (B, 3, [F,] H, W), about in [-1, 1]."""
        ...

    def guided(self, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
        """Return the velocity of classifier-free guidance."""
        ...

    def pipeline_with_logprob(self, sample: Callable[..., Any], predict: Callable[..., Tensor], *args: Any) -> Any:
        """Run `sample(predict, ...)`, in the way of the family."""
        ...


@dataclass(frozen=True)
class FlowSource:
    """What an engine draws with."""

    model: FlowModel
    predict: Callable[..., Tensor]
    """The velocity of the trainer's denoiser: `(latents, sigma_B, text, num_given_B)`; it is 0 in given frames."""
    weights: Callable[[str], AbstractContextManager[None]]
    """Has the denoiser compute with named weights inside a block, without dropout and gradients."""
    device: torch.device
    mesh: Mesh | None = None
    null_text: dict[str, Tensor] | None = None
    """The embedding of the empty prompt; None: guidance cannot be had."""
