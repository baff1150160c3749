"""Kernels of other packages in place of torch's: Liger's for norms, rotary embedding and activation, and torchao's fp8
products of linear layers.

Both need an NVIDIA GPU, and neither has been run on one by us: what is checked here are the conversion, its way back
and, in emulation, its numbers. Importing this module also makes transformers' experts follow autocast on a GPU.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from cosmos_core.config.schema.precision import FP8Config
from cosmos_core.errors import ConfigError

logger = logging.getLogger(__name__)

_CAPABILITY = (8, 9)
_HOPPER = 9
_MULTIPLE = 16
"""What the sizes of an fp8 product have to be multiples of."""


def use_liger(model: PreTrainedModel) -> None:
    """Put Liger's norms, rotary embedding and activation into the model; its losses are not used (`scorer.py`).

    Raises:
        ConfigError: Liger has no kernels for this family.
    """
    families: dict[str, Any] = importlib.import_module("liger_kernel.transformers.monkey_patch").__dict__[
        "MODEL_TYPE_TO_APPLY_LIGER_FN"
    ]
    family = model.config.model_type
    if family not in families:
        raise ConfigError(f"policy.enable_liger_kernel = true: Liger has no kernels for {family}; leave it out")
    families[family](model=model, cross_entropy=False, fused_linear_cross_entropy=False)


def use_fp8(model: PreTrainedModel, fp8: FP8Config) -> None:
    """Let the linear layers of the blocks multiply in fp8 where the GPU can; weights and optimizer stay as they are."""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found >= _CAPABILITY:
        convert(model, fp8)
        return
    logger.warning(
        "train.fp8.enable_fp8 = true: products in fp8 need an NVIDIA GPU of capability 8.9 or newer, and this machine "
        "has %s; they are computed in train.param_dtype", f"one of {found[0]}.{found[1]}" if any(found) else "none",
    )  # fmt: skip


def convert(model: PreTrainedModel, fp8: FP8Config, *, emulate: bool = False) -> None:
    """Convert as `use_fp8` does, on any machine; `emulate` computes what the GPU would, slowly."""
    float8: Any = importlib.import_module("torchao.float8")
    # Padded inside, because a micro-batch may have any number of tokens.
    config = replace(float8.Float8LinearConfig.from_recipe_name(fp8.quant_recipe), pad_inner_dim=True, emulate=emulate)
    blocks = tuple(model._no_split_modules or ())
    inside = [name for name, module in model.named_modules() if type(module).__name__ in blocks]

    def is_converted(module: nn.Module, name: str) -> bool:
        return (
            type(module) is nn.Linear  # routers inherit from it
            and any(name.startswith(f"{block}.") for block in inside)
            and not module.in_features % _MULTIPLE
            and not module.out_features % _MULTIPLE
        )

    float8.convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


def without_fp8(model: PreTrainedModel) -> PreTrainedModel:
    """Give the model torch's own linear layers again, which have the same weights."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ == "Float8Linear" and isinstance(child, nn.Linear):
                plain = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None, device="meta")
                plain.weight, plain.bias = child.weight, child.bias
                setattr(module, name, plain)
    return model


def use_flash_attention(version: int | None, activate: Callable[[str], None] | None = None) -> bool:
    """Let packed attention run on FlashAttention 3 where the GPU is a Hopper and its package is installed; return
    whether it does. `version` 2: never; 3: its absence is worth a warning.

    torch's own kernel is FlashAttention 2, which reaches about half of a Hopper's rate.
    """
    if version == 2 or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != _HOPPER:
        return False
    try:
        if activate is None:
            from torch.nn.attention import activate_flash_attention_impl

            activate = activate_flash_attention_impl
        activate("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        level = logging.INFO if version is None else logging.WARNING
        logger.log(level, "packed attention runs on FlashAttention 2, because 3 is not there: %s", error)
        return False
    logger.info("packed attention runs on FlashAttention 3")
    return True


def autocast_experts(experts: Any, states: Tensor, *routing: Tensor) -> Tensor:
    """Compute experts in the dtype of autocast on a GPU, where the grouped product is fast in half precision alone.

    Autocast does not know that product, and its other form loops over the experts and waits for the GPU in each.
    """
    device_type = states.device.type
    if device_type != "cuda" or not torch.is_autocast_enabled(device_type):
        return grouped_mm_experts_forward(experts, states, *routing)
    dtype = torch.get_autocast_dtype(device_type)
    casts = {name: weight.to(dtype) for name, weight in experts._parameters.items() if weight is not None}
    experts.__dict__.update(casts)  # found before the parameters of the same names
    try:
        return grouped_mm_experts_forward(experts, states, *routing)
    finally:
        for name in casts:
            del experts.__dict__[name]


ExpertsInterface.register("grouped_mm", autocast_experts)
