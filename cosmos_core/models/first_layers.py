"""Models truncated to their first layers, to verify an export if memory cannot hold the whole model twice."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from cosmos_core.parallel.fsdp import transformer_blocks

_FLOAT32_BYTES = 4


class FirstLayers(NamedTuple):
    """Selection of the first layers of a model, which `keep_first_layers` keeps."""

    layers_path: str
    """Name of the module list that has the layers of the model."""
    num_first_layers: int
    num_layers: int


def select_first_layers(model: PreTrainedModel, dtype: torch.dtype | None, memory_bytes: int) -> FirstLayers | None:
    """Return with how many of its first layers the export of a model is verified: at least one, and as many as fit into
    `memory_bytes` bytes. None: all layers fit, or the model has no list of layers.

    Memory is needed for a float32 copy in the process that loads the export and, unless all exported weights are
    float32, for another copy in this process. `dtype`: dtype of the exported weights; None: that of each weight.
    """
    path = find_layers_path(model)
    if path is None:
        return None
    num_copies = 2 if any((dtype or parameter.dtype) is not torch.float32 for parameter in model.parameters()) else 1
    layers = list(model.get_submodule(path).children())
    layer_bytes = [_count_parameters(layer) * _FLOAT32_BYTES * num_copies for layer in layers]
    required_bytes, num_kept_layers = _count_parameters(model) * _FLOAT32_BYTES * num_copies - sum(layer_bytes), 0
    while num_kept_layers < len(layer_bytes) and required_bytes + layer_bytes[num_kept_layers] <= memory_bytes:
        required_bytes, num_kept_layers = required_bytes + layer_bytes[num_kept_layers], num_kept_layers + 1
    return None if num_kept_layers == len(layer_bytes) else FirstLayers(path, max(1, num_kept_layers), len(layer_bytes))


@contextmanager
def keep_first_layers(model: PreTrainedModel, first_layers: FirstLayers | None) -> Iterator[None]:
    """Remove all layers of a model except for `first_layers` during the `with` block; None: remove no layer."""
    if first_layers is None:
        yield
        return
    parent_path, _, child_name = first_layers.layers_path.rpartition(".")
    parent_module, layers = model.get_submodule(parent_path), model.get_submodule(first_layers.layers_path)
    parent_module._modules[child_name] = nn.ModuleList(list(layers.children())[: first_layers.num_first_layers])
    try:
        yield
    finally:
        parent_module._modules[child_name] = layers


def truncate_config(config: PretrainedConfig, first_layers: FirstLayers | None) -> PretrainedConfig:
    """Reduce the number of layers in a model config to `first_layers` (None: all layers), and return the config."""
    if first_layers is not None:
        text_config = config.get_text_config()
        text_config.num_hidden_layers = first_layers.num_first_layers
        for name, value in list(vars(text_config).items()):
            # Truncate a list with one value per layer, because the model now has fewer layers.
            if isinstance(value, list) and len(value) == first_layers.num_layers:
                setattr(text_config, name, value[: first_layers.num_first_layers])
    return config


def is_layer_removed(name: str, first_layers: FirstLayers | None) -> bool:
    """Return True if the tensor named `name` belongs to a layer that is not kept according to `first_layers`."""
    if first_layers is None:
        return False
    layer_indices = re.findall(rf"(?:^|\.){re.escape(first_layers.layers_path.rpartition('.')[2])}\.(\d+)\.", name)
    return any(first_layers.num_first_layers <= int(index) < first_layers.num_layers for index in layer_indices)


def find_layers_path(model: PreTrainedModel) -> str | None:
    """Return the name of the module list that has the layers of the language model; None: the model has none."""
    config = model.config.get_text_config()
    num_layers, transformer_block_set = getattr(config, "num_hidden_layers", 0), set(transformer_blocks(model))
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        is_embedding_parent = any(child_module is embedding for child_module in module.children())
        for child_name, layers in module.named_children() if is_embedding_parent else ():
            if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and set(layers) <= transformer_block_set:
                return f"{name}.{child_name}" if name else child_name
    return None


def _count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
