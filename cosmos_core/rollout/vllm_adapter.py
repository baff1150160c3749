"""LoRA adapter of the policy in a vLLM rollout engine: the engine holds the base weights, and each new version of the
policy's weights consists of the LoRA factors only.

vLLM has one scale for the whole adapter, so the scale of each layer is multiplied into its factor B. This module is not
used if a policy trains more than factors of linear layers (`models.lora.trains_only_linear_factors`): the policy's
adapter is then merged into the base weights, and all weights are sent.
"""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from cosmos_core.models.lora import get_lora_scales, split_factor_key, trains_only_linear_factors
from cosmos_core.rollout.base import EngineSettings

_ADAPTER_NAME, _ADAPTER_ID = "policy", 1
_SUPPORTED_LAYER_SUFFIXES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""Suffixes of the names of layers to which vLLM can apply a LoRA adapter in every family of decoders."""
_SUPPORTED_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's setting for the maximum LoRA rank; one of them is chosen when a rollout engine starts."""


class VllmAdapter:
    """LoRA adapter of the policy, as one vLLM rollout engine applies it to the base weights."""

    def __init__(self, engine_settings: EngineSettings) -> None:
        self._lora_scale_by_layer = get_lora_scales(engine_settings.complete_model)
        state_dict = engine_settings.complete_model.state_dict()
        self.lora_rank = max(len(state_dict[f"{layer}.lora_A.default.weight"]) for layer in self._lora_scale_by_layer)
        self.lora_request: Any = None
        """`LoRARequest` with which requests to vLLM select the adapter; None while no factors were loaded, so that the
        policy equals the base weights."""

    @property
    def llm_arguments(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `LLM` with which a rollout engine can apply the policy's adapter."""
        max_lora_rank = next(rank for rank in _SUPPORTED_LORA_RANKS if rank >= self.lora_rank)
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": max_lora_rank}

    def load_lora_factors(self, llm: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the LoRA factors of a new version of the policy into the vLLM engine `llm`, which reads them from a
        temporary file."""
        from vllm.lora.request import LoRARequest

        lora_factors = {}
        for key, tensor in tensors:
            layer, factor_name = split_factor_key(key)
            lora_scale = self._lora_scale_by_layer[layer] if factor_name == "B" else 1.0
            lora_factor = tensor.detach().cpu().float() * lora_scale
            lora_factors[f"base_model.model.{layer}.lora_{factor_name}.weight"] = lora_factor.contiguous()
        target_modules = sorted({layer.rpartition(".")[2] for layer in self._lora_scale_by_layer})
        config = {"r": self.lora_rank, "lora_alpha": self.lora_rank, "target_modules": target_modules, "bias": "none"}
        with tempfile.TemporaryDirectory(prefix="cosmos-adapter-") as adapter_folder:
            save_file(lora_factors, Path(adapter_folder) / "adapter_model.safetensors")
            (Path(adapter_folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
            llm.llm_engine.add_lora(LoRARequest(_ADAPTER_NAME, _ADAPTER_ID, adapter_folder, load_inplace=True))
        self.lora_request = LoRARequest(_ADAPTER_NAME, _ADAPTER_ID, adapter_folder)


def open_adapter(settings: EngineSettings) -> VllmAdapter | None:
    """Return the policy's adapter for a vLLM rollout engine if the engine can load only the LoRA factors. None: the
    engine needs the complete weights, for example because vLLM does not support an adapter for this model."""
    if not trains_only_linear_factors(settings.complete_model) or settings.vision is not None:
        return None
    if settings.rollout.parallelism.tp_size > 1 or settings.rollout.quantization != "none":
        return None
    if any(
        layer.rpartition(".")[2] not in _SUPPORTED_LAYER_SUFFIXES for layer in get_lora_scales(settings.complete_model)
    ):
        return None
    from vllm.model_executor.models import ModelRegistry, supports_lora

    vllm_adapter = VllmAdapter(settings)
    architectures = settings.model.config.architectures or [type(settings.model).__name__]
    registered_model = ModelRegistry.models.get(architectures[0])
    if vllm_adapter.lora_rank > _SUPPORTED_LORA_RANKS[-1] or registered_model is None:
        return None
    return vllm_adapter if supports_lora(registered_model.load_model_cls()) else None
