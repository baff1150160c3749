"""Divergence proximal policy optimization (arXiv 2602.04879) with the total variation of a binary event: the sampled
token or any other token."""

import math

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, token_metric
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio

SCALES_WITH_ADVANTAGE = True


def dppo_tv(terms: ObjectiveInputs, settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the DPPO loss per token, which is 0 outside the trust region of tokens whose probability changed little.
    For an advantage above 0 the probability must not have risen by more than epsilon_high; otherwise it must not have
    fallen by more than epsilon_low."""
    probability_BT, old_probability_BT = probabilities(terms)
    change_BT = probability_BT - old_probability_BT
    max_decrease, max_increase = largest_divergences(settings)
    is_in_trust_region_BT = torch.where(terms.advantages_B1 > 0, change_BT <= max_increase, change_BT >= -max_decrease)
    return trust_region_loss(terms, settings, is_in_trust_region_BT)


def largest_divergences(settings: PolicySettings) -> tuple[float, float]:
    """Return the bounds of tokens that become less and more likely; a negative epsilon means that there is no bound."""
    low, high = (math.inf if each < 0 else each for each in (settings.epsilon_low, settings.epsilon_high))
    return low, high


def trust_region_loss(
    terms: ObjectiveInputs, settings: PolicySettings, is_in_trust_region_BT: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the loss -sg[min(rho, ratio_cap)] A log pi of tokens inside the trust region, 0 for other tokens, where
    rho = pi / pi_old, A is the advantage, and sg stops the gradient. The metrics are the fractions of tokens outside
    the trust region, by the sign of the advantage."""
    ratio_BT = probability_ratio(terms.log_ratio_BT.detach()).clamp(max=settings.ratio_cap)
    loss_BT = -ratio_BT * is_in_trust_region_BT * terms.advantages_B1 * terms.logprobs_BT
    return loss_BT, {
        "clip_low": token_metric(~is_in_trust_region_BT & (terms.advantages_B1 < 0), terms.mask_BT),
        "clip_high": token_metric(~is_in_trust_region_BT & (terms.advantages_B1 > 0), terms.mask_BT),
    }


def probabilities(terms: ObjectiveInputs) -> tuple[Tensor, Tensor]:
    """Return the probability of each token under the current and the old policy, without gradient."""
    logprobs_BT = terms.logprobs_BT.detach()
    return logprobs_BT.exp(), (logprobs_BT - terms.log_ratio_BT.detach()).exp()
