"""Base models with quantized weights: on some GPUs, transformers can compute with such weights, but not train them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoQuantizationConfig

DEQUANTIZED_FORMATS = FP8, MXFP4 = "fp8", "mxfp4"
"""Formats of quantized weights that are dequantized when a model is loaded."""


def quantization_method(config: PretrainedConfig) -> str | None:
    """Return the name of the format in which a model stores quantized weights; None: its weights are not quantized."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return getattr(method, "value", method)


def make_dequantize_options(config: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` dequantizes a model on loading; empty if its weights are not in
    one of the formats `DEQUANTIZED_FORMATS`."""
    if quantization_method(config) not in DEQUANTIZED_FORMATS:
        return {}
    return {"quantization_config": AutoQuantizationConfig.from_dict({**config.quantization_config, "dequantize": True})}


@contextmanager
def disable_requantization(model: PreTrainedModel) -> Iterator[None]:
    """During the `with` block, disable the conversion that would quantize the weights of a model again when they are
    saved, if the model was dequantized from FP8. Rollout engines need the conversion, because they compute in the
    format of the base model."""
    weight_conversions = getattr(model, "_weight_conversions", None) or []
    operations = [operation for conversion in weight_conversions for operation in getattr(conversion, "operations", ())]
    if any(isinstance(operation, Fp8Dequantize) for operation in operations):
        model.__dict__["_weight_conversions"] = None
    try:
        yield
    finally:
        if weight_conversions:
            model.__dict__["_weight_conversions"] = weight_conversions
