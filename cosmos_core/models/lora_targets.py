"""Select the layers of a LoRA adapter: linear layers by name, and stacked matrices of mixtures of experts.

transformers stores the experts of a layer as one (stacked) parameter with three dimensions, which PEFT adapts through
`target_parameters`. This module selects such a parameter by the names of its projections in checkpoints. PEFT itself
translates these names in some model families only, and then skips shared experts and dense layers of the same names.
"""

import copy
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import peft
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.utils.transformers_weight_conversion import (
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cosmos_core.errors import ConfigError
from cosmos_core.models.adapter import PEFT_PREFIX

ALL_LINEAR = "all-linear"
_EXPERT_PROJECTIONS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""Names in checkpoints of the projections that a stacked parameter of experts contains, in one or several naming
schemes, by the name of the parameter. In checkpoints, projections are separate tensors."""
_ADAPTER_NAME_COMPONENTS = (".base_layer", ".lora_", ".modules_to_save", ".original_module")


class AdapterTargets(NamedTuple):
    """Layers that a LoRA adapter changes, as settings of PEFT's `LoraConfig`."""

    modules: list[str] | str | None
    parameters: list[str]
    excluded_modules: list[str]
    double_rank_names: list[str]
    """Names of stacked parameters that contain two projections and therefore get an adapter of twice the rank."""


class ExactTargetLora(peft.LoraModel):
    """LoRA model of PEFT for exactly the layers in its configuration, without PEFT's translation of older names."""

    def __init__(self, model: nn.Module, config: Any, name: str) -> None:
        self._exact_target_names = config.target_modules, config.target_parameters
        # Hide the targets from PEFT's constructor, which would translate their names.
        config.target_modules, config.target_parameters = [], None
        super().__init__(model, config, name)

    def _check_new_adapter_config(self, config: Any) -> None:
        config.target_modules, config.target_parameters = self._exact_target_names
        super()._check_new_adapter_config(config)


def find_lora_targets(model: nn.Module, target_modules: Sequence[str] | str | None) -> AdapterTargets:
    """Return the layers of a model that the setting `target_modules` of a recipe selects; raise ConfigError if the
    setting names only one of two projections that experts store in one matrix."""
    if target_modules is None:
        return AdapterTargets(None, [], [], [])
    stacked_parameters = _find_stacked_parameters(model)
    if isinstance(target_modules, str):
        linear_modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        excluded_names = {*_find_bypassed_layers(model), *find_inseparable_layers(model)}
        excluded_modules = [
            name for name, layer in linear_modules if name in excluded_names or not is_plain_linear(layer)
        ]
        parameter_names = sorted(set(map(get_name_within_layer, stacked_parameters)))
        double_rank_parameters = [name for name in parameter_names if name.endswith("gate_up_proj")]
        return AdapterTargets(ALL_LINEAR, parameter_names, excluded_modules, double_rank_parameters)

    def find_matching_targets(*names: str) -> list[str]:
        return [target for target in target_modules for name in names if _has_name_suffix(name, target)]

    target_parameters: set[str] = set()
    double_rank_names: set[str] = set()
    matched_targets: set[str] = set()
    for name in stacked_parameters:
        parent_name, _, child_name = name.rpartition(".")
        for projections in ((child_name,), *_EXPERT_PROJECTIONS.get(child_name, ())):
            matching_names = find_matching_targets(*(f"{parent_name}.{projection}" for projection in projections))
            if matching_names and len(matching_names) < len(projections):
                raise ConfigError(
                    f"policy.lora.target_modules names {matching_names[0]!r} alone, but the experts of "
                    f"{get_name_within_layer(parent_name)} "
                    f"hold {' and '.join(projections)} in one matrix; name both or neither"
                )
            if matching_names:
                target_parameters.add(_shorten_parameter_name(name, matching_names))
                matched_targets |= set(matching_names)
                double_rank_names |= {_shorten_parameter_name(name, matching_names)} if len(projections) > 1 else set()
    module_names = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_adaptable_module = isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d | Conv1D)
        # Of modules for which PEFT has no adapter class, such as a router, it can adapt only a matrix called `weight`.
        if weight is None or weight.ndim not in {2, 3} or is_adaptable_module:
            module_names.append(name)
        elif matching_names := find_matching_targets(name):
            target_parameters.add(f"{_shorten_parameter_name(name, matching_names)}.weight")
            matched_targets |= set(matching_names)
    module_targets = [
        t for t in target_modules if t not in matched_targets or any(_has_name_suffix(name, t) for name in module_names)
    ]
    return AdapterTargets(module_targets, sorted(target_parameters), [], sorted(double_rank_names))


def find_inseparable_layers(model: nn.Module) -> dict[str, str]:
    """Return the linear layers whose LoRA adapters could not be exported, by name, each with a text about the reason.
    Either several layers share the weight, into which all their adapters would be merged, or PEFT would not find the
    adapter on loading, because PEFT changes the names of the adapter's tensors."""
    linear_layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    num_layers_by_weight = Counter(id(layer.weight) for layer in linear_layers.values())
    tensor_key_by_layer = {name: f"{PEFT_PREFIX}{name}.lora_A.weight" for name in linear_layers}
    probe_state_dict = {key: torch.empty(0) for key in tensor_key_by_layer.values()}
    converted_state_dict = convert_peft_adapter_state_dict_for_transformers(model, peft.LoraConfig(), probe_state_dict)
    inseparable_reason_by_layer = {
        name: "whose adapter PEFT does not find again"
        for name, key in tensor_key_by_layer.items()
        if key not in converted_state_dict
    }
    for name, layer in linear_layers.items():
        if num_layers_by_weight[id(layer.weight)] > 1:
            inseparable_reason_by_layer[name] = f"whose weight {num_layers_by_weight[id(layer.weight)]} layers share"
    return inseparable_reason_by_layer


def possible_target_names(model: nn.Module) -> list[str]:
    """Return all names that the setting `target_modules` can contain: modules, stacked parameters of experts, and their
    projections."""
    target_names = [name for name, _ in model.named_modules() if name]
    for name in _find_stacked_parameters(model):
        parent_name, _, child_name = name.rpartition(".")
        target_names.append(name)
        projections = itertools.chain(*_EXPERT_PROJECTIONS.get(child_name, ()))
        target_names += [f"{parent_name}.{projection}" for projection in projections]
    return target_names


def match_target_names(model: nn.Module, target_regex: str) -> tuple[str, ...]:
    """Return the possible target names that `target_regex` matches as a whole, as PEFT matches a `target_modules` that
    is a string; raise ConfigError if there are none."""
    target_names = possible_target_names(model)
    if not (matched_names := tuple(name for name in target_names if re.fullmatch(target_regex, name))):
        raise ConfigError(
            f"policy.lora.target_modules = {target_regex!r} matches no whole name, such as {target_names[-1]!r}; give "
            f"a list to match the ends of names"
        )
    return matched_names


def make_portable_config(config: Any, model: nn.Module) -> Any:
    """Return a copy of the adapter configuration `config` with which PEFT itself, when it loads the adapter, adapts the
    same layers of `model`. PEFT rewrites the names of some linear layers to names of fused experts; these are listed as
    target parameters, whose names PEFT does not rewrite. The adapter's tensors keep their names and shapes."""
    config, rewritten_config = copy.deepcopy(config), copy.deepcopy(config)
    try:
        convert_peft_config_for_transformers(rewritten_config, model, None)
    except ValueError:  # raised if the names have only one of the gate and up projections of experts
        rewritten_config.target_modules = ()
    rewritten_targets = set(config.target_modules or ()) - set(rewritten_config.target_modules or ())
    if not rewritten_targets:
        return config
    config.target_modules = set(config.target_modules) - rewritten_targets
    parameter_names, adapted_layer_by_name = set(config.target_parameters or ()), find_adapted_layers(model)
    module_names = [name for name, _ in model.named_modules() if ".base_layer" not in name]
    num_modules_by_name = Counter(map(get_name_within_layer, module_names))
    num_adapted_by_name = Counter(map(get_name_within_layer, adapted_layer_by_name))
    for name, layer in adapted_layer_by_name.items():
        if not isinstance(layer, ParamWrapper) and any(_has_name_suffix(name, target) for target in rewritten_targets):
            name_in_layer = get_name_within_layer(name)
            are_all_layers_adapted = num_modules_by_name[name_in_layer] == num_adapted_by_name[name_in_layer]
            parameter_names.add(f"{name_in_layer if are_all_layers_adapted else name}.weight")
            (rank,), (lora_alpha,) = layer.r.values(), layer.lora_alpha.values()
            if (rank, lora_alpha) != (config.r, config.lora_alpha):
                layer_pattern = f"{re.escape(name)}(\\.weight)?"
                config.rank_pattern[layer_pattern], config.alpha_pattern[layer_pattern] = rank, lora_alpha
    # Set the dropout to 0, because PEFT refuses dropout for adapters of parameters.
    config.target_parameters, config.lora_dropout = parameter_names, 0.0
    return config


def resolve_saved_targets(config: Any, model: nn.Module) -> None:
    """Change the configuration of a saved adapter so that the layers of `model` have the names that
    `find_lora_targets` uses. Linear layers that `make_portable_config` listed as parameters become modules again."""
    saved_target_parameters = set(config.target_parameters or ())
    targets_by_layer = {
        name: {target for target in saved_target_parameters if _has_name_suffix(f"{name}.weight", target)}
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    config.target_parameters = saved_target_parameters.difference(*targets_by_layer.values())
    if not isinstance(config.target_modules, str):
        adapter_targets = find_lora_targets(model, sorted(config.target_modules or ()))
        linear_layer_names = (name for name, matching_targets in targets_by_layer.items() if matching_targets)
        config.target_modules = {*(adapter_targets.modules or ()), *linear_layer_names}
        config.target_parameters |= set(adapter_targets.parameters)


def find_adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers of a model whose weights a LoRA adapter changes, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def find_layers_by_peft_name(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the layers whose weights an adapter changes. The key of a layer is the name that PEFT compares with rank
    and alpha patterns: the name of the layer or, for stacked experts, of the parameter."""
    return {
        f"{name.replace('.base_layer', '')}.{layer.parameter_name}" if isinstance(layer, ParamWrapper) else name: layer
        for name, layer in find_adapted_layers(model).items()
    }


def write_pattern_per_layer(model: Any, config: Any) -> None:
    """Replace the rank and alpha patterns in `config` by one pattern per layer if their order matters: PEFT uses the
    first matching pattern, but sorts the patterns of a saved adapter."""
    if any(list(patterns) != sorted(patterns) for patterns in (config.rank_pattern, config.alpha_pattern)):
        layers = {re.escape(name): layer for name, layer in find_layers_by_peft_name(model).items()}
        config.rank_pattern = {name: next(iter(layer.r.values())) for name, layer in layers.items()}
        config.alpha_pattern = {name: next(iter(layer.lora_alpha.values())) for name, layer in layers.items()}


def describe_adapter(model: Any, target_modules: Sequence[str] | str | None) -> str:
    """Return a text about the adapter of a model: the numbers of adapted layers by their name within a layer of the
    model. For the setting `all-linear`, the text also lists the layers that the adapter does not change."""
    layers = find_adapted_layers(model)
    num_adapted_by_type: Counter[str] = Counter()
    layer_types = {name: re.sub(r"(^|\.)\d+\.", r"\1*.", name.replace(".base_layer", ""), count=1) for name in layers}
    # Only if layers of several stacks, such as a language model and a vision tower, are adapted: name the stack.
    if len({layer_type.partition("*")[0] for layer_type in layer_types.values() if "*" in layer_type}) < 2:
        layer_types = {name: get_name_within_layer(name) for name in layers}
    for name, layer in layers.items():
        parameter_text = f".{layer.parameter_name}" if isinstance(layer, ParamWrapper) else ""
        if isinstance(layer, ParamWrapper) and layer.num_experts > 1:
            parameter_text += f" of {layer.num_experts} experts"
        num_adapted_by_type[layer_types[name] + parameter_text] += 1
    adapter_text = "LoRA on " + ", ".join(f"{count} {layer_type}" for layer_type, count in num_adapted_by_type.items())
    if target_modules != ALL_LINEAR:  # the user chose layers by name, so unadapted layers are not listed
        return adapter_text
    output_head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    num_unadapted_by_type: Counter[str] = Counter()
    for name, module in model.named_modules():
        is_adapter_module = any(name_component in name for name_component in _ADAPTER_NAME_COMPONENTS)
        if is_adapter_module or isinstance(module, LoraLayer | nn.Embedding):
            continue
        if any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False)):
            module_type = "the head" if module is output_head else type(module).__name__
            num_unadapted_by_type[f"{get_name_within_layer(name)} ({module_type})"] += 1
    unadapted_description = ", ".join(f"{count} {layer_type}" for layer_type, count in num_unadapted_by_type.items())
    return adapter_text + f"; not on {unadapted_description}" * bool(num_unadapted_by_type)


def get_name_within_layer(name: str) -> str:
    """Return the part of a module name after the layer number; this part is the same in all layers."""
    return re.split(r"(?:^|\.)\d+\.", name.replace(".base_layer", ""), maxsplit=1)[-1]


@torch.no_grad()
def is_plain_linear(layer: nn.Linear) -> bool:
    """Return True if a linear layer computes a plain matrix product. Routers and grouped layers also inherit from
    `nn.Linear`, but return several tensors or expect another shape."""
    if type(layer) is nn.Linear:
        return True
    weight = layer.weight
    try:
        layer_output = layer(torch.zeros(1, layer.in_features, dtype=weight.dtype, device=weight.device))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return isinstance(layer_output, Tensor) and layer_output.shape == (1, layer.out_features)


def _find_bypassed_layers(model: nn.Module) -> Iterator[str]:
    """Yield the names of linear layers whose parent module reads their weights, so that an adapter has no effect:
    layers that are never called, and layers of a recurrent module, which kernels on a GPU bypass."""
    for name, module in model.named_modules():
        linear_names = [child_name for child_name, child in module.named_children() if isinstance(child, nn.Linear)]
        source_code = (
            _read_source(cast(Any, type(module))) if linear_names and isinstance(model, PreTrainedModel) else ""
        )
        for layer_name in linear_names:
            is_weight_read = re.search(rf"self\.{layer_name}\.(weight|bias)\b(?!\.(dtype|device|shape))", source_code)
            if is_weight_read and (hasattr(module, "conv1d") or f"self.{layer_name}(" not in source_code):
                yield f"{name}.{layer_name}"


@cache
def _read_source(module_class: type[nn.Module]) -> str:
    """Return the source code of a module class; empty for a class that is in no file. `inspect` parses the whole file
    for each class, and models with experts have thousands of modules of one class."""
    try:
        return inspect.getsource(module_class)
    except (OSError, TypeError):
        return ""


def _find_stacked_parameters(model: nn.Module) -> list[str]:
    return [
        f"{module_name}.{parameter_name}"
        for module_name, module in model.named_modules()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and getattr(module, "num_experts", None) == len(parameter)
    ]


def _shorten_parameter_name(name: str, targets: Sequence[str]) -> str:
    """Return the part of a parameter name after the layer number or, if one of the selected names `targets` is longer
    than this part, the whole name."""
    name_in_layer = get_name_within_layer(name)
    return name_in_layer if all(len(target) <= len(name_in_layer) for target in targets) else name


def _has_name_suffix(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
