"""Weights in a different location than the configuration of their model: `policy.model_safetensor_path`."""

from __future__ import annotations

import shutil
from pathlib import Path

from cosmos_core.config.compose import source_of
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ModelError
from cosmos_core.run.content import files_of_model, is_weights
from cosmos_core.types import StageKind

_KEY = "policy.model_safetensor_path"
_SUFFIXES = (".safetensors", ".safetensors.index.json")


def weights_source(model: Path | str | None, recipe: Recipe, kind: StageKind) -> list[Path]:
    """Return the files of weights that replace those in the model folder; an empty list means that none do.

    Raises:
        ModelError: there are no weights at the path, or the model is not a folder.
    """
    value = recipe.policy.model_safetensor_path
    if not value or kind.reads_model != "weights" or source_of(str(model)) is not None:
        return []
    if not isinstance(model, Path):
        raise ModelError(f"{_KEY} = {value!r}: its configuration is {model!r}, which has to be a folder; download it")
    path = Path(value).expanduser()
    candidates = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    files = [file for file in candidates if file.name.endswith(_SUFFIXES)]
    if not files:
        raise ModelError(f"{_KEY} = {value!r}: no .safetensors file, and no folder with one")
    return files


def overlaid(model: Path, weights: list[Path], folder: Path) -> Path:
    """Fill `folder` with links to the weights and to all other files of the model folder; return `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    other_files = [file for file in files_of_model(model) if not is_weights(file) and not file.name.endswith(_SUFFIXES)]
    for file in other_files:
        link = folder / file.relative_to(model)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.resolve())
    for file in weights:
        name = "model.safetensors" if len(weights) == 1 else file.name
        (folder / name).symlink_to(file.resolve())
    return folder
