"""A model cut to its first layers, with which an export is verified if memory cannot hold the whole model twice."""

from __future__ import annotations

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
    """Number of layers to keep, and where the layers are."""

    path: str
    """Name of the module list of layers in the model."""
    num_kept: int
    num_layers: int


def fit_layers(model: PreTrainedModel, dtype: torch.dtype | None, memory: int) -> FirstLayers | None:
    """Return the first layers, at least one, whose float32 copy for another process fits into `memory` bytes.

    Return None if all layers fit. Weights that are not float32 in `dtype` (None: their own dtype) need a second copy,
    in this process.
    """
    path = _layers_path(model)
    if path is None:
        return None
    copies = 2 if any((dtype or parameter.dtype) is not torch.float32 for parameter in model.parameters()) else 1
    layers = list(model.get_submodule(path).children())
    sizes = [_num_values(layer) * _FLOAT32_BYTES * copies for layer in layers]
    needed, count = _num_values(model) * _FLOAT32_BYTES * copies - sum(sizes), 0
    while count < len(sizes) and needed + sizes[count] <= memory:
        needed, count = needed + sizes[count], count + 1
    return None if count == len(sizes) else FirstLayers(path, max(1, count), len(sizes))


@contextmanager
def keep_first_layers(model: PreTrainedModel, first: FirstLayers | None) -> Iterator[None]:
    """Remove all but the first layers of a model inside the block; None: keep all."""
    if first is None:
        yield
        return
    path, _, name = first.path.rpartition(".")
    holder, layers = model.get_submodule(path), model.get_submodule(first.path)
    holder._modules[name] = nn.ModuleList(list(layers.children())[: first.num_kept])
    try:
        yield
    finally:
        holder._modules[name] = layers


def cut_config(config: PretrainedConfig, first: FirstLayers | None) -> PretrainedConfig:
    """Change a config to that of the first layers, and return it; None: change nothing."""
    if first is not None:
        text = config.get_text_config()
        text.num_hidden_layers = first.num_kept
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == first.num_layers:  # one entry per layer
                setattr(text, name, value[: first.num_kept])
    return config


def is_removed(key: str, first: FirstLayers | None) -> bool:
    """Return True if a tensor belongs to a removed layer."""
    if first is None:
        return False
    indices = re.findall(rf"(?:^|\.){re.escape(first.path.rpartition('.')[2])}\.(\d+)\.", key)
    return any(first.num_kept <= int(index) < first.num_layers for index in indices)


def _layers_path(model: PreTrainedModel) -> str | None:
    """Return the name of the module list of text layers; None if the model has no such list."""
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
