"""Group sequence policy optimization (arXiv 2507.18071): one ratio for each sequence."""

from __future__ import annotations

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import PolicySettings, Terms, probability_ratio
from cosmos_core.algorithms.objectives.clip import clipped_loss


def gspo(terms: Terms, settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return -min(s A, clip(s) A) for every token, where s is exp of the mean log-ratio over the tokens of the
    sequence.

    This is the paper's loss if it is averaged over each sequence and then over sequences (`loss_type =
    "seq-mean-token-mean"`). Usual epsilons are about 3e-4 and 4e-4. There is no dual clip.
    """
    lengths_B1 = terms.mask_BT.sum(-1, keepdim=True).clamp(min=1)
    mean_B1 = terms.log_ratio_BT.sum(-1, keepdim=True) / lengths_B1
    return clipped_loss(probability_ratio(mean_B1).expand_as(terms.log_ratio_BT), terms, settings)
