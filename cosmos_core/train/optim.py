"""The optimizer, the learning-rate schedule and gradient clipping.

The learning rate is a pure function of the step, so a checkpoint holds no scheduler and a resumed run cannot
drift from its schedule. When a step is taken, and what is done about a non-finite gradient, is the loop's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from cosmos_core.config.schema.train import TrainConfig

_CLASSES: dict[str, type[torch.optim.Adam]] = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}


def build_optimizer(model: torch.nn.Module, train: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer of `[train]` over the parameters that require a gradient, at the peak learning rate.

    Parameters of one dimension (biases, norms) are in a group of their own, without weight decay.
    """
    assert isinstance(train.optm_lr, float)  # a rate per module is refused by the capability check
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": train.optm_weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return _CLASSES[train.optm_name](
        [group for group in groups if group["params"]],
        lr=train.optm_lr,
        betas=train.optm_betas,
        eps=train.epsilon,
        fused=train.optm_impl == "fused",
        foreach=train.optm_impl == "foreach",
    )


def learning_rate_factor(step: int, total_steps: int, train: TrainConfig) -> float:
    """What the peak learning rate is multiplied with at optimizer step `step` (0-based) of `total_steps`.

    Warm-up, stable, decay, as in Cosmos-RL (`optm/__init__.py`) with two corrections. Step k of W warm-up steps has
    start + (1 - start) * (k + 1) / W: there, step 0 has the start factor itself, so with the default of 0 it changes
    nothing. And a decay that would begin inside the warm-up is shortened to what the warm-up leaves.
    """
    warmup_steps = train.optm_warmup_steps
    if isinstance(warmup_steps, float):
        warmup_steps = int(warmup_steps * total_steps)
    warmup_steps = min(warmup_steps, total_steps)
    if step < warmup_steps:
        start = train.optm_warmup_start_factor
        return start + (1 - start) * (step + 1) / warmup_steps

    decay_steps = total_steps - warmup_steps
    if train.optm_decay_ratio is not None:
        decay_steps = min(decay_steps, round(total_steps * train.optm_decay_ratio))
    num_decayed = step - (total_steps - decay_steps)
    if num_decayed <= 0:
        return 1.0
    progress = min(1.0, num_decayed / max(1, decay_steps))
    curve = {
        "none": 1.0,
        "linear": 1 - progress,
        "sqrt": 1 - math.sqrt(progress),
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[train.optm_decay_type or "none"]
    return train.optm_min_lr_factor + (1 - train.optm_min_lr_factor) * curve


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, total_steps: int, train: TrainConfig) -> float:
    """Give every group the learning rate of optimizer step `step` (0-based), and return it."""
    assert isinstance(train.optm_lr, float)
    learning_rate = train.optm_lr * learning_rate_factor(step, total_steps, train)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    return learning_rate


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm before that.

    `max_norm` <= 0 only measures. A norm that is not finite is returned with the gradients as they are: scaling by
    it would turn one bad value into NaN everywhere, and only the caller can skip the step.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if max_norm > 0 and torch.isfinite(norm):
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
