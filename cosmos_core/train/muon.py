"""Muon (torch.optim.Muon, kellerjordan.github.io/posts/muon) for the matrices inside a network, AdamW for all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Two optimizers of torch that share groups and state, so that a schedule and a checkpoint see one.

    Groups with `is_matrix` are Muon's; its updates are scaled to the size of AdamW's (arXiv 2502.16982), so that both
    take the same learning rates.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, **adamw: Any) -> None:
        """`adamw`: what AdamW takes beside groups and learning rate."""
        kinds: list[tuple[bool, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
            (True, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
            (False, torch.optim.AdamW, adamw),
        ]
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}
        for is_matrix, make, settings in kinds:
            if own := [group for group in groups if group["is_matrix"] == is_matrix]:
                self._optimizers[is_matrix] = make(own, lr=lr, **settings)
        super().__init__([group for optimizer in self._optimizers.values() for group in optimizer.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Let both take their step; loading a state has replaced the groups and the state that they share."""
        for is_matrix, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["is_matrix"] == is_matrix]
            optimizer.state = self.state
            optimizer.step()


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of two dimensions that neither embed tokens nor predict them."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)] + ([head] if head else [])
    excluded = {parameter for module in outer for parameter in module.parameters()}
    return {parameter for parameter in model.parameters() if parameter.ndim == 2} - excluded
