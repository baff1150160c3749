"""Read the settings and weights of a saved LoRA adapter in PEFT's format, to continue its training.

`lora.py` adds adapters to a model and writes them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from cosmos_core.config.schema.lora import LoraConfig
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, ModelError

_LORA_PATH_KEY = "policy.lora.lora_path"
PEFT_PREFIX = "base_model.model."
"""Prefix of the name of each tensor in the file of a saved adapter."""
_PEFT_SETTING_NAMES = {
    "r": "r", "lora_alpha": "lora_alpha", "target_modules": "target_modules", "use_rslora": "use_rslora",
    "modules_to_save": "modules_to_save", "alpha_pattern": "alpha_pattern", "r_pattern": "rank_pattern",
}  # fmt: skip
"""Keys of `policy.lora` whose settings are also in the file `adapter_config.json` of a saved adapter, mapped to their
keys in this file."""
_UNCHECKED_LORA_SETTINGS = {
    *_PEFT_SETTING_NAMES.values(), "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "target_parameters", "inference_mode", "exclude_modules", "lora_dropout", "init_lora_weights",
    "ensure_weight_tying", "runtime_config", "fan_in_fan_out",
}  # fmt: skip
_WEIGHTS_FILE_NAMES = ("adapter_model.safetensors", "model.safetensors", "pytorch_lora_weights.safetensors")
_LORA_DOWN_SUFFIX = ".lora_A.weight"
_INITS_CHANGING_BASE_WEIGHTS = ("pissa", "olora", "corda", "loftq")


def load_adapter_config(lora: LoraConfig, tied_module_names: Sequence[str] = ()) -> peft.LoraConfig:
    """Return PEFT's settings of the saved LoRA adapter in the folder `lora.lora_path`, with the dropout of `lora`
    unless that is 0. Raise ConfigError if another setting in `lora` differs from the saved one. Raise ModelError if the
    adapter is missing, is of an unsupported kind, or has a separate weight for one of the modules `tied_module_names`,
    which share one weight in the model."""
    adapter_folder = _resolve_adapter_folder(lora)
    error_prefix = f"{_LORA_PATH_KEY} = '{adapter_folder}'"
    try:
        saved_settings = _read_settings(adapter_folder)
        # Leave out what Cosmos-RL wrote in addition, and use PEFT's name of a setting that it wrote under its own.
        saved_config: Any = peft.PeftConfig.from_peft_type(
            **{
                "rank_pattern" if key == "r_pattern" else key: value
                for key, value in saved_settings.items()
                if value is not None and key not in ("lora_names", "lora_path", "primary_adapter")
            }
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        # An exported model has its adapter in a sub-folder (`lora.ADAPTER_FOLDER`).
        remedy = f"; its adapter is in {adapter_folder / 'lora'}" if (adapter_folder / "lora").is_dir() else ""
        raise ModelError(f"{error_prefix}: {' '.join(str(error).split())[:200]}{remedy}") from error
    if not isinstance(saved_config, peft.LoraConfig):
        raise ModelError(f"{error_prefix}: a {saved_config.peft_type} adapter; only LoRA is trained here")
    default_peft_settings = peft.LoraConfig().to_dict()
    for name, value in saved_config.to_dict().items():
        if name not in _UNCHECKED_LORA_SETTINGS and value != default_peft_settings.get(name):
            raise ModelError(f"{error_prefix}: its {name} = {value} is not trained here; merge it into the model")
    if str(saved_config.init_lora_weights).startswith(_INITS_CHANGING_BASE_WEIGHTS):
        raise ModelError(
            f"{error_prefix}: it began with a part of the base weights ({saved_config.init_lora_weights}) and "
            f"fits no untouched base; save it again with PEFT's path_initial_model_for_weight_conversion"
        )
    modules_to_save = () if saved_config.ensure_weight_tying else tuple(saved_config.modules_to_save or ())
    if separately_saved_names := [name for name in tied_module_names if name.endswith(modules_to_save)]:
        raise ModelError(
            f"{error_prefix}: its modules_to_save trains {separately_saved_names[0]!r} separately, whose weight is "
            f"{' and '.join(tied_module_names)} in one; give a base model with tie_word_embeddings = false"
        )
    default_lora_config = LoraConfig()
    for key, name in _PEFT_SETTING_NAMES.items():
        recipe_value, saved_value = map(_normalise_setting, (getattr(lora, key), getattr(saved_config, name)))
        if getattr(lora, key) not in (getattr(default_lora_config, key), "all-linear") and recipe_value != saved_value:
            raise ConfigError(
                f"policy.lora.{key} = {recipe_value}, but the adapter in lora_path has {saved_value}; leave it out"
            )
    saved_config.lora_dropout = lora.lora_dropout or saved_config.lora_dropout
    saved_config.inference_mode = False
    return saved_config


def load_adapter_weights(model: PreTrainedModel, lora_config: LoraConfig) -> None:
    """Load the weights of the saved LoRA adapter in the folder `lora_config.lora_path` into the adapter that `model`
    already has; if the model is on the meta device, only check them. Raise ModelError if the weights are missing or
    damaged, or belong to another model or adapter."""
    file = _find_weights_file(_resolve_adapter_folder(lora_config))
    try:
        saved_tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        is_adapter_pickled = not file.exists() and file.with_suffix(".bin").exists()
        remedy = "save the adapter as safetensors" if is_adapter_pickled else "copy it again"
        raise ModelError(f"{_LORA_PATH_KEY}: {file} cannot be read: {error}; {remedy}") from error
    model_tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    if not isinstance(model, PreTrainedModel):  # diffusers puts the name of the pipeline's component first
        saved_tensors = {
            name if name in model_tensors or name.startswith(PEFT_PREFIX) else name.partition(".")[2]: tensor
            for name, tensor in saved_tensors.items()
        }
    saved_keys = {name.removeprefix(PEFT_PREFIX) for name in saved_tensors}
    if saved_keys != model_tensors.keys():  # convert the tensor names of an adapter that an older transformers saved
        problem = f"{_LORA_PATH_KEY}: {file} does not fit {type(model).__name__}"
        with convert_errors(lambda e: ModelError(f"{problem}: {str(e)[:200]}; it is of another model or damaged")):
            saved_tensors = convert_peft_adapter_state_dict_for_transformers(model, peft.LoraConfig(), saved_tensors)
    saved_tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in saved_tensors.items()}
    if base_weight_names := (saved_tensors.keys() - model_tensors.keys()) & model.state_dict().keys():
        problem = f"has {min(base_weight_names)}, which PEFT copied from its base model"
        raise ModelError(f"{_LORA_PATH_KEY}: {file} {problem}; save the adapter again with save_embedding_layers=False")
    missing_tensor_names = model_tensors.keys() - saved_tensors.keys()
    for problem, names in (("no", missing_tensor_names), ("the unknown", saved_tensors.keys() - model_tensors.keys())):
        if names:
            raise ModelError(f"{_LORA_PATH_KEY}: {file} has {problem} {min(names)}; it is of another model or adapter")
    for name, tensor in saved_tensors.items():
        if tensor.shape != model_tensors[name].shape:
            raise ModelError(
                f"{_LORA_PATH_KEY}: {file} has {name} of shape {tuple(tensor.shape)}, the model needs "
                f"{tuple(model_tensors[name].shape)}; it is of another model"
            )
        if not torch.isfinite(tensor).all():
            raise ModelError(f"{_LORA_PATH_KEY}: {file} holds NaN or infinity in {name}; take an undamaged adapter")
    if not next(model.parameters()).is_meta:
        peft.set_peft_model_state_dict(model, saved_tensors)


def _resolve_adapter_folder(lora_config: LoraConfig) -> Path:
    assert lora_config.lora_path is not None
    return Path(os.path.expanduser(lora_config.lora_path))  # Path.expanduser would fail for an unknown user


def _find_weights_file(adapter_folder: Path) -> Path:
    """Return the file with the weights of an adapter: that of PEFT or, if it is missing, that of an adapter of a
    diffusion model, as Cosmos-RL and this package or diffusers name it."""
    candidate_files = [adapter_folder / name for name in _WEIGHTS_FILE_NAMES]
    return next((file for file in candidate_files if file.exists()), candidate_files[0])


def _read_settings(adapter_folder: Path) -> dict[str, Any]:
    """Return the settings in `adapter_config.json` or, if it is missing, those that diffusers wrote to the metadata of
    the weights, each with the name of the pipeline's component before its name. An older diffusers wrote no settings;
    their values are then the rank of the weights and, as in `load_lora_weights`, this rank as alpha."""
    settings_file, weights_file = adapter_folder / "adapter_config.json", _find_weights_file(adapter_folder)
    if not settings_file.exists() and weights_file.exists():
        with safe_open(weights_file, "pt") as weights:
            if settings_json := (weights.metadata() or {}).get("lora_adapter_metadata"):
                return {name.partition(".")[2]: value for name, value in json.loads(settings_json).items()}
            down_names = [name for name in weights.keys() if name.endswith(_LORA_DOWN_SUFFIX)]  # noqa: SIM118
            ranks = {weights.get_slice(name).get_shape()[0] for name in down_names}
        if weights_file.name == _WEIGHTS_FILE_NAMES[-1] and len(ranks) == 1:
            modules = [name.partition(".")[2].removesuffix(_LORA_DOWN_SUFFIX) for name in down_names]
            return {"peft_type": "LORA", "r": min(ranks), "lora_alpha": min(ranks), "target_modules": modules}
    saved_settings: dict[str, Any] = peft.PeftConfig.from_json_file(str(settings_file))
    return saved_settings


def _normalise_setting(setting_value: Any) -> Any:
    """Return an adapter setting in a comparable form: a collection as a sorted list, an empty value as None."""
    return sorted(setting_value) if isinstance(setting_value, (tuple, list, set)) else setting_value or None
