"""Clipped importance sampling policy optimisation (MiniMax-M1, arXiv 2506.13585)."""

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, measure_capping, probability_ratio

SCALES_WITH_ADVANTAGE = True


def cispo(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the CISPO loss per token, -sg[min(rho, ratio_cap)] A log pi, with rho = pi / pi_old and advantage A. sg
    stops the gradient of the weight, so every token keeps the gradient of log pi. Weights have no lower bound."""
    ratio_BT = probability_ratio(loss_inputs.log_ratio_BT.detach())
    loss_BT = -ratio_BT.clamp(max=policy_settings.ratio_cap) * loss_inputs.advantages_B1 * loss_inputs.logprobs_BT
    return loss_BT, measure_capping(ratio_BT, loss_inputs, policy_settings)
