"""Common inputs of policy-gradient objectives, which are pure functions in one file each.

A file NAME.py has a function `NAME`, which takes an `ObjectiveInputs` and a `PolicySettings`. It returns the loss of
each token (B, T), to be minimized, and metrics over the trained tokens. The file declares
`SCALES_WITH_ADVANTAGE = True` if the loss of a token is its advantage times a finite factor, so that tokens with an
advantage of 0 have no gradient. Completions that consist only of such tokens need not be run through the model.

Shapes: B sequences, T tokens.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, token_metric
from cosmos_core.algorithms.kl import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Parameters of the policy loss; names and meanings are those of `[train.train_policy]`."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    lower_bound_ratio: float = 3.0
    kl_beta: float = 0.0
    unbiased_kl_estimate: bool = False
    kl_estimator: Literal["k2", "k3"] = "k3"
    objective: str = "clip"
    """Objective of the policy loss, the name of a module in `cosmos_core/algorithms/objectives`."""
    ratio_cap: float = 5.0
    """Maximum importance weight of a token in CISPO, AIPO and DPPO: the weight itself, not its distance from 1."""
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    entropy_coeff: float = 0.0
    off_policy_masking_delta: float | None = None


@dataclass(frozen=True, slots=True)
class ObjectiveInputs:
    """Log-probability terms and advantages of the sampled tokens; zeros where the mask is 0."""

    logprobs_BT: Tensor
    """Log-probabilities of the tokens under the policy, log pi, with gradient."""
    log_ratio_BT: Tensor
    """Log-ratios of the policy to the old policy, log pi - log pi_old, with gradient."""
    rollout_log_ratio_BT: Tensor | None
    """Log-ratios log pi - log mu without gradient, where mu is the distribution from which the rollout sampled the
    tokens; None: unknown."""
    advantages_B1: Tensor
    """Advantage of each sequence, shape (B, 1); shape (B, T) if tokens of a sequence have different advantages."""
    mask_BT: Tensor


def measure_capping(ratio_BT: Tensor, loss_inputs: ObjectiveInputs, policy_settings: PolicySettings) -> Metrics:
    """Return the metrics `clip_high...`: the fraction of tokens whose probability ratio exceeds
    `policy_settings.ratio_cap`, in total and by the sign of the advantage."""
    is_ratio_capped_BT = ratio_BT > policy_settings.ratio_cap
    return {
        "clip_high": token_metric(is_ratio_capped_BT, loss_inputs.mask_BT),
        "clip_high_positive": token_metric(is_ratio_capped_BT & (loss_inputs.advantages_B1 > 0), loss_inputs.mask_BT),
        "clip_high_negative": token_metric(is_ratio_capped_BT & (loss_inputs.advantages_B1 < 0), loss_inputs.mask_BT),
    }


def probability_ratio(log_ratio_BT: Tensor) -> Tensor:
    """Return exp of a difference of log-probabilities, with the difference clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
