"""The whole weights of a sharded model, one block at a time: for engines and exports, without a whole copy anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby

import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from cosmos_core.models.lora import merged, plain_names
from cosmos_core.parallel.fsdp import blocks_of, full_tensors


@torch.no_grad()
def streamed_weights(skeleton: PreTrainedModel, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of the sharded `model` under their names in a checkpoint, merged with its adapter, tied ones
    under both names: those of `named_weights`, in the same order on every rank. All ranks must call this.

    One block is whole at a time, on the device of its shards. `skeleton` is `without_weights(model)`, and is left as it
    was. A tensor that is not sharded is the live one: copy what is kept.
    """
    units = _units(skeleton)
    names = plain_names(skeleton)
    for unit, group in groupby(full_tensors(model), lambda named: _unit_of(named[0], units)):
        tensors = dict(group)
        with _with_tensors(skeleton, tensors), merged(skeleton.get_submodule(unit)):
            found = {names[key]: _tensor(skeleton, key).detach() for key in tensors if key in names}
        yield from revert_weight_conversion(skeleton, found).items()


def _units(skeleton: PreTrainedModel) -> set[str]:
    """Return the names of modules whose weights belong together: blocks, and modules that have an adapter."""
    blocks = set(blocks_of(skeleton))
    wrappers = (LoraLayer, ModulesToSaveWrapper)
    return {name for name, module in skeleton.named_modules() if module in blocks or isinstance(module, wrappers)}


def _unit_of(key: str, units: set[str]) -> str:
    """Return the outermost unit that a weight is in, or else its module."""
    parts = key.split(".")[:-1]
    paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((path for path in paths if path in units), ".".join(parts))


@contextmanager
def _with_tensors(skeleton: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the skeleton these tensors inside the block, then its own objects again, so that ties stay."""
    tables = {}
    for key in tensors:
        path, _, name = key.rpartition(".")
        module = skeleton.get_submodule(path)
        tables[key] = (module._parameters if name in module._parameters else module._buffers, name)
    kept = {key: table[name] for key, (table, name) in tables.items()}
    try:
        for key, (table, name) in tables.items():
            is_weight = isinstance(kept[key], nn.Parameter)
            table[name] = nn.Parameter(tensors[key], requires_grad=False) if is_weight else tensors[key]  # type: ignore[assignment]
        yield
    finally:
        for key, (table, name) in tables.items():
            table[name] = kept[key]  # type: ignore[assignment]


def _tensor(module: nn.Module, key: str) -> Tensor:
    path, _, name = key.rpartition(".")
    found: Tensor = getattr(module.get_submodule(path), name)
    return found
