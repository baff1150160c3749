"""Aggregation of token losses into one number, with a denominator that is fixed before the first backward pass.

`compute_denominator` is called once for all sequences of an optimizer step, `aggregate_loss` then for each micro-batch.
The micro-batch losses add up to the loss of the step, independently of the micro-batches. Gradients must be summed over
ranks instead of averaged, as `parallel/fsdp.py` does.

Shapes: B sequences (a sequence is never split between micro-batches), T tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

LossAggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "token-sum"]

Metrics = dict[str, Tensor]
"""Metrics by name. Each is a float64 tensor `[sum, count]`, which is added over micro-batches and ranks."""


def compute_denominator(loss_type: LossAggregation, seq_lengths: Iterable[int], max_tokens: int | None = None) -> float:
    """Return the denominator D of the loss of an optimizer step; `seq_lengths`: unmasked tokens of each sequence.

    D is, by `loss_type`: for `token-mean` the number of tokens; for `seq-mean-token-sum` the number of sequences with
    at least one token; for `seq-mean-token-mean` the same number, times the constant `max_tokens` if that is set (Dr.
    GRPO, arXiv 2503.20783); for `token-sum` 1. Without tokens D is 1, so that the loss is 0 rather than NaN."""
    if loss_type == "token-sum":
        return 1.0
    denominator = sum(seq_lengths) if loss_type == "token-mean" else sum(length > 0 for length in seq_lengths)
    if loss_type == "seq-mean-token-mean" and max_tokens is not None:
        denominator *= max_tokens
    return float(max(denominator, 1))


def aggregate_loss(
    values_BT: Tensor, mask_BT: Tensor, loss_type: LossAggregation, denominator: float, max_tokens: int | None = None
) -> Tensor:
    """Return the contribution of a micro-batch to the loss of the optimizer step. `denominator` is the result of
    `compute_denominator` for the same `loss_type` and `max_tokens`."""
    masked_values_BT = apply_mask(values_BT, mask_BT)
    if loss_type == "seq-mean-token-mean" and max_tokens is None:
        return (masked_values_BT.sum(-1) / mask_BT.bool().sum(-1).clamp(min=1)).sum() / denominator
    return masked_values_BT.sum() / denominator


def apply_mask(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return `values_BT` with exact zeros, in value and gradient, where the mask is 0, even for NaN or infinity. The
    result is at least float32: in half precision, sums over many tokens are inexact and exp overflows."""
    upcast_values_BT = values_BT.to(torch.promote_types(values_BT.dtype, torch.float32))
    return torch.where(mask_BT.bool(), upcast_values_BT, torch.zeros_like(upcast_values_BT))


def token_metric(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the metric `[sum, count]` of the values at unmasked tokens, without gradient."""
    masked_value_sum = apply_mask(values_BT.detach(), mask_BT).sum(dtype=torch.float64)
    return torch.stack([masked_value_sum, mask_BT.bool().sum().to(torch.float64)])


def make_dataset_masks(dataset_names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each data set in `dataset_names`, with a mask of its samples. `dataset_names` has for each
    sample the name of its data set, or an empty string, which is not yielded, if the recipe has only one data set."""
    for name in dict.fromkeys(filter(None, dataset_names)):
        yield name, torch.tensor([source == name for source in dataset_names])


def add_metrics(metrics: Metrics, added_metrics: Metrics) -> Metrics:
    """Return the sums of two sets of metrics by name; a metric that only one set has is kept unchanged."""
    return metrics | added_metrics | {n: metrics[n] + added_metrics[n] for n in metrics.keys() & added_metrics.keys()}


def compute_means(metric_totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean (sum / count) of each metric; metrics with count 0 are left out. For a metric NAME with a metric
    `NAME_square` of its squares, such as an importance weight, the result also has the effective sample size as a
    fraction of the tokens: mean^2 / mean of the squares (Kish)."""
    metric_sums_and_counts = {name: metric.tolist() for name, metric in metric_totals.items()}
    metric_means = {name: metric_sum / count for name, (metric_sum, count) in metric_sums_and_counts.items() if count}
    for key, mean in list(metric_means.items()):
        name = key.removesuffix("_square")
        if mean and name != key and name in metric_means:
            metric_means[f"{name}_effective_sample_size"] = metric_means[name] ** 2 / mean
    return metric_means
