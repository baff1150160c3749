"""Read and write the `generation_config.json` of a model without validation errors. The file does not affect training,
but transformers refuses some values that published models have, for example a temperature without `do_sample`."""

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from cosmos_core.models.model_files import locate_model, read_json, translate_load_errors

GENERATION_CONFIG_FILE = "generation_config.json"
_SETTINGS_TRIED_FIRST = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate", "eos_token_id")
"""Generation settings that determine whether other settings are valid, and are therefore tried first."""

logger = logging.getLogger(__name__)


def load_generation_config(model: str, revision: str | None = None) -> GenerationConfig | None:
    """Load the generation config of a model; return None if the model has no such file, and raise ModelError if the
    file is not a JSON object. Settings that transformers refuses are left out with a warning."""
    if (generation_settings := _read_generation_config(model, revision)) is None:
        return None
    config, refused_setting_names = _split_refused_settings(generation_settings)
    if refused_setting_names:
        names_text = ", ".join(refused_setting_names)
        logger.warning("%s of %s: transformers refuses to load %s, left out", GENERATION_CONFIG_FILE, model, names_text)
    return config


def find_refused_generation_settings(model: str, revision: str | None = None) -> list[str]:
    """Return the names of a model's generation settings that transformers, and therefore rollout engines, refuse to
    load; raise ModelError if the file is not a JSON object."""
    return _split_refused_settings(_read_generation_config(model, revision) or {})[1]


def save_generation_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, export_folder: Path) -> None:
    """Write the generation config of a model to `export_folder` without transformers' validation, which refuses some
    values. The end token of the tokenizer, which ends each training row, is added to the config if it is missing, so
    that `generate` stops at this token."""
    config, end_token_id = copy.copy(model.generation_config), tokenizer.eos_token_id
    end_token_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if end_token_id is not None and end_token_id not in end_token_ids:
        config.eos_token_id = [*(token_id for token_id in end_token_ids if token_id is not None), end_token_id]
    config.to_json_file(export_folder / GENERATION_CONFIG_FILE, keys_to_pop=["compile_config"])


@contextmanager
def use_default_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """During the `with` block, replace the generation config of a model by the default one, because `save_pretrained`
    refuses some configs."""
    original_generation_config, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = original_generation_config


def _read_generation_config(model: str, revision: str | None) -> dict[str, Any] | None:
    model_source, load_options = locate_model(model, revision)
    load_options |= {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    with translate_load_errors(GENERATION_CONFIG_FILE, model):
        generation_config_file = cached_file(str(model_source), GENERATION_CONFIG_FILE, **load_options)
    return None if generation_config_file is None else read_json(Path(generation_config_file), model)


def _split_refused_settings(settings: Mapping[str, Any]) -> tuple[GenerationConfig, list[str]]:
    """Return a generation config with those of `settings` that transformers accepts, and the names of the refused
    ones."""
    if complete_config := _try_build_generation_config(settings):
        return complete_config, []
    accepted_settings: dict[str, Any] = {}
    for key in sorted(settings, key=lambda key: (key not in _SETTINGS_TRIED_FIRST, key)):
        if _try_build_generation_config({**accepted_settings, key: settings[key]}):
            accepted_settings[key] = settings[key]
    return GenerationConfig.from_dict(dict(accepted_settings)), sorted(settings.keys() - accepted_settings.keys())


def _try_build_generation_config(generation_settings: Mapping[str, Any]) -> GenerationConfig | None:
    """Return a generation config with `generation_settings`; None if transformers cannot load or write them."""
    try:
        config = GenerationConfig.from_dict(dict(generation_settings))
        # Try the conversion that transformers makes at each load of a model, because it fails for some settings.
        GenerationConfig.from_dict(config.to_dict())
        config.to_json_string()
        eos_token_ids = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id or 0]
    except Exception:  # noqa: BLE001 - a value of a wrong type may raise any error
        return None
    return config if all(isinstance(token_id, int) for token_id in eos_token_ids) else None
