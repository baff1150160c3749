"""Mask of the tokens with the highest entropy, for a loss over these tokens only (arXiv 2506.01939).

Shapes: S predicted tokens of a sample.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cosmos_core.data.sample import Sample


def high_entropy_masks(samples: Sequence[Sample], entropies: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Return a mask of shape S per sample: True at trained tokens whose entropy reaches the quantile 1 - `fraction`.

    The quantile is computed over all trained tokens of `samples`, so that masks do not depend on micro-batches.
    """
    masks = [torch.as_tensor(sample.loss_mask[1:], device=row_S.device).bool()
             for sample, row_S in zip(samples, entropies, strict=True)]  # fmt: skip
    trained_entropies = torch.cat([row_S[mask_S] for row_S, mask_S in zip(entropies, masks, strict=True)])
    if not trained_entropies.numel():
        return masks
    threshold = float(np.quantile(trained_entropies.double().cpu().numpy(), 1 - fraction))
    return [mask_S & (row_S.double() >= threshold) for row_S, mask_S in zip(entropies, masks, strict=True)]
