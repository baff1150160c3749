"""From TOML files to validated tables, with every mistake told in one line that names file and key."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from cosmos_core.config.table import Table
from cosmos_core.errors import ConfigError

Values = dict[str, Any]
TableT = TypeVar("TableT", bound=Table)

# Pydantic's words for these are Python's; a user writes TOML.
_SHAPES = {
    "model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "tuple_type": "an array",
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip

MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 32  # far beyond any table of ours, far below what recursion can take


def read_toml(path: Path) -> Values:
    """Parse a TOML file.

    Raises:
        ConfigError: it is missing, unreadable, too large or not TOML; the message has the line.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        values = tomllib.loads(content.decode("utf-8")) if len(content) <= MAX_FILE_BYTES else None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a .toml file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} tables deep") from None
    except ValueError as error:  # TOMLDecodeError, and integers of more digits than Python reads
        raise ConfigError(f"{path}: not valid TOML: {_one_line(str(error))}") from error
    if values is None:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes, the most that a configuration may have")
    if depth(values) > MAX_DEPTH:
        raise ConfigError(f"{path}: nested more than {MAX_DEPTH} tables deep")
    return values


def parse(table: type[TableT], values: Any, *, source: str, prefix: str = "") -> TableT:
    """Validate `values` as `table`.

    Raises:
        ConfigError: the first mistake, with its key, its value, the rule and, for a misspelt key, a suggestion.
    """
    try:
        return table.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        # A misspelt key is the cause of the other complaints more often than not.
        mistakes.sort(key=lambda mistake: mistake["type"] != "extra_forbidden")
        message = _explain(table, mistakes[0], prefix)
        more = f" (and {len(mistakes) - 1} more)" if len(mistakes) > 1 else ""
        raise ConfigError(f"{source}: {message}{more}") from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Values:
    """`over` on top of `base`: tables are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            # Another kind of training is another table: keys of the old kind would be unknown in it.
            if "type" in value and value["type"] != below.get("type", value["type"]):
                merged[key] = dict(value)
            else:
                merged[key] = merge(below, value)
        else:
            merged[key] = value
    return merged


def without_none(value: Any) -> Any:
    """The value as TOML can say it: keys that are None left out, tuples as arrays."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def depth(values: Values) -> int:
    """Levels of nesting, counted without recursion."""
    levels = 0
    level: list[Any] = [values]
    while level:
        levels += 1
        inner = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        level = [item for item in inner if isinstance(item, dict | list)]
    return levels


def _explain(table: type[BaseModel], mistake: Any, prefix: str) -> str:
    keys = [str(key) for key in _keys(table, mistake["loc"])]
    shown = [name if name.isprintable() and name else repr(name) for name in keys]
    key = ".".join([prefix, *shown] if prefix else shown)
    value = _short(mistake.get("input"))
    if mistake["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggest(table, keys, prefix)}"
    if mistake["type"] == "missing":
        return f"{key}: is required"
    if mistake["type"] == "union_tag_invalid":
        discriminator, tag = mistake["ctx"]["discriminator"].strip("'"), mistake["ctx"]["tag"]
        return f"{key}.{discriminator} = {_short(tag)}: must be one of {mistake['ctx']['expected_tags']}"
    if mistake["type"] in _SHAPES:
        return f"{key} = {value}: must be {_SHAPES[mistake['type']]}"
    message = mistake["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if mistake["type"] == "value_error":  # our own rules name the value themselves
        if keys and message.startswith(f"{keys[-1]} "):
            return key + _one_line(message)[len(keys[-1]) :]
        return f"{key}: {_one_line(message)}" if key else _one_line(message)
    return f"{key} = {value}: {_one_line(message)}"


def _keys(table: type[BaseModel], loc: tuple[int | str, ...]) -> Iterator[int | str]:
    """The location without pydantic's tags of union members, which no user wrote."""
    current: list[type[BaseModel]] = [table]
    for key in loc:
        fields = {name: field for model in current for name, field in model.model_fields.items()}
        if key in fields:
            current = _models_in(fields[str(key)].annotation)
            yield key
        elif isinstance(key, str) and any(key in _tags(model) for model in current):
            current = [model for model in current if key in _tags(model)]
        else:
            yield key


def _tags(model: type[BaseModel]) -> set[str]:
    tag = model.model_fields.get("type")
    return set(get_args(tag.annotation)) if tag else set()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]


def all_keys(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every dotted key below `table`."""
    for name, field in table.model_fields.items():
        yield prefix + name
        for model in _models_in(field.annotation):
            yield from all_keys(model, f"{prefix}{name}.")


def _suggest(table: type[BaseModel], keys: list[str], prefix: str) -> str:
    """Prefer a near name in the same table, then the same name in another table, then a near path anywhere."""
    known = sorted(set(all_keys(table)))
    dotted = ".".join(keys)
    if dotted in known:
        return " here; it belongs to another `type`"
    parent = dotted.rpartition(".")[0]
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    near = difflib.get_close_matches(dotted, siblings, n=1, cutoff=0.75)
    near = near or [k for k in known if k.rpartition(".")[2] == keys[-1]][:1]
    near = near or difflib.get_close_matches(dotted, known, n=1, cutoff=0.8)
    return f"; did you mean {f'{prefix}.' if prefix else ''}{near[0]}?" if near else ""


def _short(value: Any) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(text: str) -> str:
    return " ".join(text.split())
