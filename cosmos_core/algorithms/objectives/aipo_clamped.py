"""AIPO as in Cosmos-RL: the ratio itself is clamped, so that a token above the cap has no gradient."""

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, measure_capping, probability_ratio

SCALES_WITH_ADVANTAGE = True


def aipo_clamped(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the clamped AIPO loss per token, -min(rho, ratio_cap) A, with rho = pi / pi_old and advantage A."""
    ratio_BT = probability_ratio(loss_inputs.log_ratio_BT)
    loss_BT = -ratio_BT.clamp(max=policy_settings.ratio_cap) * loss_inputs.advantages_B1
    return loss_BT, measure_capping(ratio_BT, loss_inputs, policy_settings)
