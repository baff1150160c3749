"""Returns of tokens if the KL penalty is part of the reward, as in REINFORCE++ (arXiv 2501.03262).

Shapes: S predicted tokens of a sample.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_core.algorithms.advantages import whiten
from cosmos_core.algorithms.aggregate import apply_mask
from cosmos_core.data.sample import Sample


def whitened_returns(
    samples: Sequence[Sample], old_logprobs: Sequence[Tensor], ref_logprobs: Sequence[Tensor], kl_beta: float
) -> list[Tensor]:
    """Return the advantage of each token, S per sample, in float64; 0 for tokens that are not trained.

    The reward of a trained token is -`kl_beta` * (log pi_old - log pi_reference), plus the completion's reward for the
    last token. The return of a token is the sum of rewards from this token to the end. The advantages are the returns,
    normalized by `whiten` over the trained tokens of all `samples`.
    """
    masks = [torch.as_tensor(sample.loss_mask[1:]).bool() for sample in samples]
    returns = []
    for sample, mask_S, old_S, ref_S in zip(samples, masks, old_logprobs, ref_logprobs, strict=True):
        kl_S = apply_mask((old_S - ref_S).cpu().double(), mask_S)
        returns.append(sample.reward - kl_beta * kl_S.flip(0).cumsum(0).flip(0))
    if not returns:
        return []
    flat, counts = torch.cat(returns), torch.cat(masks)
    advantages = torch.from_numpy(whiten(flat.numpy(), counts.numpy().astype(float)))
    return list(apply_mask(advantages, counts).split([len(row_S) for row_S in returns]))
