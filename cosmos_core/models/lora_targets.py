"""Which layers an adapter changes: linear layers by name, and the stacked matrices of mixtures of experts.

transformers keeps the experts of a layer as one parameter of three dimensions; PEFT adapts it by `target_parameters`.
The names that projections have in a checkpoint stand for it here in every family. PEFT alone does that in some
families, where it then passes over shared experts and dense layers of the same names; in others it leaves experts out.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import peft
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from cosmos_core.errors import ConfigError

ALL_LINEAR = "all-linear"
_FUSED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked parameter of experts to the names of the projections in it, which a checkpoint has one by one."""
_KEY = "policy.lora.target_modules"
_OF_ADAPTERS = (".base_layer", ".lora_", ".modules_to_save", ".original_module")


class Targets(NamedTuple):
    """What of a model an adapter changes, in the words of PEFT's configuration."""

    modules: list[str] | str | None
    parameters: list[str]
    excluded: list[str]
    doubled: list[str]
    """Parameters that hold two projections: an adapter of twice the rank has room for both."""


class ExactLora(peft.LoraModel):
    """PEFT's LoRA of exactly what its configuration names, without PEFT's translation of older names."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        self._exact = config.target_modules, config.target_parameters
        config.target_modules, config.target_parameters = [], None  # nothing to translate
        super().__init__(model, config, name)

    def _check_new_adapter_config(self, config: Any) -> None:
        config.target_modules, config.target_parameters = self._exact
        super()._check_new_adapter_config(config)


def find_targets(model: nn.Module, wanted: Sequence[str] | str | None) -> Targets:
    """Return what `target_modules` of a recipe means for a model.

    Raises:
        ConfigError: a projection is named alone that the experts hold in one matrix with another.
    """
    stacked = _stacked(model)
    if wanted is None:
        return Targets(None, [], [], [])
    if isinstance(wanted, str):
        others = [name for name, each in model.named_modules() if isinstance(each, nn.Linear) and not is_product(each)]
        kinds = sorted(set(map(kind_of, stacked)))
        return Targets(ALL_LINEAR, kinds, others, [kind for kind in kinds if kind.endswith("gate_up_proj")])
    parameters: set[str] = set()
    doubled: set[str] = set()
    used: set[str] = set()
    for name in stacked:
        container, _, leaf = name.rpartition(".")
        if named := [target for target in wanted if _ends(name, target)]:
            parameters.add(_as_named(name, named))
            used |= set(named)
        for projections in _FUSED.get(leaf, ()):
            named = [t for t in wanted for each in projections if _ends(f"{container}.{each}", t)]
            if named and len(named) < len(projections):
                raise ConfigError(
                    f"{_KEY} names {named[0]!r} alone, but the experts of {kind_of(container)} hold "
                    f"{' and '.join(projections)} in one matrix; name both or neither"
                )
            if named:
                parameters.add(_as_named(name, named))
                used |= set(named)
                doubled |= {_as_named(name, named)} if len(projections) > 1 else set()
    for name, module in model.named_modules():
        if _is_matrix(module) and (named := [target for target in wanted if _ends(name, target)]):
            parameters.add(f"{_as_named(name, named)}.weight")
            used |= set(named)
    names = [name for name, module in model.named_modules() if not _is_matrix(module)]
    modules = [target for target in wanted if target not in used or any(_ends(name, target) for name in names)]
    return Targets(modules, sorted(parameters), [], sorted(doubled))


def names_of_targets(model: nn.Module) -> list[str]:
    """Return every name that `target_modules` may end with: modules, stacked parameters, and projections in them."""
    names = [name for name, _ in model.named_modules() if name]
    for name in _stacked(model):
        container, _, leaf = name.rpartition(".")
        names += [name, *(f"{container}.{each}" for group in _FUSED.get(leaf, ()) for each in group)]
    return names


def portable(config: Any, model: nn.Module) -> Any:
    """Return the configuration of an adapter, such that PEFT adapts the same layers when it loads it.

    Linear layers that PEFT would take for experts, by their names, are listed as parameters, whose adapter has the same
    names and shapes.
    """
    config, translated = copy.deepcopy(config), copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(translated, model, None)
    except ValueError:  # it misses the other half of what it takes for experts
        translated.target_modules = ()
    lost = set(config.target_modules or ()) - set(translated.target_modules or ())
    if not lost:
        return config
    config.target_modules = set(config.target_modules) - lost
    parameters, layers = set(config.target_parameters or ()), adapted_layers(model)
    modules = Counter(kind_of(name) for name, _ in model.named_modules() if ".base_layer" not in name)
    adapted = Counter(map(kind_of, layers))
    for name, layer in layers.items():
        if not isinstance(layer, ParamWrapper) and any(_ends(name, target) for target in lost):
            kind = kind_of(name)
            parameters.add(target := f"{kind if modules[kind] == adapted[kind] else name}.weight")
            (r,), (alpha,) = layer.r.values(), layer.lora_alpha.values()
            if (r, alpha) != (config.r, config.lora_alpha):
                pattern = f".*{re.escape(target.removesuffix('.weight'))}(\\.weight)?"
                config.rank_pattern[pattern], config.alpha_pattern[pattern] = r, alpha
    config.target_parameters, config.lora_dropout = parameters, 0.0  # PEFT has no dropout before a parameter
    return config


def resolve_saved(config: Any, model: nn.Module) -> None:
    """Let the configuration of a saved adapter name the layers of the model: what `portable` listed as parameters are
    linear layers again."""
    listed = set(config.target_parameters or ())
    linear = {
        name: {target for target in listed if _ends(f"{name}.weight", target)}
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    config.target_parameters = listed.difference(*linear.values())
    if not isinstance(config.target_modules, str):
        targets = find_targets(model, sorted(config.target_modules or ()))
        config.target_modules = {*(targets.modules or ()), *(name for name, found in linear.items() if found)}
        config.target_parameters |= set(targets.parameters)


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers whose weights an adapter changes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def adapted_names(model: nn.Module) -> list[str]:
    """Return the names of adapted layers, and of the parameters among them."""
    layers = adapted_layers(model)
    stacked = [(name, each.parameter_name) for name, each in layers.items() if isinstance(each, ParamWrapper)]
    return [*layers, *(f"{name.replace('.base_layer', '')}.{parameter}" for name, parameter in stacked)]


def describe_adapter(model: Any, wanted: Sequence[str] | str | None) -> str:
    """Return how many layers of each kind an adapter changes, and which of those that were `wanted` it does not."""
    layers = adapted_layers(model)
    adapted = Counter(map(_kind, layers.values(), layers))
    text = "LoRA on " + ", ".join(f"{count} {kind}" for kind, count in adapted.items())
    if wanted != ALL_LINEAR:  # each that was named is adapted, or was refused
        return text
    heads = [model.get_output_embeddings()] if isinstance(model, PreTrainedModel) else []
    left: Counter[str] = Counter()
    for name, module in model.named_modules():
        is_inside = any(marker in name for marker in _OF_ADAPTERS)
        if is_inside or isinstance(module, LoraLayer | nn.Embedding):
            continue
        if any(each.ndim >= 2 for each in module.parameters(recurse=False)):
            why = "the head" if any(module is head for head in heads) else type(module).__name__
            left[f"{kind_of(name)} ({why})"] += 1
    return text + ("; not on " + ", ".join(f"{count} {kind}" for kind, count in left.items()) if left else "")


def kind_of(name: str) -> str:
    """Return the end of a name that modules of other layers have too: what follows the number of the layer."""
    return re.split(r"(?:^|\.)\d+\.", name.replace(".base_layer", ""), maxsplit=1)[-1]


@torch.no_grad()
def is_product(layer: nn.Linear) -> bool:
    """Return whether a layer computes what a linear one does.

    Routers and grouped layers inherit from it, and return several tensors or take another shape.
    """
    if type(layer) is nn.Linear:
        return True
    weight = layer.weight
    try:
        found = layer(torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(found, Tensor) and found.shape == (1, layer.out_features)


def _kind(layer: LoraLayer, name: str) -> str:
    if not isinstance(layer, ParamWrapper):
        return kind_of(name)
    experts = f" of {layer.num_experts} experts" if layer.num_experts > 1 else ""
    return f"{kind_of(name)}.{layer.parameter_name}{experts}"


def _stacked(model: nn.Module) -> list[str]:
    """The parameters that hold a matrix for each expert of a layer."""
    return [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and getattr(module, "num_experts", None) == len(parameter)
    ]


def _as_named(name: str, targets: Sequence[str]) -> str:
    """The name without its layer, unless a target names the layer."""
    kind = kind_of(name)
    return kind if all(len(target) <= len(kind) for target in targets) else name


def _is_matrix(module: nn.Module) -> bool:
    """Whether PEFT knows no such module, but has an adapter for its weight, as for a router's."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    known = isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
    is_conv1d = type(module).__name__ == "Conv1D"
    return weight is not None and weight.ndim in {2, 3} and not known and not is_conv1d


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
