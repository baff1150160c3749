"""Models truncated to their first layers, to verify an export if memory cannot hold the whole model twice."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.parallel.fsdp import blocks_of

_FLOAT32_BYTES = 4


class FirstLayers(NamedTuple):
    """First layers of a model to keep: the name of its list of layers, and the number of kept layers."""

    path: str
    """Name of the module list that has the layers of the model."""
    num_first_layers: int
    num_layers: int


def num_fitting_layers(model: PreTrainedModel, dtype: torch.dtype | None, memory: int) -> FirstLayers | None:
    """Return the largest number of first layers, at least one, that fit into `memory` bytes as a float32 copy in
    another process; None if all layers fit.

    If the weights of the export are not float32, this process needs a second float32 copy. `dtype` is the dtype of the
    export; None: the dtype of the weights.
    """
    path = layers_path(model)
    if path is None:
        return None
    copies = 2 if any((dtype or parameter.dtype) is not torch.float32 for parameter in model.parameters()) else 1
    layers = list(model.get_submodule(path).children())
    sizes = [_num_values(layer) * _FLOAT32_BYTES * copies for layer in layers]
    needed_bytes, count = _num_values(model) * _FLOAT32_BYTES * copies - sum(sizes), 0
    while count < len(sizes) and needed_bytes + sizes[count] <= memory:
        needed_bytes, count = needed_bytes + sizes[count], count + 1
    return None if count == len(sizes) else FirstLayers(path, max(1, count), len(sizes))


@contextmanager
def keep_first_layers(model: PreTrainedModel, first: FirstLayers | None) -> Iterator[None]:
    """Remove all layers of a model except the layers in `first` during the block; `first` None: remove no layer."""
    if first is None:
        yield
        return
    path, _, name = first.path.rpartition(".")
    holder, layers = model.get_submodule(path), model.get_submodule(first.path)
    holder._modules[name] = nn.ModuleList(list(layers.children())[: first.num_first_layers])
    try:
        yield
    finally:
        holder._modules[name] = layers


def truncate_config(config: PretrainedConfig, first: FirstLayers | None) -> PretrainedConfig:
    """Change a model config to that of the first layers, and return the config; `first` None: change nothing."""
    if first is not None:
        text = config.get_text_config()
        text.num_hidden_layers = first.num_first_layers
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == first.num_layers:  # a config list with one value per layer
                setattr(text, name, value[: first.num_first_layers])
    return config


def is_removed(key: str, first: FirstLayers | None) -> bool:
    """Return True if the tensor named `key` belongs to a layer that is not kept according to `first`."""
    if first is None:
        return False
    indices = re.findall(rf"(?:^|\.){re.escape(first.path.rpartition('.')[2])}\.(\d+)\.", key)
    return any(first.num_first_layers <= int(index) < first.num_layers for index in indices)


def layers_path(model: PreTrainedModel) -> str | None:
    """Return the name of the module list that has the layers of the language model; None: the model has none."""
    config = model.config.get_text_config()
    total, blocks = getattr(config, "num_hidden_layers", 0), set(blocks_of(model))
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_text = any(child is embedding for child in module.children())
        for attribute, layers in module.named_children() if is_text else ():
            if isinstance(layers, nn.ModuleList) and len(layers) == total and set(layers) <= blocks:
                return f"{name}.{attribute}" if name else attribute
    return None


def _num_values(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
