"""Importance weights for tokens that were not sampled from the policy: pi_old / mu, truncated (TIS) or masked.

pi_old is the trainer's policy before the update, and mu is the distribution that the engine sampled from. They differ
because of rounding, of outdated engine weights, and of sampling settings that change the distribution. Under top-p and
top-k the engine's log-probabilities are normalised over the kept tokens, so pi_old / mu is the kept probability mass;
under a repetition penalty pi_old / mu is the quotient of the two softmaxes.

A sum over tokens sampled from mu, weighted by pi_old / mu, has the expectation of the same sum under pi_old over the
tokens that mu can sample. A repetition penalty keeps all tokens, so the only bias comes from the upper bound of the
weights. top-p and top-k remove a tail that no weight restores: the bias of a token's gradient is at most the tail's
mass, 1 - top_p, times the largest |advantage x gradient of the log-probability| in the tail. Without weights, each kept
token counts 1 / kept mass times too much, and the gradient is that of the truncated policy.

Shapes: B sequences, T tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, apply_mask, token_metric
from cosmos_core.algorithms.kl import MAX_LOG_RATIO, k3

_COUNT_EPSILON = 1e-8
"""Value added to the number of tokens of a sequence in `self_normalise`, as in verl."""

CorrectionRule = Literal["none", "truncate", "mask", "sequence-truncate", "sequence-mask"]


@dataclass(frozen=True, slots=True)
class WeightCorrection:
    """Rule for the importance weights of tokens.

    With w = pi_old / mu of a token, and W the product of w over its sequence, the weight is, for `none`: 1; `truncate`
    (TIS): min(w, high); `mask` (IcePop): w if it is between `low` and `high`, else 0; `sequence-truncate`: min(W, high)
    for each token; `sequence-mask`: W if it is between `low` and `high`, else 0 (arXiv 2512.23075). W varies more the
    longer the sequence: rounding noise of 0.05 per token leaves 6 % effective sample size at 1,000 tokens.
    """

    rule: CorrectionRule = "truncate"
    low: float = 0.0
    high: float = 2.0
    geometric_mean_range: tuple[float, float] | None = None
    """Accepted range of the geometric mean of w over a sequence, such as (0.99, 1.01), else weight 0; None: any
    mean."""
    max_mean_k3: float | None = None
    """Upper bound of the mean of w - 1 - log w, the k3 estimate of KL(mu || pi_old), over a sequence, above which the
    sequence gets weight 0; None: no bound."""
    max_k3: float | None = None
    """Upper bound of w - 1 - log w of each token in a sequence; other sequences get weight 0; None: no bound."""
    scale: float = 1.0
    """Divisor of all weights: the mean weight if weights are self-normalised, else 1."""


@torch.no_grad()
def importance_weights(
    old_logprobs_BT: Tensor,
    rollout_logprobs_BT: Tensor,
    mask_BT: Tensor,
    correction: WeightCorrection = WeightCorrection(),
) -> tuple[Tensor, Metrics]:
    """Return the importance weight of each token where the mask is 1, else 0, and metrics over the masked-in tokens.

    Weights apply only to the policy term of the loss, never to a KL term, and the denominator of the loss is unchanged.
    A token whose log-probability under mu is not finite has weight 0; for rollouts such tokens are already excluded
    from the mask and the denominator (`grpo.make_sample`). The metrics are the mean weight and the mean square of the
    weight (mean^2 / square is the effective fraction of the tokens), and the fractions of tokens whose ratio is above
    `high`, that a rule rejected, and whose log-probability is not finite.
    """
    mask_BT = mask_BT.bool()
    is_finite_BT = rollout_logprobs_BT.isfinite()
    valid_mask_BT = mask_BT & is_finite_BT
    old_logprobs_BT = apply_mask(old_logprobs_BT, valid_mask_BT)
    rollout_logprobs_BT = apply_mask(rollout_logprobs_BT, valid_mask_BT)
    log_weight_BT = log_ratio_BT = old_logprobs_BT - rollout_logprobs_BT
    if correction.rule.startswith("sequence"):
        log_weight_BT = log_ratio_BT.sum(-1, keepdim=True).expand_as(log_ratio_BT)
    ratio_BT = apply_mask(log_weight_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), valid_mask_BT)
    accepted_mask_BT, weights_BT = valid_mask_BT, ratio_BT.clamp(max=correction.high)
    if correction.rule == "none":
        weights_BT = torch.ones_like(ratio_BT)
    elif correction.rule.endswith("mask"):
        accepted_mask_BT = valid_mask_BT & (ratio_BT >= correction.low) & (ratio_BT <= correction.high)
    num_valid_B1 = valid_mask_BT.sum(-1, keepdim=True).clamp(min=1)
    if correction.geometric_mean_range is not None:
        low, high = correction.geometric_mean_range
        mean_ratio_B1 = (log_ratio_BT.sum(-1, keepdim=True) / num_valid_B1).exp()
        accepted_mask_BT = accepted_mask_BT & (mean_ratio_B1 >= low) & (mean_ratio_B1 <= high)
    k3_BT = apply_mask(k3(rollout_logprobs_BT, old_logprobs_BT)[0], valid_mask_BT)
    if correction.max_mean_k3 is not None:
        accepted_mask_BT = accepted_mask_BT & (k3_BT.sum(-1, keepdim=True) / num_valid_B1 <= correction.max_mean_k3)
    if correction.max_k3 is not None:
        accepted_mask_BT = accepted_mask_BT & (k3_BT.amax(-1, keepdim=True) <= correction.max_k3)
    weights_BT = apply_mask(weights_BT, accepted_mask_BT) / correction.scale
    metrics = {
        "rollout/weight": token_metric(weights_BT, mask_BT),
        "rollout/weight_square": token_metric(weights_BT.square(), mask_BT),
        "rollout/weight_capped": token_metric(ratio_BT > correction.high, mask_BT),
        "rollout/weight_refused": token_metric(valid_mask_BT & ~accepted_mask_BT, mask_BT),
        "rollout/logprob_not_finite": token_metric(~is_finite_BT, mask_BT),
    }
    return weights_BT, metrics


def self_normalise(correction: WeightCorrection, rows: Iterable[tuple[Tensor, Tensor, Tensor]]) -> WeightCorrection:
    """Return `correction` with the `scale` for which the weights of all trained tokens of a step have the mean 1; with
    sequence rules, the mean over sequences. The mean includes sequences that are rejected later. Each of `rows` has the
    log-probabilities of a sample under the old policy, those under the rollout policy, and the loss mask, shape T."""
    token_correction = replace(correction, geometric_mean_range=None, max_mean_k3=None, max_k3=None)
    weight_sum, num_weights = 0.0, 0
    is_per_sequence = correction.rule.startswith("sequence")
    for old_logprobs_T, rollout_logprobs_T, mask_T in rows:
        num_tokens = int(mask_T.sum())
        rows_1T = old_logprobs_T[None], rollout_logprobs_T[None], mask_T[None]
        sample_weight_sum = importance_weights(*rows_1T, token_correction)[0].sum(dtype=torch.float64).item()
        weight_sum += sample_weight_sum / (num_tokens + _COUNT_EPSILON) if is_per_sequence else sample_weight_sum
        num_weights += min(1, num_tokens) if is_per_sequence else num_tokens
    return replace(correction, scale=weight_sum / num_weights if weight_sum else 1.0)
