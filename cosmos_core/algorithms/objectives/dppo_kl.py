"""DPPO (divergence proximal policy optimization, arXiv 2602.04879) with the KL divergence of binary
distributions: the sampled token, or any other token."""

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings
from cosmos_core.algorithms.objectives.dppo_tv import compute_token_probabilities, divergence_bounds, trust_region_loss

_PROB_EPSILON = 1e-8
"""Value added to the total probability of all tokens other than the sampled one before the logarithm, as in verl."""

SCALES_WITH_ADVANTAGE = True


def dppo_kl(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the DPPO loss of each token, which is 0 outside the trust region. A token is outside if KL(old policy ||
    policy) exceeds a bound: epsilon_high if the advantage is above 0 and the token's probability has risen, epsilon_low
    if the advantage is not above 0 and the probability has fallen. All other tokens are inside."""
    probability_BT, old_probability_BT = compute_token_probabilities(loss_inputs)
    others_log_ratio_BT = torch.log((1 - old_probability_BT + _PROB_EPSILON) / (1 - probability_BT + _PROB_EPSILON))
    kl_BT = -old_probability_BT * loss_inputs.log_ratio_BT.detach() + (1 - old_probability_BT) * others_log_ratio_BT
    max_kl_if_less_probable, max_kl_if_more_probable = divergence_bounds(policy_settings)
    is_in_trust_region_BT = torch.where(
        loss_inputs.advantages_B1 > 0,
        (kl_BT <= max_kl_if_more_probable) | (probability_BT <= old_probability_BT),
        (kl_BT <= max_kl_if_less_probable) | (probability_BT >= old_probability_BT),
    )
    return trust_region_loss(loss_inputs, policy_settings, is_in_trust_region_BT)
