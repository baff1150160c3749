"""Supervised fine-tuning: the negative log-likelihood of the labels.

Not here: shifting labels, building the mask, log-softmax. Log-probabilities come in as those of the labels.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from torch import Tensor

from cosmos_core.algorithms.aggregate import Metrics, masked, token_metric


def sft_loss(logprobs_BT: Tensor, loss_mask_BT: Tensor, denominator: float) -> tuple[Tensor, Metrics]:
    """Sum of -log p over the labels where the mask is 1, divided by D (`aggregate.denominator`).

    The metric `nll` is the plain token mean in nats, whatever D is.
    """
    loss = -masked(logprobs_BT, loss_mask_BT).sum() / denominator
    return loss, {"nll": token_metric(-logprobs_BT, loss_mask_BT)}
