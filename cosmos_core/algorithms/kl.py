"""Estimating a KL divergence from the log-probabilities of sampled tokens (joschu.net/blog/kl-approx.html).

k3 = exp(-d) - 1 + d with d = log p - log q and tokens drawn from p: unbiased for KL(p || q) and never negative. As a
loss its expected gradient is that of the forward KL(q || p); multiplied by the ratio p / p_old, kept in the graph, it
is that of the reverse KL(p || q) (arXiv 2506.09477, 2512.02556). k1 is not offered: as a loss its expected gradient
is zero.

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
