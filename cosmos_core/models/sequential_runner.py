"""Runner that runs micro-batches in sequence through a model without pipeline stages, whole or sharded by FSDP."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cosmos_core.config.schema.train import TrainConfig
from cosmos_core.models.base import LossFn, MicroBatchRunner, OutputSpec
from cosmos_core.models.offload import offload_activations

ForwardFn = Callable[[Any, OutputSpec], dict[str, Tensor]]
"""Function from a micro-batch and the requested outputs to the outputs of the model by name."""


class SequentialRunner(MicroBatchRunner):
    """Runner of micro-batches through one root module; it needs no empty micro-batches."""

    def __init__(
        self, root_module: nn.Module, forward_fn: ForwardFn, train_config: TrainConfig, device: torch.device
    ) -> None:
        self.root_modules = [root_module]
        self._run_forward, self._train_config, self._device = forward_fn, train_config, device

    def run(
        self, batch_builders: Sequence[Callable[[], Any]], loss_fn: LossFn, output_request: OutputSpec, max_rows: int
    ) -> None:
        for build_batch in batch_builders:
            batch = build_batch()
            with forward_context(self._train_config, self._device):
                outputs = self._run_forward(batch, output_request)
            loss = loss_fn(batch, outputs)
            if loss is not None and torch.is_grad_enabled():
                loss.backward()  # type: ignore[no-untyped-call]


@contextmanager
def forward_context(train_config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Run forward passes in the `with` block with the autocast and the activation offload that `train_config` sets."""
    needs_autocast = train_config.param_dtype != train_config.master_dtype
    with (
        torch.autocast(device.type, dtype=getattr(torch, train_config.param_dtype), enabled=needs_autocast),
        offload_activations() if train_config.activation_offload and torch.is_grad_enabled() else nullcontext(),
    ):
        yield
