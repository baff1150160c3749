"""Selection of the weights to train: the weights of a LoRA adapter, or all weights that the recipe does not freeze."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models.lora import add_adapter
from cosmos_core.models.quantized_base import DEQUANTIZED_FORMATS, quantization_method
from cosmos_core.registry import suggest_names


def mark_trained_weights(model: nn.Module, policy: PolicyConfig, default_lora_targets: Sequence[str] = ()) -> None:
    """Mark which weights of a model are trained, according to the settings in `policy`.

    The settings are `lora`, which adds an adapter, or `freeze_pattern`, `trainable_pattern` and `trainable_map`. If
    none is set, all weights are trained. A tied weight matches under each of its names. `default_lora_targets` are the
    modules to adapt if the recipe names none; empty: the default modules of PEFT. Raise ConfigError if a name or
    pattern matches no weight, no weight remains to train, `lora` is combined with another of these settings, or the
    weights are quantized in a format that is not dequantized."""
    freeze_keys = [key for key in ("freeze_pattern", "trainable_pattern", "trainable_map") if getattr(policy, key)]
    quant_format = quantization_method(model.config) if isinstance(model, PreTrainedModel) else None
    # Quantized weights cannot be trained. They all stay untrained only if `trainable_pattern` names other weights.
    trains_only_pattern_matches = bool(policy.trainable_pattern) and not any((policy.trainable_map or {}).values())
    if quant_format and quant_format not in DEQUANTIZED_FORMATS and not trains_only_pattern_matches:
        raise ConfigError(
            f"policy.model_name_or_path: the model's weights are quantized ({quant_format}): they are not trained, and "
            f"no adapter can be merged into them, as engines and the export need; take the model without quantization, "
            f"or name other weights in policy.trainable_pattern alone"
        )
    if not freeze_keys and policy.lora is None:
        return
    # transformers lets embeddings require gradients, which only reentrant gradient checkpointing needs. Without
    # gradients of the embeddings, the backward pass ends at the first trained layer.
    if isinstance(model, PreTrainedModel):
        model.disable_input_require_grads()
    if policy.lora is not None:
        if freeze_keys:
            raise ConfigError(
                f"policy.{freeze_keys[0]} excludes policy.lora, which trains adapters and modules_to_save alone"
            )
        with _replace_meta_parameters(model):
            add_adapter(model, policy.lora, default_lora_targets)
        return
    for key, patterns in (("freeze_pattern", policy.freeze_pattern), ("trainable_pattern", policy.trainable_pattern)):
        if patterns:
            model.requires_grad_(key == "freeze_pattern")
        for pattern in patterns or ():
            _set_requires_grad(model, f"policy.{key}", pattern, pattern, key == "trainable_pattern")
    for name, is_trained in sorted((policy.trainable_map or {}).items(), key=lambda item: len(item[0])):
        # The longest name is applied last, so that the setting of an inner module takes precedence.
        _set_requires_grad(model, "policy.trainable_map", name, rf"^{re.escape(name)}(\.|\Z)", is_trained)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"policy.{freeze_keys[-1]} leaves no weight to train; name fewer in it")


def _set_requires_grad(model: nn.Module, key: str, name_or_pattern: str, name_regex: str, is_trained: bool) -> None:
    # With `remove_duplicate=False`, a tied weight is listed under all its names, so that patterns match any of them.
    parameter_by_name = dict(model.named_parameters(remove_duplicate=False))
    matching_parameters = [parameter for name, parameter in parameter_by_name.items() if re.search(name_regex, name)]
    if not matching_parameters:
        # Suggest names only up to the layer number, because the rest repeats in every layer.
        name_prefixes = {re.split(r"\.\d+\.", name)[0] for name in parameter_by_name}
        suggestion = suggest_names(name_or_pattern, sorted(name_prefixes))
        raise ConfigError(f"{key}: {name_or_pattern!r} matches no weight{suggestion}")
    if is_trained and not all(parameter.is_floating_point() for parameter in matching_parameters):
        raise ConfigError(f"{key}: {name_or_pattern!r} matches quantized weights, which are not trained; name others")
    for parameter in matching_parameters:
        parameter.requires_grad_(is_trained)


@contextmanager
def _replace_meta_parameters(model: nn.Module) -> Iterator[None]:
    """Replace the meta parameters of a model, which `load_shards` reads later, by placeholders on a real device during
    the `with` block, so that new adapters are created on that device. A placeholder is an expanded scalar, which needs
    no memory. If the default device is meta, as in an estimate of memory, do nothing."""
    placeholders: dict[nn.Parameter, nn.Parameter] = {}
    if torch.get_default_device().type != "meta":
        device = next((buffer.device for buffer in model.buffers() if not buffer.is_meta), torch.device("cpu"))
        for parameter in filter(lambda parameter: parameter.is_meta, model.parameters()):
            zero_scalar = torch.zeros((), dtype=parameter.dtype, device=device)
            placeholders[parameter] = nn.Parameter(zero_scalar.expand(parameter.shape), parameter.requires_grad)
    _swap_parameters(model, placeholders)
    try:
        yield
    finally:
        for parameter, placeholder in placeholders.items():
            parameter.requires_grad_(placeholder.requires_grad)
        _swap_parameters(model, {placeholder: parameter for parameter, placeholder in placeholders.items()})


def _swap_parameters(model: nn.Module, new_parameter_by_old: dict[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = new_parameter_by_old.get(parameter, parameter)
