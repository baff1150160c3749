"""Muon (torch.optim.Muon, kellerjordan.github.io/posts/muon) for hidden weight matrices, AdamW for other parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon and AdamW as one optimizer with common groups and state, so that a schedule and a checkpoint see one
    optimizer.

    Muon updates the groups with `is_matrix`, scaled to the size of AdamW's updates (arXiv 2502.16982), so that both
    use the same learning rates.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, **adamw: Any) -> None:
        """Build Muon and AdamW over `groups`; `adamw` holds the further arguments of AdamW."""
        optimizer_kinds: list[tuple[bool, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
            (True, torch.optim.Muon, {"adjust_lr_fn": "match_rms_adamw"}),
            (False, torch.optim.AdamW, adamw),
        ]
        self._optimizers: dict[bool, torch.optim.Optimizer] = {}
        for is_matrix, optimizer_class, optimizer_settings in optimizer_kinds:
            if optimizer_groups := [group for group in groups if group["is_matrix"] == is_matrix]:
                self._optimizers[is_matrix] = optimizer_class(optimizer_groups, lr=lr, **optimizer_settings)
        super().__init__([group for optimizer in self._optimizers.values() for group in optimizer.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step of Muon and one step of AdamW. Both optimizers first get the current parameter groups and
        state, because loading a checkpoint replaces these."""
        for is_matrix, optimizer in self._optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["is_matrix"] == is_matrix]
            optimizer.state = self.state
            optimizer.step()


def hidden_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the two-dimensional parameters of a model except embeddings and the output head."""
    output_head = getattr(model, "get_output_embeddings", lambda: None)()
    excluded_modules = [m for m in model.modules() if isinstance(m, nn.Embedding)] + (
        [output_head] if output_head else []
    )
    excluded_parameters = {parameter for module in excluded_modules for parameter in module.parameters()}
    return {parameter for parameter in model.parameters() if parameter.ndim == 2} - excluded_parameters
