"""Returns of tokens whose rewards have the KL in them, as REINFORCE++ learns from them (arXiv 2501.03262).

Shapes: S predicted tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_core.algorithms.advantages import STD_EPSILON
from cosmos_core.algorithms.aggregate import masked
from cosmos_core.data.sample import Sample


def whitened_returns(
    samples: Sequence[Sample], old_logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], kl_beta: float
) -> list[Tensor]:
    """Return the advantage of each token, S per sample, in float64; those that are not learned have 0.

    Each learned token costs `kl_beta` * (log pi_old - log pi_reference), and the last has the reward of its completion
    too; the return of a token is the sum from it to the end. The advantage is (return - mean) / (population std + 1e-6)
    over the learned tokens of all `samples`, and exactly 0 where all returns are equal.
    """
    masks = [torch.as_tensor(sample.loss_mask[1:]).bool() for sample in samples]
    returns = []
    for sample, mask_S, old_S, ref_S in zip(samples, masks, old_logprobs, ref_logprobs, strict=True):
        kl_S = masked((old_S - ref_S).cpu().double(), mask_S)
        returns.append(sample.reward - kl_beta * kl_S.flip(0).cumsum(0).flip(0))
    learned = torch.cat([row_S[mask_S] for row_S, mask_S in zip(returns, masks, strict=True)])
    if not learned.numel() or learned.max() == learned.min():
        return [torch.zeros_like(row_S) for row_S in returns]
    mean, std = learned.mean(), learned.std(correction=0) + STD_EPSILON
    return [masked((row_S - mean) / std, mask_S) for row_S, mask_S in zip(returns, masks, strict=True)]
