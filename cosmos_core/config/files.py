"""Read a configuration from its files: resolve `extends`, merge several files, translate keys of older generations."""

import os
from collections.abc import Sequence
from pathlib import Path

from cosmos_core.config.compat.translate import with_current_keys
from cosmos_core.config.load import MAX_NESTING_DEPTH, TomlTable, merge_tables, read_toml
from cosmos_core.errors import ConfigError


def read_config(path: Path, notices: list[str], overriding_files: Sequence[Path] = ()) -> tuple[TomlTable, list[Path]]:
    """Return the merged tables of `path`, the files that it `extends` and `overriding_files`, with current key names;
    also return the folders of all these files, from the highest precedence to the lowest.

    `extends` is a file or a list of files, relative to the file that contains it. A file takes precedence over the
    files that it extends, later over earlier files of a list, and `overriding_files` over all others. Raises
    `ConfigError` if a file cannot be read, or if files extend each other in a circle.
    """
    config_values, config_folders = _read_with_extends(path, notices, ())
    for overriding_file in overriding_files:
        overriding_values, overriding_folders = _read_with_extends(overriding_file, notices, ())
        config_values = merge_tables(config_values, _with_absolute_recipe_paths(overriding_values, overriding_file))
        config_folders = overriding_folders + config_folders
    return config_values, config_folders


def _read_with_extends(
    path: Path, notices: list[str], extending_files: tuple[Path, ...]
) -> tuple[TomlTable, list[Path]]:
    resolved_path = Path(os.path.realpath(path))  # use os.path, because Path.resolve fails for a cycle of links
    if (depth := len(extending_files)) == MAX_NESTING_DEPTH:
        raise ConfigError(f"{path}: behind {depth} files that extend each other, the most that there may be")
    chain_of_extending_files = (*extending_files, resolved_path)
    if resolved_path in extending_files:
        raise ConfigError(f"{path}: extends itself: {' -> '.join(map(str, chain_of_extending_files))}")
    config_values = with_current_keys(read_toml(path), str(path), notices)
    for stage_table in _list_stage_tables(config_values):
        if isinstance(stage_table.get("overrides"), dict):
            error_prefix = f"{path}: stage {stage_table.get('name')!r}: overrides"
            stage_table["overrides"] = with_current_keys(stage_table["overrides"], error_prefix, notices)
    extended_files = config_values.pop("extends", [])
    extended_files = [extended_files] if isinstance(extended_files, str) else extended_files
    if not isinstance(extended_files, list) or not all(isinstance(name, str) and name for name in extended_files):
        extends_rule_text = "must be a file or a list of files, relative to this one"
        raise ConfigError(f"{path}: extends = {extended_files!r}: {extends_rule_text}")
    merged_values: TomlTable = {}
    config_folders: list[Path] = []
    for name in extended_files:
        extended_file = path.parent / name
        if not os.path.exists(extended_file):  # use os.path, because Path.exists fails for an invalid path
            raise ConfigError(f"{path}: extends = {name!r}: no such file ({extended_file})")
        extended_values, extended_folders = _read_with_extends(extended_file, notices, chain_of_extending_files)
        merged_values = merge_tables(merged_values, _with_absolute_recipe_paths(extended_values, extended_file))
        config_folders = extended_folders + config_folders
    return merge_tables(merged_values, config_values), [path.parent, *config_folders]


def _with_absolute_recipe_paths(config_values: TomlTable, config_file: Path) -> TomlTable:
    """Return `config_values` with an absolute path in the key `recipe` of each stage; relative paths start from the
    folder of `config_file`."""
    for stage_table in _list_stage_tables(config_values):
        if isinstance(stage_table.get("recipe"), str) and stage_table["recipe"]:
            stage_table["recipe"] = os.path.realpath(config_file.parent / stage_table["recipe"])
    return config_values


def _list_stage_tables(config_values: TomlTable) -> list[TomlTable]:
    """Return the tables in `[[pipeline.stages]]`. Other entries are left out, because the schema refuses them later."""
    pipeline_table = config_values.get("pipeline")
    stage_tables = pipeline_table.get("stages") if isinstance(pipeline_table, dict) else None
    return [stage for stage in stage_tables if isinstance(stage, dict)] if isinstance(stage_tables, list) else []
