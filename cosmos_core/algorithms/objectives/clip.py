"""Clipped objective of PPO (arXiv 1707.06347), as in GRPO and DAPO, with the dual clip (arXiv 1912.09729)."""

import math

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, token_metric
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio

SCALES_WITH_ADVANTAGE = True


def clip(loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the clipped PPO loss per token, -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), with rho = pi
    / pi_old and advantage A; at most -lower_bound_ratio A for A < 0 (dual clip). A negative epsilon disables its
    bound."""
    ratio_BT, advantages_B1 = probability_ratio(loss_inputs.log_ratio_BT), loss_inputs.advantages_B1
    loss_BT, metrics = clipped_loss(ratio_BT, loss_inputs, policy_settings)
    dual_clip_bound_B1 = -policy_settings.lower_bound_ratio * advantages_B1
    has_negative_advantage_B1 = advantages_B1 < 0
    metrics["clip_dual"] = token_metric(has_negative_advantage_B1 & (loss_BT > dual_clip_bound_B1), loss_inputs.mask_BT)
    return torch.where(has_negative_advantage_B1, torch.minimum(loss_BT, dual_clip_bound_B1), loss_BT), metrics


def clipped_loss(ratio_BT: Tensor, inputs: ObjectiveInputs, policy_settings: PolicySettings) -> tuple[Tensor, Metrics]:
    """Return the larger of the clipped and the unclipped PPO loss of each token, from the probability ratios
    `ratio_BT`, and the fractions of clipped tokens as metrics."""
    min_ratio = 1 - policy_settings.epsilon_low if policy_settings.epsilon_low >= 0 else -math.inf
    max_ratio = 1 + policy_settings.epsilon_high if policy_settings.epsilon_high >= 0 else math.inf
    advantages_B1 = inputs.advantages_B1
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(min_ratio, max_ratio) * advantages_B1)
    return loss_BT, {
        "clip_low": token_metric((ratio_BT < min_ratio) & (advantages_B1 < 0), inputs.mask_BT),
        "clip_high": token_metric((ratio_BT > max_ratio) & (advantages_B1 > 0), inputs.mask_BT),
    }
