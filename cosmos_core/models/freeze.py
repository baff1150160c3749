"""Selection of the weights to train: the weights of a LoRA adapter, or all weights that the recipe does not freeze."""

import re
from collections.abc import Callable, Sequence

from torch import nn
from transformers import PreTrainedModel

from cosmos_core.config.schema.policy import PolicyConfig
from cosmos_core.errors import ConfigError
from cosmos_core.models.lora import add_adapter
from cosmos_core.models.meta_device import placeholders
from cosmos_core.models.quantized_base import TRAINABLE_FORMATS, quantization_method
from cosmos_core.registry import suggestion


def mark_trained_weights(model: nn.Module, policy: PolicyConfig, targets: Sequence[str] = ()) -> None:
    """Mark which weights of a model are trained, according to the settings in `policy`.

    The settings are `lora`, which adds an adapter, or `freeze_pattern`, `trainable_pattern` and `trainable_map`. If
    none is set, all weights are trained. A tied weight matches under each of its names. `targets` are the modules to
    adapt if the recipe names none; empty: the default modules of PEFT.

    Raises:
        ConfigError: a name or pattern matches no weight, no weight remains to train, `lora` is combined with another
            of these settings, or the weights are quantized in a format that is not dequantized.
    """
    keys = [key for key in ("freeze_pattern", "trainable_pattern", "trainable_map") if getattr(policy, key)]
    method = quantization_method(model.config) if isinstance(model, PreTrainedModel) and not keys else None
    if method and method not in TRAINABLE_FORMATS:
        raise ConfigError(
            f"policy.model_name_or_path: the model's weights are quantized ({method}): they are not trained, and no "
            f"adapter can be merged into them, as engines and the export need; take the model without quantization"
        )
    if not keys and policy.lora is None:
        return
    # For recomputation, transformers makes the output of the embeddings require a gradient. Non-reentrant checkpoints
    # do not need this, and without it the backward pass ends at the first trained layer.
    if isinstance(model, PreTrainedModel):
        model.disable_input_require_grads()
    if policy.lora is not None:
        if keys:
            raise ConfigError(f"policy.{keys[0]} excludes policy.lora, which trains adapters and modules_to_save alone")
        with placeholders(model):
            add_adapter(model, policy.lora, targets)
        return
    named_weights = dict(model.named_parameters(remove_duplicate=False))  # lists a tied weight under each of its names
    for patterns, is_trained in ((policy.freeze_pattern, False), (policy.trainable_pattern, True)):
        if patterns:
            key = "policy.trainable_pattern" if is_trained else "policy.freeze_pattern"
            model.requires_grad_(not is_trained)
            for pattern in patterns:
                _set_requires_grad(named_weights, key, pattern, re.compile(pattern).search, is_trained)
    _apply_trainable_map(named_weights, policy.trainable_map or {})
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"policy.{keys[-1]} leaves no weight to train; name fewer in it")


def _apply_trainable_map(named_weights: dict[str, nn.Parameter], trainable_map: dict[str, bool]) -> None:
    """Apply `trainable_map` from outer to inner modules, so that the longest matching module name takes precedence."""
    for module_name in sorted(trainable_map, key=len):

        def is_in_module(name: str, module_name: str = module_name) -> bool:
            return name == module_name or name.startswith(f"{module_name}.")

        _set_requires_grad(named_weights, "policy.trainable_map", module_name, is_in_module, trainable_map[module_name])


def _set_requires_grad(
    names: dict[str, nn.Parameter], key: str, name_or_pattern: str, matches: Callable[[str], object], is_trained: bool
) -> None:
    parameters = [parameter for name, parameter in names.items() if matches(name)]
    if not parameters:
        known_names = sorted(
            {re.split(r"\.\d+\.", name)[0] for name in names}
        )  # names of weights up to the layer number
        raise ConfigError(f"{key}: {name_or_pattern!r} matches no weight{suggestion(name_or_pattern, known_names)}")
    for parameter in parameters:
        parameter.requires_grad_(is_trained)
