"""LoRA (arXiv 2106.09685) through PEFT: adapters are injected into a model, so that the rest of the program keeps using
the same model object.

A model has at most one adapter. Rollout engines, exports and checks get merged weights through `merge_adapter`. Base
weights and adapters have the dtype of the model.
"""

import copy
import logging
import math
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import get_pattern_key
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models.adapter import PEFT_PREFIX, load_adapter_config, load_adapter_weights
from cosmos_core.models.lora_targets import (
    ALL_LINEAR,
    ExactTargetLora,
    describe_adapter,
    find_adapted_layers,
    find_inseparable_layers,
    find_layers_by_peft_name,
    find_lora_targets,
    make_portable_config,
    match_target_names,
    possible_target_names,
    resolve_saved_targets,
    write_pattern_per_layer,
)
from cosmos_core.registry import suggest_names

logger = logging.getLogger(__name__)

ADAPTER_FOLDER = "lora"
"""Name of the subfolder with the adapter in an export, next to the merged weights."""
_ADAPTER_NAME = "default"
_INITS_CHANGING_BASE = ("pissa", "olora")
"""Prefixes of the names of LoRA initialisations that move a part of the base weights into the adapter."""


def needs_base_weights(lora: LoraConfig | None) -> bool:
    """Return True if a LoRA adapter with the settings `lora` is initialised from the values of the base weights."""
    return lora is not None and lora.lora_path is None and str(lora.init_lora_weights).startswith(_INITS_CHANGING_BASE)


def add_adapter(model: Any, lora: LoraConfig, target_modules: Sequence[str] = ()) -> None:
    """Add a new adapter, or the saved adapter in the folder `lora.lora_path`, to a model, and freeze all other weights.

    The initialisation uses torch's global random generator. `target_modules` are the modules to adapt if the recipe
    names none; empty: the default modules of PEFT. Raise ConfigError if the name of a target matches no module, or
    PEFT refuses a setting; raise ModelError if the saved adapter is missing, or belongs to another model.
    """
    if lora.target_modules is None and lora.lora_path is None and target_modules:
        lora = lora.copy_with(target_modules=tuple(target_modules))
    target_modules = lora.target_modules if isinstance(lora.target_modules, tuple) else ()
    modules_to_save = tuple(lora.modules_to_save or ())
    _check_targets("target_modules", target_modules, possible_target_names(model), r"(^|.*\.){}")
    if isinstance(lora.target_modules, str) and lora.target_modules != ALL_LINEAR and lora.lora_path is None:
        lora = lora.copy_with(target_modules=match_target_names(model, lora.target_modules))
    _check_targets("modules_to_save", modules_to_save, [name for name, _ in model.named_modules() if name], r".*{}")
    tied_module_names, inseparable_layers = _find_tied_modules(model), find_inseparable_layers(model)
    if lora.lora_path is None:
        config = _build_peft_config(model, lora, any(name.endswith(modules_to_save) for name in tied_module_names))
    else:
        config = load_adapter_config(lora, tied_module_names)
        resolve_saved_targets(config, model)
    config.base_model_name_or_path = getattr(model, "name_or_path", None)
    config.revision = getattr(model.config, "_commit_hash", None)
    try:
        with warnings.catch_warnings(action="ignore"):  # PEFT warns of problems that this function checks itself
            ExactTargetLora(model, config, _ADAPTER_NAME)
    except (ValueError, TypeError, re.error) as error:
        if lora.target_modules is None and lora.lora_path is None:
            problem = f"policy.lora.target_modules is left out, and PEFT has none for {type(model).__name__}"
            raise ConfigError(f"{problem}; give 'all-linear' or a list") from error
        key = "policy.lora" + f".lora_path = '{lora.lora_path}'" * bool(lora.lora_path)
        raise ConfigError(
            f"{key}: PEFT refuses {type(model).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
    layers_by_name: Mapping[str, Any] = find_adapted_layers(model)
    if tied_targets := [name for name in tied_module_names if name in layers_by_name]:
        setting_name = f"lora_path = '{lora.lora_path}'" if lora.lora_path else "target_modules"
        raise ConfigError(
            f"policy.lora.{setting_name} names {tied_targets[0]!r}, whose weight is {' and '.join(tied_module_names)} "
            f"in one; name it in modules_to_save{' of a new adapter' if lora.lora_path else ''}, which trains it whole"
        )
    if refused_names := [name for name in layers_by_name if name in inseparable_layers]:
        remedy = "leave it out of target_modules" if lora.lora_path is None else "train a new adapter"
        raise ConfigError(f"policy.lora changes {refused_names[0]!r}, {inseparable_layers[refused_names[0]]}; {remedy}")
    logger.info("policy.lora: %s", describe_adapter(model, lora.target_modules))
    for key, patterns in (("r_pattern", lora.r_pattern), ("alpha_pattern", lora.alpha_pattern)):
        _check_targets(key, patterns or {}, find_layers_by_peft_name(model), r"(.*\.)?({})", True)
    write_pattern_per_layer(model, config)
    # Dropout on the output head is refused: the head runs again in the backward pass, with another dropout mask.
    if lora.lora_dropout and isinstance(_get_embedding_and_head(model)[1], LoraLayer):
        raise ConfigError(
            f"policy.lora.lora_dropout = {lora.lora_dropout} excludes an adapter on the head; leave it out of "
            f"target_modules or set lora_dropout = 0.0"
        )
    if lora.lora_path is not None:
        load_adapter_weights(model, lora)
    if needs_base_weights(lora):
        _store_initial_factors(layers_by_name)


def _store_initial_factors(layers_by_name: Mapping[str, Any]) -> None:
    """Store the initial LoRA factors A and B of each layer, because their initialisation changed the base weights;
    `save_adapter` needs them. Raise ConfigError if a rank exceeds a dimension of its layer: the factors are then
    smaller than the rank, and PEFT would not load them."""
    for name, layer in layers_by_name.items():
        if (rank := layer.r[_ADAPTER_NAME]) > (max_rank := min(layer.get_base_layer().weight.shape)):
            raise ConfigError(
                f"policy.lora.r = {rank}: init_lora_weights decomposes {name}, whose rank is at most {max_rank}; "
                f"lower r, or give this layer a rank in r_pattern"
            )
        for factor_name in ("A", "B"):
            initial_factor = getattr(layer, f"lora_{factor_name}")[_ADAPTER_NAME].weight.detach().clone()
            layer.register_buffer(f"initial_{factor_name}", initial_factor, persistent=False)


def has_lora_adapter(model: nn.Module) -> bool:
    """Return whether PEFT has added an adapter to the model."""
    return hasattr(model, "peft_config")


def has_changed_base(model: nn.Module) -> bool:
    """Return True if the initialisation of the model's adapter (PiSSA, OLoRA) changed the base weights."""
    return any(buffer_name.endswith(".initial_A") for buffer_name, _ in model.named_buffers())


@contextmanager
def merge_adapter(model: nn.Module) -> Iterator[None]:
    """Merge the LoRA adapter of a model or a layer into the base weights during the `with` block; without an adapter,
    do nothing.

    After the `with` block, the base weights are restored from a copy: subtracting the adapter would leave rounding
    errors.
    """
    layers = find_adapted_layers(model).values()
    base_weights = {parameter: parameter.data for layer in layers for parameter in layer.get_base_layer().parameters()}
    try:
        with torch.no_grad():
            for layer in layers:
                # Use `safe_merge`, which writes to new tensors, so that the base weights can be restored.
                layer.merge(safe_merge=True)
        # Replace `get_parameter`, because `revert_weight_conversion` of transformers uses names without the adapter.
        model.__dict__["get_parameter"] = lambda name: merged_state_dict(model)[name]
        yield
    finally:
        model.__dict__.pop("get_parameter", None)
        for parameter, original_weight in base_weights.items():
            parameter.data = original_weight
        for layer in layers:
            layer.merged_adapters.clear()


def merged_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model with a LoRA adapter, under the keys of the model without the adapter. Call this
    function inside `merge_adapter`, so that the weights include the adapter."""
    base_model_keys = map_keys_to_base_model(model)
    return {base_model_keys[key]: tensor for key, tensor in model.state_dict().items() if base_model_keys[key]}


def map_keys_to_base_model(model: nn.Module) -> dict[str, str]:
    """Return for each key of a model's state dict the key of the same tensor in the model without the adapter; empty
    for tensors of the LoRA adapter."""
    peft_wrapper_classes = (LoraLayer, ModulesToSaveWrapper)
    wrapper_names = {name for name, module in model.named_modules() if isinstance(module, peft_wrapper_classes)}
    return {key: _remove_wrapper_names(key, wrapper_names) for key in model.state_dict()}


def trains_only_linear_factors(model: nn.Module) -> bool:
    """Return True if training changes only LoRA factors of linear layers, and all other weights stay unchanged."""
    if not has_lora_adapter(model) or has_changed_base(model):
        return False
    config: Any = model.peft_config[_ADAPTER_NAME]  # type: ignore[union-attr,index]
    settings_beyond_factors = (config.modules_to_save, config.use_dora, config.lora_bias, config.bias != "none")
    return not any(settings_beyond_factors) and all(
        isinstance(layer.get_base_layer(), nn.Linear) and layer not in _get_embedding_and_head(model)
        for layer in find_adapted_layers(model).values()
    )


def add_adapter_like(model: Any, adapted_model: Any) -> None:
    """Add an adapter to `model` with the settings of the adapter of `adapted_model`; the caller loads the weights."""
    with torch.random.fork_rng():
        ExactTargetLora(model, copy.deepcopy(adapted_model.peft_config[_ADAPTER_NAME]), _ADAPTER_NAME)


def get_lora_scales(model: nn.Module) -> dict[str, float]:
    """Return for each layer with LoRA factors, by name, the factor that scales their product B A."""
    return {name: layer.scaling[_ADAPTER_NAME] for name, layer in find_adapted_layers(model).items()}


def split_factor_key(key: str) -> tuple[str, str]:
    """Split the state dict key of a LoRA factor into the name of its layer and `A` or `B`."""
    layer_name, _, factor_name = key.rpartition(".lora_")
    return layer_name, factor_name[0]


def save_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapter of a model to a folder in PEFT's format. `PeftModel.from_pretrained(base, folder)` then loads
    the adapter onto the original base model."""
    config = make_portable_config(model.peft_config[_ADAPTER_NAME], model)
    config.inference_mode = True
    # Sets of names are sorted before they are saved, because the order of a set differs between processes.
    for name in ("target_modules", "target_parameters", "modules_to_save", "exclude_modules"):
        if isinstance(module_names := getattr(config, name), (set, list)):
            setattr(config, name, sorted(module_names))
    lora_tensors = peft.get_peft_model_state_dict(model, adapter_name=_ADAPTER_NAME, save_embedding_layers=False)
    if has_changed_base(model):
        lora_tensors = _rebase_adapter_on_original(model, lora_tensors, config)
    folder.mkdir(parents=True)
    # Each tensor is copied, because safetensors refuses tensors that share memory, such as tied weights.
    tensors = {PEFT_PREFIX + name: t.detach().to("cpu", copy=True).contiguous() for name, t in lora_tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


def _build_peft_config(model: Any, lora_config: LoraConfig, should_tie_weights: bool) -> peft.LoraConfig:
    adapter_targets = find_lora_targets(model, lora_config.target_modules)
    if adapter_targets.parameters and needs_base_weights(lora_config):
        raise ConfigError(
            f"policy.lora.init_lora_weights = {lora_config.init_lora_weights!r} starts from linear layers, and "
            f"{adapter_targets.parameters[0]} is none; use true, or leave it out of target_modules"
        )
    rank_pattern, alpha_pattern = dict(lora_config.r_pattern or {}), dict(lora_config.alpha_pattern or {})
    double_rank_names = adapter_targets.double_rank_names
    if rank_pattern or alpha_pattern:  # list all layers, because each may have its own rank or alpha
        double_rank_names = [name for name in possible_target_names(model) if name.endswith(tuple(double_rank_names))]
    # Two stacked projections need twice the rank, at an unchanged scale: alpha / r, or alpha / sqrt(r).
    alpha_factor = math.sqrt(2) if lora_config.use_rslora else 2
    rank_overrides, alpha_overrides = dict[str, int](), dict[str, float]()
    for name in double_rank_names:
        rank = rank_pattern.get(get_pattern_key(list(rank_pattern), name), lora_config.r)
        alpha = alpha_pattern.get(get_pattern_key(list(alpha_pattern), name), lora_config.lora_alpha)
        rank_overrides[f".*{re.escape(name)}"], alpha_overrides[f".*{re.escape(name)}"] = 2 * rank, alpha_factor * alpha
    config_class: Any = peft.LoraConfig  # use `Any`, because PEFT's type annotations are too narrow for these arguments
    return config_class(
        task_type="CAUSAL_LM" if isinstance(model, PreTrainedModel) else None,
        r=lora_config.r,
        lora_alpha=lora_config.lora_alpha,
        lora_dropout=lora_config.lora_dropout,
        target_modules=adapter_targets.modules,
        target_parameters=adapter_targets.parameters or None,
        exclude_modules=adapter_targets.excluded_modules or None,
        use_rslora=lora_config.use_rslora,
        modules_to_save=list(lora_config.modules_to_save) if lora_config.modules_to_save else None,
        ensure_weight_tying=should_tie_weights,
        alpha_pattern=alpha_overrides | alpha_pattern,
        rank_pattern=rank_overrides | rank_pattern,
        # On the meta device use True, the default initialisation: others, such as PiSSA, read the values of weights.
        init_lora_weights=next(model.parameters()).is_meta or lora_config.init_lora_weights,
    )


def _check_targets(
    key: str, targets: Iterable[str], names: Collection[str], pattern_template: str, are_targets_regexes: bool = False
) -> None:
    """Raise ConfigError if one of the `targets`, inserted into the regex `pattern_template`, matches none of the module
    names `names`. With `are_targets_regexes`, targets are inserted unescaped. `key` is the key of `policy.lora` for the
    error message."""
    for target_name in targets:
        pattern = pattern_template.format(target_name if are_targets_regexes else re.escape(target_name))
        if not any(re.fullmatch(pattern, name) for name in names):
            suggestion = suggest_names(target_name, sorted({name.rpartition(".")[2] for name in names}))
            raise ConfigError(f"policy.lora.{key} = {target_name!r} matches no module{suggestion}")


def _get_embedding_and_head(model: nn.Module) -> tuple[Any, Any]:
    """Return the input embedding and the output head of a language model; None for a missing module."""
    if not isinstance(model, PreTrainedModel):
        return None, None
    return model.get_input_embeddings(), model.get_output_embeddings()


def _find_tied_modules(model: nn.Module) -> list[str]:
    """Return the names of the input embedding and the output head if they share a weight, otherwise an empty list."""
    embedding, output_head = _get_embedding_and_head(model)
    if embedding is None or output_head is None or embedding.weight is not output_head.weight:
        return []
    return [name for name, module in model.named_modules() if module in (embedding, output_head)]


def _remove_wrapper_names(key: str, wrapper_names: set[str]) -> str:
    """Return a state dict key without the components that PEFT's wrappers add, such as `base_layer`; empty for a tensor
    of the adapter. `wrapper_names` are the names of the wrapped modules."""
    key_components, remaining_key_components, key_component_index = key.split("."), [], 0
    while key_component_index < len(key_components):
        if ".".join(key_components[:key_component_index]) not in wrapper_names:
            remaining_key_components.append(key_components[key_component_index])
        elif key_components[key_component_index : key_component_index + 2] == ["modules_to_save", _ADAPTER_NAME]:
            key_component_index += 1
        elif key_components[key_component_index] != "base_layer":
            return ""
        key_component_index += 1
    return ".".join(remaining_key_components)


def _rebase_adapter_on_original(model: nn.Module, lora_tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Convert the tensors `lora_tensors` of an adapter, whose initial product B0 A0 was subtracted from the base
    weights, to an adapter for the original base weights, and return its tensors. Its rank is twice as high: B A - B0 A0
    = [B -B0] [A; A0]. Rank and alpha in `config` are changed accordingly."""
    buffers_by_name = dict(model.named_buffers())
    rebased_tensors = {}
    for name, tensor in lora_tensors.items():
        layer_name, factor_name = split_factor_key(name)
        initial_factor = buffers_by_name.get(f"{layer_name}.initial_{factor_name}")
        if initial_factor is not None:  # weights in `modules_to_save` have no initial factor
            is_factor_a = factor_name == "A"
            tensor = torch.cat([tensor, initial_factor if is_factor_a else -initial_factor], 0 if is_factor_a else 1)
        rebased_tensors[name] = tensor
    # alpha grows with the rank, so that the scale of the adapter, alpha / r or alpha / sqrt(r), does not change.
    alpha_factor = math.sqrt(2) if config.use_rslora else 2.0
    config.r, config.lora_alpha = 2 * config.r, alpha_factor * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha_factor * alpha for name, alpha in config.alpha_pattern.items()}
    config.init_lora_weights = True
    return rebased_tensors
