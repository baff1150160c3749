"""Which tensors wait in host memory, and that the gradient does not notice; which encoders do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from cosmos_core.models import offload
from cosmos_core.models.offload import MIN_OFFLOADED_ELEMENTS, ComponentOffload, offload_activations


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
    with offload_activations():
        loss = model(inputs).square().sum()
    loss.backward()
    assert all(torch.equal(parameter.grad, other) for parameter, other in zip(model.parameters(), theirs, strict=True))
    assert [tuple(tensor.shape) for tensor in moved] == [(32, 64)] * len(moved) and MIN_OFFLOADED_ELEMENTS <= 32 * 64
    assert len(moved) >= 4, "inputs, two activations, the norm's input, the last activation"


class Encoder(nn.Linear):
    """Notes where it goes, without going there; its weights are new memory then, as on a device."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.moves: list[str] = []

    def to(self, device: Any) -> Encoder:  # type: ignore[override]
        self.moves.append(str(device))
        if device != "cpu":
            self.weight.data = self.weight.data.clone()
        return self


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_a_component_stays_through_a_run_of_calls_and_leaves_without_a_copy(is_offloaded: bool) -> None:
    encoder, residence = Encoder(), ComponentOffload(torch.device("cuda"), should_offload=is_offloaded)
    on_host, back = encoder.weight.data_ptr(), ["cpu"] * is_offloaded
    with residence.use_on_device([encoder]):
        assert encoder.weight.data_ptr() != on_host
    assert encoder.moves == ["cuda", *back]
    assert (encoder.weight.data_ptr() == on_host) is is_offloaded
    encoder.moves.clear()
    with residence.keep_on_device():
        for _ in range(3):
            with residence.use_on_device([encoder]):
                pass
    assert encoder.moves == ["cuda"] * 3 + back
