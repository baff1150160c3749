"""What waits in host memory until it is needed: activations for the backward pass, encoders for their next call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

SMALLEST = 1 << 10
"""Elements; what has fewer stays: moving it costs more than it frees."""


def activations_on_cpu() -> saved_tensors_hooks:
    """Return torch's `save_on_cpu`, which leaves parameters where they are: FSDP frees and gathers them itself."""
    moves = save_on_cpu(pin_memory=torch.cuda.is_available())

    def pack(tensor: Tensor) -> Any:
        base = tensor._base if tensor._base is not None else tensor
        return tensor if isinstance(base, nn.Parameter) or tensor.numel() < SMALLEST else moves.pack_hook(tensor)

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else moves.unpack_hook(packed)

    return saved_tensors_hooks(pack, unpack)


class Residence:
    """Where the components of a pipeline are: on the device while they work, otherwise in host memory."""

    def __init__(self, device: torch.device, *, is_offloaded: bool) -> None:
        """`is_offloaded`: components leave the device when their work is done."""
        self._device, self._is_offloaded, self._stays = device, is_offloaded, False
        self._present: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        """Each component on the device, with its parameters and the memory of the host that they came from."""

    @contextmanager
    def working(self, components: Sequence[nn.Module]) -> Iterator[None]:
        """Have components on the device inside the block."""
        for component in components:
            self._present.setdefault(component, [(weight, weight.data) for weight in component.parameters()])
            component.to(self._device)
        try:
            yield
        finally:
            if not self._stays:
                self._leave()

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Let components that have worked inside the block stay on the device until its end."""
        self._stays = True
        try:
            yield
        finally:
            self._stays = False
            self._leave()

    def _leave(self) -> None:
        for component, weights in self._present.items() if self._is_offloaded else ():
            for weight, on_host in weights:
                weight.data = on_host  # nothing changes them, so nothing is copied back
            component.to("cpu")
        self._present.clear()
