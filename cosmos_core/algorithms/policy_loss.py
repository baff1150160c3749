"""Policy loss per token: an objective (`objectives/`), importance weights, KL penalty and entropy bonus.

Pure functions from log-probabilities to a loss per token. Callers run the forward passes, and compute the entropy, the
advantages (`advantages`) and the sum over tokens (`aggregate.aggregate_loss`).

Shapes: B sequences, T tokens.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, token_metric
from cosmos_core.algorithms.kl import k2, k3
from cosmos_core.algorithms.objectives.base import ObjectiveInputs, PolicySettings, probability_ratio


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Inputs of the policy loss; values at tokens where `mask_BT` is 0 are ignored."""

    logprobs_BT: Tensor
    """Log-probabilities (log pi) of the sampled tokens under the current policy, with gradient."""
    advantages_B: Tensor
    mask_BT: Tensor
    """Loss mask: 1 for tokens that count in the loss, 0 for all others."""
    old_logprobs_BT: Tensor | None = None
    """Log-probabilities under the old policy, the denominator of the probability ratio; None: the old policy is the
    current policy, so that the ratio is 1."""
    ref_logprobs_BT: Tensor | None = None
    """Log-probabilities of the tokens under the reference policy, for the KL penalty and the metric `kl`; None: there
    is neither, and `kl_beta` is 0."""
    entropy_BT: Tensor | None = None
    """Entropy of the policy at each token, for the metric `entropy` and, with gradient, for the entropy bonus."""
    weights_BT: Tensor | None = None
    """Importance weights of tokens that another policy than the old one sampled (see `correction`); None: all are 1."""
    rollout_logprobs_BT: Tensor | None = None
    """Log-probabilities under mu, from which rollouts sampled the tokens; AIPO and the off-policy mask need them."""
    token_advantages_BT: Tensor | None = None
    """Advantage of each token that is added to the advantage of its sequence, such as the terms of a teacher model;
    None: nothing is added."""


class PolicyLoss(NamedTuple):
    """Loss of each token, 0 where the mask is 0, and metrics that are summed over micro-batches."""

    loss_BT: Tensor
    metrics: Metrics


def policy_loss(loss_inputs: PolicyLossInputs, settings: PolicySettings) -> PolicyLoss:
    """Return the objective's loss of each token, plus `kl_beta` times the KL to the reference policy, minus
    `entropy_coeff` times the entropy. Importance weights and the off-policy mask apply only to the objective. Gradients
    flow through `logprobs_BT` and `entropy_BT`."""
    mask_BT = loss_inputs.mask_BT.bool()
    logprobs_BT = apply_mask(loss_inputs.logprobs_BT, mask_BT)
    old_logprobs_BT = loss_inputs.logprobs_BT if loss_inputs.old_logprobs_BT is None else loss_inputs.old_logprobs_BT
    log_ratio_BT = logprobs_BT - apply_mask(old_logprobs_BT.detach(), mask_BT)
    rollout_log_ratio_BT = None
    if loss_inputs.rollout_logprobs_BT is not None:
        rollout_log_ratio_BT = logprobs_BT.detach() - apply_mask(loss_inputs.rollout_logprobs_BT, mask_BT)
    advantages_B1 = loss_inputs.advantages_B.to(logprobs_BT.dtype).unsqueeze(-1)
    if loss_inputs.token_advantages_BT is not None:
        advantages_B1 = advantages_B1 + apply_mask(loss_inputs.token_advantages_BT, mask_BT)
    objective_inputs = ObjectiveInputs(logprobs_BT, log_ratio_BT, rollout_log_ratio_BT, advantages_B1, mask_BT)

    loss_BT, metrics = getattr(_import_objective(settings), settings.objective)(objective_inputs, settings)
    if loss_inputs.weights_BT is not None:
        loss_BT = loss_BT * loss_inputs.weights_BT
    if settings.off_policy_masking_delta is not None:
        is_off_policy_B1 = _make_off_policy_mask(objective_inputs, settings.off_policy_masking_delta)
        metrics["off_policy_masked"] = token_metric(is_off_policy_B1.expand_as(mask_BT), mask_BT)
        loss_BT = apply_mask(loss_BT, ~is_off_policy_B1)
    ratio_BT = probability_ratio(log_ratio_BT)
    metrics["ratio"] = token_metric(ratio_BT, mask_BT)
    # The tokens are samples of the old policy, so `approx_kl` is an estimate of KL(old policy || policy).
    metrics["approx_kl"] = token_metric(k3(logprobs_BT - log_ratio_BT, logprobs_BT)[0], mask_BT)
    if loss_inputs.entropy_BT is not None:
        metrics["entropy"] = token_metric(loss_inputs.entropy_BT, mask_BT)
        if settings.entropy_coeff:
            loss_BT = loss_BT - settings.entropy_coeff * apply_mask(loss_inputs.entropy_BT, mask_BT)
    if loss_inputs.ref_logprobs_BT is not None:
        estimate_kl = k2 if settings.kl_estimator == "k2" else k3
        kl_BT, is_kl_clamped_BT = estimate_kl(logprobs_BT, apply_mask(loss_inputs.ref_logprobs_BT.detach(), mask_BT))
        metrics["kl"] = token_metric(kl_BT, mask_BT)
        metrics["kl_clamped"] = token_metric(is_kl_clamped_BT, mask_BT)
        if settings.kl_beta:
            loss_BT = loss_BT + settings.kl_beta * (kl_BT * ratio_BT if settings.unbiased_kl_estimate else kl_BT)
    return PolicyLoss(apply_mask(loss_BT, mask_BT), metrics)


def scales_with_advantage(policy_settings: PolicySettings) -> bool:
    """Return True if a token with an advantage of 0 has a loss and a gradient of exactly 0: the objective declares
    `SCALES_WITH_ADVANTAGE`, and there is no KL penalty or entropy bonus, which have gradients at every token."""
    is_objective_scaled: bool = getattr(_import_objective(policy_settings), "SCALES_WITH_ADVANTAGE", False)
    return is_objective_scaled and not policy_settings.kl_beta and not policy_settings.entropy_coeff


def _import_objective(policy_settings: PolicySettings) -> ModuleType:
    return importlib.import_module(f"cosmos_core.algorithms.objectives.{policy_settings.objective}")


def _make_off_policy_mask(inputs: ObjectiveInputs, max_mean_log_ratio: float) -> Tensor:
    """Return a mask of the sequences that off-policy masking excludes (DeepSeek-V3.2, arXiv 2512.02556), shape (B, 1):
    those with a negative mean advantage and a mean log(mu / pi) above `max_mean_log_ratio`, where mu is the rollout
    policy. On such a sequence, the policy pi is already far from mu, and training would move pi further away."""
    assert inputs.rollout_log_ratio_BT is not None, "the off-policy mask needs the log-probabilities of the rollouts"
    length_B1 = inputs.mask_BT.sum(-1, keepdim=True).clamp(min=1)
    mean_log_ratio_B1 = -torch.where(inputs.mask_BT, inputs.rollout_log_ratio_BT, 0.0).sum(-1, keepdim=True) / length_B1
    advantage_sum_B1 = apply_mask(inputs.advantages_B1.expand_as(inputs.mask_BT), inputs.mask_BT).sum(-1, keepdim=True)
    return (advantage_sum_B1 < 0) & (mean_log_ratio_B1 > max_mean_log_ratio)


def positive_nll_loss(logprobs_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor, denominator: float) -> Tensor:
    """Return the sum of -log pi over the tokens of completions with a reward above 0, divided by `denominator`, the
    number of such tokens in the whole optimizer step (VAPO, arXiv 2504.05118)."""
    has_positive_reward_BT = mask_BT.bool() & (rewards_B > 0).unsqueeze(-1)
    return -apply_mask(logprobs_BT, has_positive_reward_BT).sum() / denominator
