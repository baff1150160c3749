"""Metadata in the README.md of a data set or model, in the format of the Hugging Face Hub, such as the files of each
subset and split of a data set:

---
configs:
- config_name: default
  data_files:
  - split: test
    path: data/held_out_*.parquet
---
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml


class DeclaredSubset(NamedTuple):
    """Subset of a data set that its README.md declares, which the Hub calls a configuration."""

    name: str
    is_default: bool
    """Whether the subset is read where none is named."""
    folder: str
    """Folder of the files, relative to that of the data set."""
    split_patterns: dict[str, list[str]]
    """Patterns of the paths of the files of each split, relative to `folder`; empty: their names tell their splits."""


def read_declared_subsets(folder: Path) -> list[DeclaredSubset]:
    """Return the subsets whose files the README.md in a folder declares; empty if it declares none."""
    configs = read_card_metadata(folder).get("configs")
    configs = [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else []
    subsets = [_parse_subset(config, is_only_subset=len(configs) == 1) for config in configs]
    return [subset for subset in subsets if subset.split_patterns or subset.folder != "."]


def read_card_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata in the README.md of a data set or model; empty if there is none, or no valid YAML."""
    try:
        front_matter = re.match(r"---[ \t]*\n(.*?\n)---", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
        metadata = yaml.safe_load(front_matter[1]) if front_matter else None
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _parse_subset(config: dict[str, Any], *, is_only_subset: bool) -> DeclaredSubset:
    name, patterns = str(config.get("config_name", "default")), dict[str, list[str]]()
    for entry in _as_list(config.get("data_files")):
        split_entry = entry if isinstance(entry, dict) else {"path": entry}
        split_paths = patterns.setdefault(str(split_entry.get("split", "train")), [])
        split_paths += map(str, _as_list(split_entry.get("path")))
    is_default = is_only_subset or name == "default" or bool(config.get("default"))
    return DeclaredSubset(name, is_default, str(config.get("data_dir") or "."), patterns)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
