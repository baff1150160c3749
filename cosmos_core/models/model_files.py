"""Location and check of the files of a model, with one-line error messages for missing or damaged files."""

import json
import os
import socket
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from huggingface_hub import constants
from safetensors import SafetensorError, safe_open
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from cosmos_core.config.load import make_printable
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ModelError
from cosmos_core.run.content import is_outside_folder
from cosmos_core.transient import is_machine_error, is_network_error

MODEL_RECIPE_KEY = "policy.model_name_or_path"
"""Recipe key that names the model to train; it is part of error messages."""

_UNREAD_WEIGHT_SUFFIXES = (".gguf", ".h5", ".msgpack", ".pth", ".safetensors")
"""Suffixes of weight files that a folder can have in other formats, or under other names, than those that are read."""


def model_error(model: str, problem: str) -> ModelError:
    """Return the error for `problem`, a text about the model that `policy.model_name_or_path` names."""
    return ModelError(f"{MODEL_RECIPE_KEY} = {model!r}: {problem}")


def locate_model(model: str, revision: str | None) -> tuple[Path | str, dict[str, Any]]:
    """Return the folder `model` and an empty dictionary if the folder exists, otherwise the Hub id `model` and the
    arguments to fetch its files; raise ModelError if `model` is neither."""
    model_path = Path(os.path.expanduser(model))  # use os.path, because Path.expanduser fails for some invalid names
    if os.path.isdir(model_path):
        return model_path, {}
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or os.path.exists(model_path):
        problem = "is a file, not a folder" if os.path.exists(model_path) else "does not exist"
        raise model_error(model, f"{model_path} {problem}; give a folder in Hugging Face format or a Hub id")
    return model, {"revision": revision, "local_files_only": not is_hub_reachable()}


def translate_load_errors(component_name: str, model: str) -> AbstractContextManager[None]:
    """Return a context manager for a `with` block that reads `component_name`, such as the tokenizer, of `model`. It
    converts errors of libraries to a `ModelError` of one line; errors of memory, disk and network, and each
    `CosmosError`, are raised unchanged."""

    def convert_error(error: Exception) -> Exception:
        is_transient_error = is_machine_error(error) or (is_network_error(error) and is_hub_reachable())
        return error if is_transient_error else _describe_load_error(component_name, model, error)

    return convert_errors(convert_error)


def read_json(json_file: Path, model: str) -> dict[str, Any]:
    """Read the object in a JSON file of a model's folder; return an empty dictionary if the file is missing. Raise
    ModelError if it is damaged or has no object: later errors of libraries would name neither file nor cause."""
    if not os.path.isfile(json_file):  # use os.path, because Path.is_file fails for names that are too long
        return {}
    try:
        json_value = json.loads(json_file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise model_error(model, f"{json_file} is not valid JSON ({error}); copy it again") from error
    if not isinstance(json_value, dict):
        raise model_error(model, f"{json_file} is not a JSON object; copy it again")
    return json_value


def check_weights(model: str) -> None:
    """Check every weight file of a local folder without reading tensors; do nothing for a Hub id. Raise ModelError if
    there is no weight file, the index names a missing file, or a file is damaged or contains no tensors."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    for weights_file in _find_local_files(folder, model):
        if not weights_file.is_file():
            raise model_error(model, f"{weights_file} is no file, or a link to none; copy it again")
        if weights_file.suffix != ".safetensors":
            _check_pickled_weights(weights_file, model)
            continue
        try:
            with safe_open(weights_file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            if is_machine_error(error):
                raise
            raise model_error(model, f"{weights_file} is damaged ({error}); copy it again") from error


def weight_files(model: str, revision: str | None) -> tuple[list[str], str]:
    """Return the safetensors files of a model and an empty string, or no files and the reason why there are none."""
    model_source, load_options = locate_model(model, revision)
    check_weights(model)
    load_options |= {"_raise_exceptions_for_missing_entries": False}
    with translate_load_errors("weights", model):
        weights_file = cached_file(str(model_source), SAFE_WEIGHTS_NAME, **load_options)
        if weights_file:
            return [weights_file], ""
        weights_index_file = cached_file(str(model_source), SAFE_WEIGHTS_INDEX_NAME, **load_options)
        if weights_index_file is None:
            return [], f"it has no {SAFE_WEIGHTS_NAME}"
        load_options.pop("_raise_exceptions_for_missing_entries")
        return get_checkpoint_shard_files(str(model_source), weights_index_file, **load_options)[0], ""


def _find_local_files(folder: Path, model: str) -> list[Path]:
    for weights_file, index_file in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        if os.path.lexists(folder / weights_file):  # lexists is true for a broken link, which must be reported
            return [folder / weights_file]
        if os.path.lexists(folder / index_file):
            return _list_weight_files_in_index(folder / index_file, model)
    problem = f"the folder has no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME}"
    remedy = "copy them again"
    if other_files := sorted(file.name for file in folder.iterdir() if file.suffix in _UNREAD_WEIGHT_SUFFIXES):
        remedy = f"it has {', '.join(other_files[:3])}, which is not read: copy what is missing, or save as safetensors"
    raise model_error(model, f"cannot load the weights: {problem}; {remedy}")


def _list_weight_files_in_index(index_file: Path, model: str) -> list[Path]:
    weights_index = read_json(index_file, model)
    weight_map = weights_index.get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values())):
        raise model_error(model, f"{index_file} has no weight_map from tensors to files; copy it again")
    if not isinstance(weights_index.get("metadata"), dict):  # transformers fails on an index without metadata
        raise model_error(model, f"{index_file} has no metadata; copy it again")
    for name in sorted(set(weight_map.values())):
        if is_outside_folder(name):
            raise model_error(model, f"{index_file} names {name!r}, which lies outside of its folder; copy it there")
    return [index_file.parent / name for name in sorted(set(weight_map.values()))]


def _check_pickled_weights(weights_file: Path, model: str) -> None:
    problem = f"{weights_file} is damaged, or holds more than tensors, which could run any code when read"
    damaged_file_error = model_error(model, f"{problem}; copy it again, or save the model as safetensors")
    with convert_errors(lambda error: error if is_machine_error(error) else damaged_file_error):
        state_dict = load_state_dict(weights_file)  # load_state_dict maps the file into memory without reading tensors
    if not isinstance(state_dict, dict):
        raise model_error(model, f"{weights_file} holds no tensors by name; save the model as safetensors")
    for tensor_name, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise model_error(model, f"{weights_file} holds {tensor_name!r}, which is no tensor; remove it")


def _describe_load_error(component: str, model: str, error: Exception) -> ModelError:
    if "automatic conversion of the weights" in str(error):
        return unmergeable_tensors_error(model)
    if "trust_remote_code" in str(error):
        problem = f"its {component} needs code that is not part of transformers (auto_map), which is never run"
        return model_error(model, f"{problem}; take a model of a family that transformers has")
    if not os.path.exists(os.path.expanduser(model)) and not is_hub_reachable():
        problem = f"the Hugging Face Hub cannot be reached from here, and its cache has no {component} of that name"
        return model_error(model, f"no such folder, {problem}; give a local folder or download the model first")
    error_text = repr(error) if isinstance(error, KeyError) else str(error)  # str() of a KeyError contains only the key
    shortened_error_text = make_printable(error_text)[:300] or type(error).__name__
    return model_error(model, f"cannot load the {component}: {shortened_error_text}")


def unmergeable_tensors_error(model: str) -> ModelError:
    """Return the error for tensors in a model's files that transformers cannot merge into one weight, such as the
    experts of a layer, because some are missing or have another shape."""
    problem = "of tensors that belong together, like the experts of a layer, some are missing or of another shape"
    return model_error(model, f"{problem}; the weights do not belong to this config.json")


def is_hub_reachable() -> bool:
    """Return True if the host name of the Hugging Face Hub resolves, or if a proxy is configured. Without this check,
    libraries on a machine without network retry each file for 20 s."""
    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    hub_url = urlparse(constants.ENDPOINT)
    try:
        socket.getaddrinfo(hub_url.hostname, hub_url.port or hub_url.scheme)
    except OSError:
        return False
    return True
