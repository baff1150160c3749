"""Write a causal language model as a folder in Hugging Face format.

A LoRA adapter is written twice: merged into the model, and separately in the subfolder `lora/`. `verify_export.py`
verifies the written folder.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import build_glob_alternation

from cosmos_core.models.disk import write_export
from cosmos_core.models.generation_config import save_generation_config, use_default_generation_config
from cosmos_core.models.lora import ADAPTER_FOLDER, has_lora_adapter, merge_adapter, merged_state_dict, save_adapter
from cosmos_core.models.quantized_base import disable_requantization


def export_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    export_folder: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_size: str = "4GB",
    extra_files: Mapping[str, bytes] = {},
) -> None:
    """Write weights, config, generation config and tokenizer of a model to the folder `export_folder`, atomically.

    Floating-point weights are cast to `dtype` (None: unchanged), except for those of `find_float32_weights`, without
    changing the model itself. As in transformers, tied weights are written once, and several weight files get an index.
    `extra_files` has further files by path in the folder. Raise StageFailed if the disk is full or broken."""
    with write_export(export_folder, extra_files) as staging_folder:
        with merge_adapter(model), use_default_generation_config(model), disable_requantization(model):
            model.save_pretrained(staging_folder, state_dict=_cast_weights(model, dtype), max_shard_size=max_shard_size)
        _make_export_config(model, dtype).save_pretrained(staging_folder)
        save_generation_config(model, tokenizer, staging_folder)
        tokenizer.init_kwargs.pop("auto_map", None)
        tokenizer.save_pretrained(staging_folder)
        if has_lora_adapter(model):
            save_adapter(model, staging_folder / ADAPTER_FOLDER)


def make_float32_predicate(model: PreTrainedModel, dtype: torch.dtype | None) -> Callable[[str], bool]:
    """Return a function from the name of a weight to True if transformers keeps the weight in float32 in a model of
    `dtype`. An example is the bias of a router: rounded to 16 bits, the bias would select other experts."""
    float32_patterns = list(model._get_dtype_plan(dtype)) if dtype is not None else []
    find_float32_match = build_glob_alternation(float32_patterns)[0].search if float32_patterns else None
    return lambda name: find_float32_match is not None and find_float32_match(name) is not None


def find_float32_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> set[int]:
    """Return the memory addresses (`data_ptr`) of the weights that stay float32 in an export in `dtype`."""
    is_kept_in_float32 = make_float32_predicate(model, dtype)
    return {tensor.data_ptr() for name, tensor in merged_state_dict(model).items() if is_kept_in_float32(name)}


def _cast_weights(model: PreTrainedModel, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """Return the state dict of a model in `dtype`. Tied weights share memory, so that transformers writes them once."""
    state_dict, float32_addresses = merged_state_dict(model), find_float32_weights(model, dtype)
    if dtype is None:
        return state_dict
    cast_tensor_by_storage: dict[tuple[int, torch.Size], torch.Tensor] = {}
    for tensor in state_dict.values():
        if (storage_key := (tensor.data_ptr(), tensor.shape)) not in cast_tensor_by_storage:
            should_cast = tensor.is_floating_point() and tensor.data_ptr() not in float32_addresses
            cast_tensor_by_storage[storage_key] = tensor.to("cpu", dtype if should_cast else None)
    return {name: cast_tensor_by_storage[tensor.data_ptr(), tensor.shape] for name, tensor in state_dict.items()}


def _make_export_config(model: PreTrainedModel, dtype: torch.dtype | None) -> Any:
    config = copy.deepcopy(model.config)
    vars(config).pop("auto_map", None)  # auto_map names code of the base model, which the export does not need
    for sub_config in filter(None, [config, *(getattr(config, name) for name in config.sub_configs)]):
        if dtype is not None:
            sub_config.dtype = dtype
        # Training with recomputation disables the key-value cache, but generation with the exported model needs it.
        if hasattr(sub_config, "use_cache"):
            sub_config.use_cache = True
    return config
