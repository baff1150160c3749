"""Base models with quantized weights in formats that transformers computes with on some GPUs, but cannot train."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AutoQuantizationConfig

FP8, MXFP4 = "fp8", "mxfp4"


def dequantize_options(config: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that dequantize the weights of such a model; empty for other models."""
    quantization = getattr(config, "quantization_config", None) or {}
    if quantization.get("quant_method") not in {FP8, MXFP4}:
        return {}
    return {"quantization_config": AutoQuantizationConfig.from_dict({**quantization, "dequantize": True})}


@contextmanager
def without_quantization(model: PreTrainedModel) -> Iterator[None]:
    """Disable the conversion that would quantize the weights of a model again when they are saved, if the model was
    dequantized from FP8. Engines need the conversion, because they compute in the format of the base model."""
    conversions = getattr(model, "_weight_conversions", None) or []
    operations = [operation for conversion in conversions for operation in getattr(conversion, "operations", ())]
    if any(isinstance(operation, Fp8Dequantize) for operation in operations):
        model.__dict__["_weight_conversions"] = None
    try:
        yield
    finally:
        if conversions:
            model.__dict__["_weight_conversions"] = conversions
