"""What the loop and an algorithm say to each other; the loop never asks which algorithm is running.

A feed turns positions into `Sample`s, an algorithm turns samples into `Update`s (one optimizer step each), and the
rank runs an update's micro-batches through the model and its `loss`.

Shapes: B samples, T tokens, S = T - 1 predicted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.data.images import ImageRef


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to learn from."""

    input_ids: np.ndarray
    """int64, the whole sequence."""
    loss_mask: np.ndarray
    """uint8 of the same length: 1 where a token is learned."""
    advantage: float = 0.0
    reward: float = 0.0
    rollout_logprobs: np.ndarray | None = None
    """float32, what the engine gave each token with mask 1, in order; None: nobody sampled them."""
    reference_logprob: float = 0.0
    """Sum over the learned tokens under the reference; 0: there is none."""
    images: tuple[ImageRef, ...] = ()
    """What the tokens of images stand for, in their order."""
    micro_batch: int | None = None
    """Samples with the same number go through the model together; None: `mini_batch` of like length do."""

    @property
    def num_learned(self) -> int:
        """Tokens with mask 1 that have a token before them."""
        return int(self.loss_mask[1:].sum())


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some samples of an update and what the model says about them."""

    samples: Sequence[Sample]
    logprobs_BS: Tensor
    """Of each token after the first, with gradient."""
    mask_BS: Tensor
    entropy_BS: Tensor | None


@dataclass(frozen=True, slots=True)
class Loss:
    """What a micro-batch adds to its update."""

    value: Tensor
    """Already divided by the update's denominator: micro-batches are summed, never averaged."""
    metrics: Metrics
    values: dict[str, Tensor] = field(default_factory=dict)
    """Per-token figures whose quantiles are reported: name to a flat tensor."""


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step."""

    samples: Sequence[Sample]
    loss: Callable[[MicroBatch], Loss]
    """Knows its denominator, which was fixed over all samples before the first backward."""
    expected: float | None = None
    """The derivative of the loss by every learned token's log-probability, where it is one known number: it saves a
    second run of the head."""


LogProbs = Callable[[Sequence[Sample]], list[Tensor]]
"""Log-probabilities of tokens 1.. of each sample under some fixed weights, without gradient; one 1-D tensor a
sample."""


class Algorithm(Protocol):
    """A credit rule and a loss."""

    temperature: float
    """Divides the logits."""
    with_entropy: bool
    """Whether `MicroBatch.entropy_BS` is wanted."""

    def updates(self, samples: Sequence[Sample], logprobs: LogProbs) -> Iterator[Update]:
        """The optimizer steps of one train step, in order. `logprobs` uses the weights of the moment of the call."""
        ...


def aligned(rows: Sequence[Tensor], like_BS: Tensor) -> Tensor:
    """1-D tensors of different lengths as one padded rectangle of the shape, dtype and device of `like_BS`."""
    out_BS = like_BS.new_zeros(like_BS.shape)
    for b, row in enumerate(rows):
        out_BS[b, : len(row)] = row
    return out_BS
