"""How token losses become one number: sums over a denominator that is fixed before the first backward.

`denominator` looks at all sequences of an optimizer step once; `weighted_sum` is then called for each micro-batch,
and the micro-batch losses add up to the loss of the whole step, however it was split. Not here: the division that
FSDP adds by averaging gradients over ranks (train/).

Shapes: B sequences (a sequence is never split between micro-batches), T tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

LossType = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]

Metrics = dict[str, Tensor]
"""Name to a float64 tensor `[sum, count]`: micro-batches and ranks are added up, `means` divides at the end."""


def denominator(loss_type: LossType, lengths: Iterable[int], max_tokens: int | None = None) -> float:
    """Return the D of an optimizer step, from the number of unmasked tokens of each of its sequences.

    `token-mean`: all tokens. `seq-mean-token-sum` and `seq-mean-token-mean`: sequences that have any token; the latter
    times the constant `max_tokens` where that is given (Dr. GRPO, arXiv 2503.20783). `token-sum`: 1. A step without any
    token has D = 1, so that its loss is 0 rather than NaN.
    """
    tokens = [length for length in lengths if length > 0]
    if loss_type == "token-mean":
        total = sum(tokens)
    elif loss_type == "token-sum":
        total = 1
    elif loss_type == "seq-mean-token-mean" and max_tokens is not None:
        total = len(tokens) * max_tokens
    else:
        total = len(tokens)
    return float(max(total, 1))


def weighted_sum(
    values_BT: Tensor, mask_BT: Tensor, loss_type: LossType, denominator: float, max_tokens: int | None = None
) -> Tensor:
    """Return what a micro-batch adds to the step's loss; `loss_type` and `max_tokens` as given to `denominator`."""
    kept_BT = masked(values_BT, mask_BT)
    if loss_type == "seq-mean-token-mean" and max_tokens is None:
        lengths_B = mask_BT.bool().sum(-1).clamp(min=1)
        return (kept_BT.sum(-1) / lengths_B).sum() / denominator
    return kept_BT.sum() / denominator


def masked(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return `values_BT` with exact zeros, in value and gradient, where the mask is 0, even over NaN or infinity.

    The result is at least float32: sums of half precision lose tokens, and exp of their differences overflows.
    """
    wide_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    return torch.where(mask_BT.bool(), wide_BT, torch.zeros_like(wide_BT))


def token_metric(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Sum over unmasked tokens and their number, as a metric `[sum, count]` without gradient."""
    sum_ = masked(values_BT.detach(), mask_BT).sum(dtype=torch.float64)
    return torch.stack([sum_, mask_BT.bool().sum().to(torch.float64)])


def add_metrics(total: Metrics, added: Metrics) -> Metrics:
    """Return the sum of both, name by name; a name that only one of them has is kept."""
    shared = {name: total[name] + added[name] for name in total.keys() & added.keys()}
    return total | added | shared


def means(total: Mapping[str, Tensor]) -> dict[str, float]:
    """Sum over count of each metric; one that counted nothing is left out.

    Of weights that have their mean square beside them, as `NAME_square`, also the effective sample size, as a share of
    the tokens: the square of the mean over the mean square (Kish).
    """
    pairs = {name: metric.tolist() for name, metric in total.items()}
    found = {name: sum_ / count for name, (sum_, count) in pairs.items() if count}
    squares = {name.removesuffix("_square"): mean for name, mean in found.items() if name.endswith("_square") and mean}
    sizes = {name: found[name] ** 2 / square for name, square in squares.items() if name in found}
    return found | {f"{name}_effective_sample_size": size for name, size in sizes.items()}
