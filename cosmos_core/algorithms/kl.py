"""Estimating a KL divergence from the log-probabilities of sampled tokens (joschu.net/blog/kl-approx.html).

With d = log p - log q and tokens drawn from p: k2 = d^2 / 2, whose expected gradient is that of the reverse KL(p || q);
and k3 = exp(-d) - 1 + d, unbiased for KL(p || q) and never negative. As a loss the expected gradient of k3 is that of
the forward KL(q || p); multiplied by the ratio p / p_old, kept in the graph, it is that of the reverse KL (arXiv
2506.09477, 2512.02556). k1 is not offered: as a loss its expected gradient is zero.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are clamped to this before exp; exp(20) still fits float32."""


def k3(logprobs_BT: Tensor, other_logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Per-token estimate of KL(policy || other), and where the clamp took hold.

    A clamped token has no gradient and no pull back to the other policy: count the second result, do not ignore it.
    The original also clamps the estimate itself to 10, which silences the pull at a drift of only 2.5 nats; we do not.
    """
    difference_BT = other_logprobs_BT - logprobs_BT
    clamped_BT = difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(clamped_BT) - clamped_BT, difference_BT.detach().abs() > MAX_LOG_RATIO


def k2(logprobs_BT: Tensor, other_logprobs_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return half the squared difference of each token, and where the clamp took hold; see `k3`."""
    difference_BT = logprobs_BT - other_logprobs_BT
    return (
        difference_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2,
        difference_BT.detach().abs() > MAX_LOG_RATIO,
    )
