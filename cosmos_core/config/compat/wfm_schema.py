"""The deprecated `--wfm-mode` schema of Cosmos-RL, built from `wfm.toml`: its keys, their types and defaults."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any, Literal, Union

from pydantic import Field, create_model

from cosmos_core.config.schema.table import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Table,
    all_fields,
)

DATA: dict[str, Any] = tomllib.loads(files("cosmos_core.config.compat").joinpath("wfm.toml").read_text("utf-8"))
_TYPES: dict[str, Any] = {
    "switch": bool, "text": str, "name": Annotated[str, Field(min_length=1)], "integer": int, "number": float,
    "count": PositiveInt, "count or 0": NonNegativeInt, "above 0": PositiveFloat, "not below 0": NonNegativeFloat,
    "decay": Annotated[float, Field(ge=0, lt=1)], "anything": Any,
} | {name: Literal[tuple(values)] for name, values in DATA["choices"].items()}  # fmt: skip


def _annotation(name: str | list[str]) -> Any:
    """The type behind `is` in wfm.toml."""
    if isinstance(name, str):
        return _TYPES[name]
    array: Any = tuple  # of types that are known when this runs
    if name[-1] == "...":
        return Annotated[array[_TYPES[name[0]], ...], Field(strict=False, min_length=1)]
    return Annotated[array[tuple(_TYPES[item] for item in name)], Field(strict=False)]


def _table(title: str, keys: dict[str, Any], /, **more: Any) -> type[Table]:
    """The model of a table of wfm.toml, with `more` fields."""
    fields: dict[str, Any] = dict(more)
    for key, field in keys.items():
        if "is" not in field:
            inner = _table(key, field)
            fields[key] = (inner, inner())
        elif "default" in field:
            fields[key] = (_annotation(field["is"]), field["default"])
        else:
            fields[key] = (_annotation(field["is"]) | None, None)
    return create_model(title, __base__=Table, **fields)


def _callbacks_type() -> Any:
    known = [
        _table(name, {}, name=(Literal[name], ...), args=(arguments := _table("args", keys), arguments()))
        for name, keys in DATA["callbacks"].items()
    ]
    free = _table("callback", {}, name=(_TYPES["callback"], ...), args=(dict[str, Any], {}), step_size=(Any, None))
    union: Any = Union
    array: Any = tuple
    return Annotated[array[Annotated[union[*known, free], Field(discriminator="name")], ...], Field(strict=False)]


def _fields(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of wfm.toml as (dotted name, what is said of it)."""
    for name, field in keys.items():
        if "is" in field:
            yield prefix + name, field
        else:
            yield from _fields(field, f"{prefix}{name}.")


_TYPES["callbacks"] = _callbacks_type()
Root = _table("wfm", DATA["keys"])
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
