"""Which tensors wait in host memory, and that the gradient does not notice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from cosmos_core.models import offload
from cosmos_core.models.offload import SMALLEST, activations_on_cpu


def test_activations_are_moved_and_parameters_and_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[Tensor] = []

    class Recording(save_on_cpu):
        def __init__(self, **settings: bool) -> None:
            super().__init__(**settings)
            self.pack_hook = lambda tensor: moved.append(tensor) or (tensor.device, tensor.clone())

    monkeypatch.setattr(offload, "save_on_cpu", Recording)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh())
    inputs = torch.randn(32, 64)
    model(inputs).square().sum().backward()
    theirs = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with activations_on_cpu():
        loss = model(inputs).square().sum()
    loss.backward()
    assert all(torch.equal(parameter.grad, other) for parameter, other in zip(model.parameters(), theirs, strict=True))
    assert [tuple(tensor.shape) for tensor in moved] == [(32, 64)] * len(moved) and SMALLEST <= 32 * 64
    assert len(moved) >= 4, "inputs, two activations, the norm's input, the last activation"
