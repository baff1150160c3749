"""Kernels of other packages that replace those of torch: Liger's norms, rotary embedding and activation functions, and
torchao's fp8 matrix products of linear layers.

The kernels need an NVIDIA GPU. Tests cover the conversion to fp8, its reversal and, in emulation, its numerical
results, but not the kernels on a GPU. Importing this module also makes transformers' experts run in the dtype of
autocast on a GPU.
"""

import importlib
import logging
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from cosmos_core.config.schema.precision import FP8Config
from cosmos_core.errors import ConfigError
from cosmos_core.models.length_rounding import autocast_dtype

logger = logging.getLogger(__name__)

_MIN_FP8_CAPABILITY = (8, 9)
_HOPPER_MAJOR_VERSION = 9
_FP8_SIZE_MULTIPLE = 16
"""Number by which the input and output features of a linear layer must be divisible for matrix products in fp8."""

_original_namespaces: dict[str, dict[str, Any]] = {}
"""Original content of the modules of transformers in which Liger has replaced functions, by name of the module."""


def patch_with_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding and activation functions of a model by Liger's kernels, but not the loss, because
    `scorer.py` computes log-probabilities. Raise ConfigError if Liger has no kernels for the model family."""
    liger_patch_module: Any = importlib.import_module("liger_kernel.transformers.monkey_patch")
    patch_function_by_model_type = liger_patch_module.MODEL_TYPE_TO_APPLY_LIGER_FN
    model_type = model.config.model_type
    if model_type not in patch_function_by_model_type:
        raise ConfigError(f"policy.enable_liger_kernel = true: Liger has no kernels for {model_type}; leave it out")
    _original_namespaces.setdefault(type(model).__module__, dict(vars(sys.modules[type(model).__module__])))
    patch_function_by_model_type[model_type](model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def unpatch_liger(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `patch_with_liger` if it was called, because Liger's kernels need a GPU, and return the model."""
    vars(sys.modules[type(model).__module__]).update(_original_namespaces.pop(type(model).__module__, {}))
    for module in model.modules():
        for name, patched_method in list(vars(module).items()):
            if str(getattr(patched_method, "__module__", "")).startswith("liger_kernel"):
                delattr(module, name)
    return model


def enable_fp8_if_supported(model: PreTrainedModel, fp8_config: FP8Config) -> None:
    """Make the linear layers in a model's transformer blocks multiply in fp8; if this machine has no GPU that supports
    fp8, log a warning instead. The weights and the optimizer do not change."""
    gpu_capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if gpu_capability >= _MIN_FP8_CAPABILITY:
        convert_to_fp8(model, fp8_config)
        return
    logger.warning(
        "train.fp8.enable_fp8 = true: products in fp8 need an NVIDIA GPU of capability 8.9 or newer, and this machine "
        "has %s; they are computed in train.param_dtype",
        f"one of {gpu_capability[0]}.{gpu_capability[1]}" if any(gpu_capability) else "none",
    )  # fmt: skip


def convert_to_fp8(model: PreTrainedModel, fp8_config: FP8Config, *, should_emulate: bool = False) -> None:
    """Replace the linear layers in the transformer blocks of a model by layers that multiply in fp8, on any machine.
    With `should_emulate`, these layers slowly compute the results of an fp8 GPU in higher precision."""
    float8_module: Any = importlib.import_module("torchao.float8")
    # Pad inner dimensions, because fp8 products need multiples of 16, and micro-batches have any number of tokens.
    config = float8_module.Float8LinearConfig.from_recipe_name(fp8_config.quant_recipe)
    config = replace(config, pad_inner_dim=True, emulate=should_emulate)
    block_class_names = tuple(model._no_split_modules or ())
    block_names = [name for name, module in model.named_modules() if type(module).__name__ in block_class_names]

    def should_convert(module: nn.Module, name: str) -> bool:
        return (
            type(module) is nn.Linear  # a subclass of nn.Linear may be a router, which must not be converted
            and any(name.startswith(f"{block_name}.") for block_name in block_names)
            and not module.in_features % _FP8_SIZE_MULTIPLE
            and not module.out_features % _FP8_SIZE_MULTIPLE
        )

    float8_module.convert_to_float8_training(model, config=config, module_filter_fn=should_convert)


def remove_fp8(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the fp8 layers of a model by torch's linear layers with the same weights, and return the model."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Float8Linear" and isinstance(child, nn.Linear):
                linear = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                linear.weight, linear.bias = child.weight, child.bias
                setattr(module, name, linear)
    return model


def enable_flash_attention_3() -> bool:
    """Use FlashAttention 3 for packed attention if the GPU is a Hopper and the package is installed; return True if it
    is used. torch's default kernel is FlashAttention 2, which reaches about half of the rate of a Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _HOPPER_MAJOR_VERSION:
        return False
    try:
        activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        logger.info("packed attention runs on FlashAttention 2, because 3 is not there: %s", error)
        return False
    logger.info("packed attention runs on FlashAttention 3")
    return True


def autocast_experts(experts: Any, hidden_states: Tensor, *routing_arguments: Tensor) -> Tensor:
    """Return the output of `experts`, the module with the experts of a layer, by the grouped matrix product of
    transformers. On a GPU, the weights are cast to the dtype of autocast first: autocast does not cover this product,
    which is fast only in half precision."""
    dtype = autocast_dtype(hidden_states.device)
    if dtype is None or not hidden_states.is_cuda:
        return grouped_mm_experts_forward(experts, hidden_states, *routing_arguments)
    autocast_weights = {name: weight.to(dtype) for name, weight in experts._parameters.items() if weight is not None}
    experts.__dict__.update(autocast_weights)  # entries of `__dict__` precede parameters, so experts use cast weights
    try:
        return grouped_mm_experts_forward(experts, hidden_states, *routing_arguments)
    finally:
        for name in autocast_weights:
            del experts.__dict__[name]


ExpertsInterface.register("grouped_mm", autocast_experts)
