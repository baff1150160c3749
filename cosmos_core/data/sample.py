"""One sequence of tokens to learn from: what data sets and scored rollouts become before a model sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    """float32, what the engine gave each token with mask 1, in order, NaN where nobody sampled it; None: nobody sampled
    any."""
    reference_logprob: float = 0.0
    """Sum over the learned tokens under the reference policy; 0: there is none."""
    images: tuple[ImageRef, ...] = ()
    """What the tokens of images stand for, in their order."""
    micro_batch: int | None = None
    """Samples with the same number form a micro-batch; None: `mini_batch` samples of like length do."""
    top_ids: np.ndarray | None = None
    """int64, of each token with mask 1, in order, the ids whose log-probabilities are wanted in its place; None: those
    of the likeliest, if any."""

    @property
    def num_learned(self) -> int:
        """Return the number of tokens with mask 1 that have a token before them."""
        return int(self.loss_mask[1:].sum())


def within_budget(samples: Sequence[Sample], most_tokens: int | None) -> list[Sample]:
    """Put samples of like length, and of as many images, into micro-batches of so many tokens, padding included; None:
    leave them."""
    found = list(samples)
    if most_tokens is None:
        return found
    number = width = count = num_images = 0
    for i in sorted(range(len(samples)), key=lambda i: (len(samples[i].images), -len(samples[i].input_ids))):
        if (count + 1) * width > most_tokens or not count or len(samples[i].images) != num_images:
            number, width, count = number + 1, len(samples[i].input_ids), 0
            num_images = len(samples[i].images)
        count += 1
        found[i] = replace(samples[i], micro_batch=number)
    return found
