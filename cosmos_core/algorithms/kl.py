"""Estimators of a KL divergence from the log-probabilities of sampled tokens (joschu.net/blog/kl-approx.html).

Let d = log p - log q for tokens sampled from p. k2 = d^2 / 2 has the expected gradient of the reverse KL(p || q). k3 =
exp(-d) - 1 + d is unbiased for KL(p || q) and never negative. As a loss, k3 has the expected gradient of the forward
KL(q || p); k3 times the ratio p / p_old, with gradient, has that of the reverse KL (arXiv 2506.09477, 2512.02556). k1 =
d is not supported: as a loss its expected gradient is zero.

Shapes: B sequences, T tokens.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of the absolute difference of two log-probabilities before exp, so that the result fits float32."""


def k3(logprobs_BT: Tensor, other_logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k3 estimate of KL(policy || other) per token, and a mask of the tokens whose log-ratio was clamped.

    A clamped token has no gradient, so nothing pulls it back to the other policy: callers report the mask as a metric.
    Unlike in Cosmos-RL, the estimate itself is not clamped to 10, which would remove the gradient at 2.5 nats.
    """
    log_ratio_BT = other_logprobs_BT - logprobs_BT
    clamped_log_ratio_BT = log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped_log_ratio_BT) - clamped_log_ratio_BT, log_ratio_BT.detach().abs() > MAX_LOG_RATIO


def k2(logprobs_BT: Tensor, other_logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the k2 estimate of KL(policy || other) per token, and a mask of the tokens whose log-ratio was clamped."""
    difference_BT = logprobs_BT - other_logprobs_BT
    clamped_log_ratio_BT = difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return clamped_log_ratio_BT.square() / 2, difference_BT.detach().abs() > MAX_LOG_RATIO
