"""One sequence of tokens to learn from: what data sets and scored rollouts become before a model sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cosmos_core.types import ImageRef


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to learn from."""

    input_ids: np.ndarray
    """int64, the whole sequence."""
    loss_mask: np.ndarray
    """uint8 of the same length: 1 where the token is learned."""
    advantage: float = 0.0
    reward: float = 0.0
    rollout_logprobs: np.ndarray | None = None
    """float32, what the engine gave each token with mask 1, in order; None: nobody sampled them."""
    reference_logprob: float = 0.0
    """Sum over the learned tokens under the reference policy; 0: there is none."""
    images: tuple[ImageRef, ...] = ()
    """What the tokens of images stand for, in their order."""
    micro_batch: int | None = None
    """Samples with the same number form a micro-batch; None: `mini_batch` samples of like length do."""

    @property
    def num_learned(self) -> int:
        """Return the number of tokens with mask 1 that have a token before them."""
        return int(self.loss_mask[1:].sum())
