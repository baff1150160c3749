"""DPPO (divergence proximal policy optimization, arXiv 2602.04879) with the total variation of binary
distributions: the sampled token, or any other token."""

import math

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, token_metric
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio

SCALES_WITH_ADVANTAGE = True


def dppo_tv(inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the DPPO loss of each token, which is 0 outside the trust region. A token with an advantage above 0 is
    outside if its probability has risen by more than epsilon_high, any other token if it has fallen by more than
    epsilon_low."""
    probability_BT, old_probability_BT = compute_token_probabilities(inputs)
    probability_change_BT = probability_BT - old_probability_BT
    max_probability_decrease, max_probability_increase = divergence_bounds(policy_settings)
    is_rise_allowed_BT = probability_change_BT <= max_probability_increase
    is_fall_allowed_BT = probability_change_BT >= -max_probability_decrease
    is_in_trust_region_BT = torch.where(inputs.advantages_B1 > 0, is_rise_allowed_BT, is_fall_allowed_BT)
    return trust_region_loss(inputs, policy_settings, is_in_trust_region_BT)


def divergence_bounds(settings: PolicySettings) -> tuple[float, float]:
    """Return the bounds of the trust region: the maximum divergence of a token whose probability has fallen, and of one
    whose probability has risen. A negative epsilon gives infinity."""
    max_decrease, max_increase = (math.inf if e < 0 else e for e in (settings.epsilon_low, settings.epsilon_high))
    return max_decrease, max_increase


def trust_region_loss(
    loss_inputs: ObjectiveInputs, policy_settings: PolicySettings, is_in_trust_region_BT: Tensor
) -> tuple[Tensor, Metrics]:
    """Return the loss -sg[min(rho, ratio_cap)] A log pi of tokens inside the trust region, 0 for others, with rho = pi
    / pi_old and advantage A (sg stops the gradient). Also return the fractions of tokens outside as metrics, by the
    sign of the advantage."""
    ratio_BT = probability_ratio(loss_inputs.log_ratio_BT.detach()).clamp(max=policy_settings.ratio_cap)
    loss_BT = -ratio_BT * is_in_trust_region_BT * loss_inputs.advantages_B1 * loss_inputs.logprobs_BT
    return loss_BT, {
        "clip_low": token_metric(~is_in_trust_region_BT & (loss_inputs.advantages_B1 < 0), loss_inputs.mask_BT),
        "clip_high": token_metric(~is_in_trust_region_BT & (loss_inputs.advantages_B1 > 0), loss_inputs.mask_BT),
    }


def compute_token_probabilities(loss_inputs: ObjectiveInputs) -> tuple[Tensor, Tensor]:
    """Return the probability of each token under the current and the old policy, without gradient."""
    logprobs_BT = loss_inputs.logprobs_BT.detach()
    return logprobs_BT.exp(), (logprobs_BT - loss_inputs.log_ratio_BT.detach()).exp()
