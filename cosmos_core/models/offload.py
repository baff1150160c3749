"""Offloading to host memory: activations until the backward pass, pipeline components until their next use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

MIN_OFFLOADED_ELEMENTS = 1 << 10
"""Minimum number of elements of an offloaded tensor; offloading smaller tensors takes more time than it is worth."""


def offload_activations() -> saved_tensors_hooks:
    """Return hooks that offload activations to host memory, like torch's `save_on_cpu`. Parameters, which FSDP manages,
    and small tensors stay on the device."""
    offload_hooks = save_on_cpu(pin_memory=torch.cuda.is_available())

    def offload_tensor(tensor: Tensor) -> Any:
        base_tensor = tensor._base if tensor._base is not None else tensor
        is_kept_on_device = isinstance(base_tensor, nn.Parameter) or tensor.numel() < MIN_OFFLOADED_ELEMENTS
        return tensor if is_kept_on_device else offload_hooks.pack_hook(tensor)

    def restore_tensor(packed_tensor: Any) -> Tensor:
        return packed_tensor if isinstance(packed_tensor, Tensor) else offload_hooks.unpack_hook(packed_tensor)

    return saved_tensors_hooks(offload_tensor, restore_tensor)


class ComponentOffload:
    """Offloading of pipeline components: they are stored in host memory and moved to the device when they are used."""

    def __init__(self, device: torch.device, *, should_offload: bool) -> None:
        """Store the device for computation. `should_offload`: whether components return to host memory after use."""
        self._device, self._should_offload, self._is_offload_deferred = device, should_offload, False
        self._weights_on_device: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        """Pipeline components on the device, each with a list of pairs: a parameter, and its tensor in host memory."""

    @contextmanager
    def use_on_device(self, components: Sequence[nn.Module]) -> Iterator[None]:
        """Keep the weights of `components` on the device during the `with` block. Then return them to host memory if
        offloading is enabled and no `keep_on_device` is active."""
        for component in components:
            self._weights_on_device.setdefault(component, [(weight, weight.data) for weight in component.parameters()])
            component.to(self._device)
        try:
            yield
        finally:
            if not self._is_offload_deferred:
                self._move_to_host()

    @contextmanager
    def keep_on_device(self) -> Iterator[None]:
        """Keep all components that are used during the `with` block on the device until the block ends."""
        self._is_offload_deferred = True
        try:
            yield
        finally:
            self._is_offload_deferred = False
            self._move_to_host()

    def _move_to_host(self) -> None:
        for component, weights in self._weights_on_device.items() if self._should_offload else ():
            for weight, host_tensor in weights:
                weight.data = host_tensor  # weights of components never change, so they are not copied back
            component.to("cpu")
        self._weights_on_device.clear()
