"""Soft adaptive policy optimization (arXiv 2511.20347): a smooth gate replaces the clipping of the ratio."""

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio

SCALES_WITH_ADVANTAGE = True


def sapo(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the SAPO loss per token, -(4 / t) sigmoid(t (rho - 1)) A, with rho = pi / pi_old and advantage A. The
    temperature t is `sapo_temperature_pos` if A > 0, else `sapo_temperature_neg`. The loss of the paper is the mean
    over the tokens of each sequence and then over sequences (`loss_type = "seq-mean-token-mean"`)."""
    temperature_pos, temperature_neg = policy_settings.sapo_temperature_pos, policy_settings.sapo_temperature_neg
    has_positive_advantage_B1 = (loss_inputs.advantages_B1 > 0).to(loss_inputs.advantages_B1)
    temperature_B1 = temperature_neg + (temperature_pos - temperature_neg) * has_positive_advantage_B1
    gate_BT = torch.sigmoid(temperature_B1 * (probability_ratio(loss_inputs.log_ratio_BT) - 1)) * 4 / temperature_B1
    return -gate_BT * loss_inputs.advantages_B1, {}
