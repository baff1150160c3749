"""The loss of GRPO (arXiv 2402.03300) and of its relatives by parameter: clip-higher (DAPO, 2503.14476),
dual clip (1912.09729), Dr. GRPO (2503.20783), KL with the gradient of the reverse divergence (2512.02556).

Pure functions: rewards to advantages in float64 on the CPU, log-probabilities to a loss per token. Not here: forward
passes, entropy itself, and the sum over tokens (`aggregate.weighted_sum`).

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, masked, token_metric
from cosmos_core.algorithms.kl import MAX_LOG_RATIO, k3
from cosmos_core.config.schema.grpo import GrpoConfig

STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What the policy loss looks at; values where the mask is 0 are ignored, whatever they are."""

    logprobs_BT: Tensor
    """log pi of the sampled tokens, with gradient."""
    advantages_B: Tensor
    mask_BT: Tensor
    """1 where the policy sampled the token; 0 everywhere in rows whose completion has no valid reward."""
    old_logprobs_BT: Tensor | None = None
    """Under the policy before this batch's first update; None on that first update: the ratio is then exactly 1."""
    ref_logprobs_BT: Tensor | None = None
    """Under the frozen reference; needed when `kl_beta` > 0, otherwise it only adds the metric."""
    entropy_BT: Tensor | None = None
    """Entropy of the policy at each token, for the metric."""
    weights_BT: Tensor | None = None
    """pi_old / mu of tokens that were drawn from another policy mu (`correction`); None: 1."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Loss of each token, 0 where the mask is 0, and metrics to add up over micro-batches."""

    loss_BT: Tensor
    metrics: Metrics


def advantages(
    rewards_per_group: Sequence[Sequence[float | None]], *, normalise_std: bool
) -> tuple[list[list[float | None]], dict[str, int]]:
    """Return r - mean, divided by (population std + 1e-6) if `normalise_std`, inside each group; and counts.

    An invalid reward (None, NaN, infinite) has the advantage None: its completion is dropped, and the others of the
    group are compared among themselves. All equal, or alone: exactly 0 (by equality, because rounding makes the std
    of equal rewards non-zero). Counts: `groups`, `constant_groups` (two or more equal rewards), `single_groups`,
    `empty_groups` (one or no valid reward), `invalid` completions.
    """
    counts = dict.fromkeys(("groups", "constant_groups", "single_groups", "empty_groups", "invalid"), 0)
    result: list[list[float | None]] = []
    for rewards in rewards_per_group:
        valid = [r for r in rewards if r is not None and math.isfinite(r)]
        counts["groups"] += 1
        counts["invalid"] += len(rewards) - len(valid)
        counts["empty_groups"] += not valid
        counts["single_groups"] += len(valid) == 1
        counts["constant_groups"] += len(valid) > 1 and max(valid) == min(valid)
        values = iter(_group_advantages(valid, normalise_std))
        result.append([next(values) if r is not None and math.isfinite(r) else None for r in rewards])
    return result, counts


def _group_advantages(rewards: list[float], normalise_std: bool) -> list[float]:
    if not rewards or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    rewards_G = np.asarray(rewards, dtype=np.float64)
    centred_G = rewards_G - rewards_G.mean()
    return (centred_G / (rewards_G.std() + STD_EPSILON) if normalise_std else centred_G).tolist()


def policy_loss(inputs: PolicyInputs, settings: GrpoConfig) -> PolicyLoss:
    """Return the clipped, dual-clipped policy loss of each token, plus `kl_beta` times the KL to the reference.

    With rho = pi / pi_old and A the advantage: -min(rho A, clip(rho, 1 - epsilon_low, 1 + epsilon_high) A), and for
    A < 0 at most -lower_bound_ratio A. A negative epsilon leaves its side open. Gradients reach `logprobs_BT` only.
    """
    mask_BT = inputs.mask_BT.bool()
    logprobs_BT = masked(inputs.logprobs_BT, mask_BT)
    old_BT = inputs.logprobs_BT if inputs.old_logprobs_BT is None else inputs.old_logprobs_BT
    log_ratio_BT = logprobs_BT - masked(old_BT.detach(), mask_BT)
    ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages_B1 = inputs.advantages_B.to(logprobs_BT.dtype).unsqueeze(-1)

    loss_BT, metrics = _clipped(ratio_BT, advantages_B1, mask_BT, settings)
    if inputs.weights_BT is not None:
        loss_BT = loss_BT * inputs.weights_BT
    metrics["ratio"] = token_metric(ratio_BT, mask_BT)
    metrics["approx_kl"] = token_metric(k3(logprobs_BT, logprobs_BT - log_ratio_BT)[0], mask_BT)
    if inputs.entropy_BT is not None:
        metrics["entropy"] = token_metric(inputs.entropy_BT, mask_BT)
    if inputs.ref_logprobs_BT is not None:
        kl_BT, clamped_BT = k3(logprobs_BT, masked(inputs.ref_logprobs_BT.detach(), mask_BT))
        metrics["kl"] = token_metric(kl_BT, mask_BT)
        metrics["kl_clamped"] = token_metric(clamped_BT, mask_BT)
        if settings.kl_beta:
            loss_BT = loss_BT + settings.kl_beta * (kl_BT * ratio_BT if settings.unbiased_kl_estimate else kl_BT)
    assert inputs.ref_logprobs_BT is not None or not settings.kl_beta, "kl_beta > 0 needs ref_logprobs_BT"
    return PolicyLoss(masked(loss_BT, mask_BT), metrics)


def positive_nll(logprobs_BT: Tensor, mask_BT: Tensor, rewards_B: Tensor, denominator: float) -> Tensor:
    """Return the mean -log pi over the tokens of completions with a reward above 0, for `positive_nll_coef`.

    `denominator` is the number of those tokens in the whole optimizer step: it differs from that of the policy loss.
    (VAPO, arXiv 2504.05118.)
    """
    positive_BT = mask_BT.bool() & (rewards_B > 0).unsqueeze(-1)
    return -masked(logprobs_BT, positive_BT).sum() / denominator


def _clipped(ratio_BT: Tensor, advantages_B1: Tensor, mask_BT: Tensor, settings: GrpoConfig) -> tuple[Tensor, Metrics]:
    low = 1 - settings.epsilon_low if settings.epsilon_low >= 0 else -math.inf
    high = 1 + settings.epsilon_high if settings.epsilon_high >= 0 else math.inf
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, ratio_BT.clamp(low, high) * advantages_B1)
    bound_B1 = -settings.lower_bound_ratio * advantages_B1
    is_negative_B1 = advantages_B1 < 0
    dual_BT = is_negative_B1 & (loss_BT > bound_B1)
    metrics = {
        "clip_low": token_metric((ratio_BT < low) & is_negative_B1, mask_BT),
        "clip_high": token_metric((ratio_BT > high) & (advantages_B1 > 0), mask_BT),
        "clip_dual": token_metric(dual_BT, mask_BT),
    }
    return torch.where(is_negative_B1, torch.minimum(loss_BT, bound_B1), loss_BT), metrics
