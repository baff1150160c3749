"""Divergence proximal policy optimisation (arXiv 2602.04879), with the total variation of two outcomes: the sampled
token or any other."""

from __future__ import annotations

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, token_metric
from cosmos_core.algorithms.objectives.base import PolicySettings, Terms, ratio_of


def dppo_tv(terms: Terms, settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return `within_region` for tokens whose probability has not risen by more than epsilon_high where A > 0, or
    fallen by more than epsilon_low otherwise."""
    probability_BT, old_BT = probabilities(terms)
    moved_BT, is_positive_B1 = probability_BT - old_BT, terms.advantages_B1 > 0
    is_inside_BT = torch.where(is_positive_B1, moved_BT <= settings.epsilon_high, moved_BT >= -settings.epsilon_low)
    return within_region(terms, settings, is_inside_BT)


def within_region(terms: Terms, settings: PolicySettings, is_inside_BT: Tensor) -> tuple[Tensor, Metrics]:
    """Return -sg[min(rho, ratio_cap)] A log pi of tokens inside the trust region, 0 of others, and the shares of
    others."""
    ratio_BT = ratio_of(terms.log_ratio_BT.detach()).clamp(max=settings.ratio_cap)
    loss_BT = -ratio_BT * is_inside_BT * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT, {
        "clip_low": token_metric(~is_inside_BT & (terms.advantages_B1 < 0), terms.mask_BT),
        "clip_high": token_metric(~is_inside_BT & (terms.advantages_B1 > 0), terms.mask_BT),
    }


def probabilities(terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the probability of each token now and under the old policy, without gradient."""
    logprobs_BT = terms.logprobs_BT.detach()
    return logprobs_BT.exp(), (logprobs_BT - terms.log_ratio_BT.detach()).exp()
