"""Read a configuration from its files: resolve `extends`, merge several files, translate keys of older generations."""

import os
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.compat.translate import with_current_keys
from cosmos_core.config.load import MAX_DEPTH, Values, merge, read_toml
from cosmos_core.errors import ConfigError


def read_config(path: Path, notices: list[str], overriding_files: Sequence[Path] = ()) -> tuple[Values, list[Path]]:
    """Return the tables of `path` merged over the files that it `extends`, with the files `overriding_files` merged
    over the result and with current key names, and the folders of all these files by precedence.

    `extends` is a file or a list of files, relative to the file that contains it; later files take precedence.

    Raises:
        ConfigError: a file cannot be read, or the files extend each other in a circle.
    """
    values, folders = _read_with_bases(path, notices, ())
    for file in overriding_files:
        overriding_values, overriding_folders = _read_with_bases(file, notices, ())
        values = merge(values, _resolve_recipe_files(overriding_values, file))
        folders = overriding_folders + folders
    return values, folders


def _read_with_bases(path: Path, notices: list[str], including_files: tuple[Path, ...]) -> tuple[Values, list[Path]]:
    resolved_path = Path(os.path.realpath(path))  # Path.resolve raises an error for a cycle of links
    if len(including_files) == MAX_DEPTH:
        raise ConfigError(f"{path}: behind {MAX_DEPTH} files that extend each other, the most that there may be")
    if resolved_path in including_files:
        extends_cycle = " -> ".join(str(file) for file in (*including_files, resolved_path))
        raise ConfigError(f"{path}: extends itself: {extends_cycle}")
    values = with_current_keys(read_toml(path), str(path), notices)
    for stage in _find_stage_tables(values):
        if isinstance(stage.get("overrides"), dict):
            location = f"{path}: stage {stage.get('name')!r}: overrides"
            stage["overrides"] = with_current_keys(stage["overrides"], location, notices)
    bases = values.pop("extends", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and base for base in bases):
        raise ConfigError(f"{path}: extends = {bases!r}: must be a file or a list of files, relative to this one")
    merged_values: Values = {}
    folders: list[Path] = []
    for base in bases:
        file = path.parent / base
        if not os.path.exists(file):  # os.path.exists returns False for an invalid path; Path.exists raises
            raise ConfigError(f"{path}: extends = {base!r}: no such file ({file})")
        base_values, base_folders = _read_with_bases(file, notices, (*including_files, resolved_path))
        merged_values = merge(merged_values, _resolve_recipe_files(base_values, file))
        folders = base_folders + folders
    return merge(merged_values, values), [path.parent, *folders]


def _resolve_recipe_files(values: Values, config_file: Path) -> Values:
    """Return the values with the recipe files of their stages as absolute paths, resolved from the folder of
    `config_file`."""
    for stage in _find_stage_tables(values):
        if isinstance(stage.get("recipe"), str) and stage["recipe"]:
            stage["recipe"] = os.path.realpath(config_file.parent / stage["recipe"])
    return values


def _find_stage_tables(values: Values) -> list[Values]:
    """Return the tables among the entries of `[[pipeline.stages]]`; the schema reports all other entries."""
    pipeline = values.get("pipeline")
    stages = pipeline.get("stages") if isinstance(pipeline, dict) else None
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
