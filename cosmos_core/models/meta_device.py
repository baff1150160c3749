"""Creation of LoRA adapters with data in a model whose base weights are on the meta device (`sharded_load.py`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.models.lora import BASE_CHANGING_INITS


def needs_base_weights(lora: LoraConfig | None) -> bool:
    """Return True if the initialisation of a LoRA adapter with these settings needs the values of the base weights."""
    return lora is not None and lora.lora_path is None and str(lora.init_lora_weights).startswith(BASE_CHANGING_INITS)


@contextmanager
def placeholders(model: nn.Module) -> Iterator[None]:
    """Replace the meta parameters of a model by placeholders on a real device during the block.

    Adapters that are created during the block then get data. Each placeholder is an expanded scalar, which needs no
    memory. If the default device is meta, as in an estimate of memory, do nothing.
    """
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    if torch.get_default_device().type != "meta":
        device = next((buffer.device for buffer in model.buffers() if not buffer.is_meta), torch.device("cpu"))
        for parameter in filter(lambda each: each.is_meta, model.parameters()):
            scalar = torch.zeros((), dtype=parameter.dtype, device=device)
            replacements[parameter] = nn.Parameter(scalar.expand(parameter.shape), parameter.requires_grad)
    _replace_parameters(model, replacements)
    try:
        yield
    finally:
        for parameter, replacement in replacements.items():
            parameter.requires_grad_(replacement.requires_grad)
        _replace_parameters(model, {replacement: parameter for parameter, replacement in replacements.items()})


def _replace_parameters(model: nn.Module, replacements: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacements.get(parameter, parameter)
