"""Selection of the tokens that the policy loss includes: tokens of the highest entropy (arXiv 2506.01939), and no long
prefix that completions of a group share, because a shared prefix does not explain why their rewards differ.

Shapes: S predicted tokens of a sample.
"""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from cosmos_core.data.sample import Sample


def high_entropy_masks(samples: Sequence[Sample], entropies: Sequence[Tensor], top_fraction: float) -> list[Tensor]:
    """Return for each sample a mask of shape S: True at trained tokens whose entropy is at least the quantile 1 -
    `top_fraction` over all trained tokens of `samples`. The masks therefore do not depend on micro-batches."""
    samples_and_entropies = zip(samples, entropies, strict=True)
    masks = [torch.as_tensor(s.loss_mask[1:], device=entropy_S.device).bool() for s, entropy_S in samples_and_entropies]
    trained_token_entropies = torch.cat([entropy_S[mask_S] for entropy_S, mask_S in zip(entropies, masks, strict=True)])
    if not trained_token_entropies.numel():
        return masks
    min_entropy = float(np.quantile(trained_token_entropies.double().cpu().numpy(), 1 - top_fraction))
    return [mask_S & (entropy_S.double() >= min_entropy) for entropy_S, mask_S in zip(entropies, masks, strict=True)]


def excluded_prefix_lengths(
    completion_ids: Sequence[Sequence[int]], rewards: Sequence[float | None], min_tokens: int
) -> list[int]:
    """Return for each completion of a group how many of its first tokens are excluded from the loss.

    A prefix is excluded if it has at least `min_tokens` tokens, at least two completions share it, no two of these
    completions share a longer prefix, and their valid rewards differ. A completion that consists only of the prefix is
    kept whole. This is the rule of `min_filter_prefix_tokens` in Cosmos-RL.
    """
    completion_indices = range(len(completion_ids))

    def count_shared_tokens(i: int, j: int) -> int:
        pairs = zip(completion_ids[i], completion_ids[j], strict=False)
        return 0 if i == j else sum(1 for _ in takewhile(lambda token_pair: token_pair[0] == token_pair[1], pairs))

    shared_lengths = [[count_shared_tokens(i, j) for j in completion_indices] for i in completion_indices]
    excluded_token_counts = [0] * len(completion_ids)
    for i in completion_indices:
        prefix_length = max(shared_lengths[i], default=0)
        sharing_indices = [j for j in completion_indices if j == i or shared_lengths[i][j] == prefix_length]
        is_longest = all(shared_lengths[a][b] <= prefix_length for a in sharing_indices for b in sharing_indices)
        if prefix_length >= min_tokens and is_longest and len({rewards[j] for j in sharing_indices} - {None}) > 1:
            excluded_token_counts[i] = prefix_length if len(completion_ids[i]) > prefix_length else 0
    return excluded_token_counts
