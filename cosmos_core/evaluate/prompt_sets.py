"""Prompt sets on which a diffusion model is evaluated."""

import os
from itertools import islice
from pathlib import Path

from cosmos_core.config.prompt_sets import find_prompt_set
from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.config.schema.evaluate import EvaluateConfig
from cosmos_core.data.media_rows import find_reference_response
from cosmos_core.data.media_source import open_media_items
from cosmos_core.errors import DataError
from cosmos_core.types import Prompt

_PROMPTS_KEY = "evaluate.prompts"


def read_prompt_sets(config: EvaluateConfig) -> dict[str, list[Prompt]]:
    """Return the prompts of each prompt set, at most `evaluate.limit`, by the name of the set. The id of a prompt is
    its position in the set; its metadata are the other columns of its row. In a folder with one file per split, the
    split `test` is read. Raise `DataError` if a set is missing or empty, or one of its rows has no prompt."""
    try:
        return {name: _read_prompt_set(location, config.limit) for name, location in config.prompt_sets.items()}
    except DataError as error:  # replace names of data set settings, which prompt sets do not have, in the message
        error_text = str(error).partition(f"; set {_PROMPTS_KEY}.split")[0]
        error_text = error_text.replace(f"{_PROMPTS_KEY}.name", _PROMPTS_KEY)
        raise DataError(error_text.replace(f"{_PROMPTS_KEY}.split =", f"{_PROMPTS_KEY}: the split is")) from error


def _read_prompt_set(location: str, max_prompts: int | None) -> list[Prompt]:
    prompts_path = find_prompt_set(location, _PROMPTS_KEY) or Path(os.path.expanduser(location))
    if not os.path.exists(prompts_path):  # a missing path would be read as a data set on the Hub
        raise DataError(f"{_PROMPTS_KEY}: {location} does not exist; give a file, a folder or the name of a known set")
    split = "test" if prompts_path.is_dir() else "train"
    prompts: list[Prompt] = []
    read_items = open_media_items(DatasetConfig(name=str(prompts_path), split=(split,)), _PROMPTS_KEY)
    for item in islice(read_items(), max_prompts):
        if item.problem or not item.prompt:
            raise DataError(f"{_PROMPTS_KEY}: {location}: {item.problem or f'{item.location}: the prompt is empty'}")
        reference_response = find_reference_response(item.metadata, "")
        prompts.append(Prompt(len(prompts), (0,), item.prompt, reference_response, metadata=item.metadata))
    if not prompts:
        raise DataError(f"{_PROMPTS_KEY}: {location} has no prompts")
    return prompts
