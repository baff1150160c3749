"""The deprecated `--wfm-mode` schema of Cosmos-RL, built from `wfm.toml`: its keys, their types and defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from cosmos_core.config.schema.declared import declared, is_key
from cosmos_core.config.schema.table import all_fields

DATA: dict[str, Any] = tomllib.loads(files("cosmos_core.config.compat").joinpath("wfm.toml").read_text("utf-8"))


def _fields(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of wfm.toml as (dotted name, what is said of it)."""
    for name, field in keys.items():
        if is_key(field):
            yield prefix + name, field
        else:
            yield from _fields(field, f"{prefix}{name}.")


Root = declared("wfm", DATA["keys"])
TYPED = dict(_fields(DATA["keys"]))
REASONS = {
    f"{table}.{name}".lstrip("."): reason
    for reason, tables in DATA["without"].items()
    for some, names in tables.items()
    for table in some.split() or [""]
    for name in names.split()
}
FIELDS = {key for key, _, _ in all_fields(Root)}
"""Tables too."""
KEYS = FIELDS | set(REASONS)
TABLES = {key[: dot.start()] for key in KEYS for dot in re.finditer(r"\.", key)}
