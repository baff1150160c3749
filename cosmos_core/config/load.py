"""Parse and validate TOML files; every error is reported in one line that names file and key."""

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from cosmos_core.config.compat import trl
from cosmos_core.config.schema.table import Table, TableT, all_fields, tables_in
from cosmos_core.errors import ConfigError

Values = dict[str, Any]

# Pydantic's messages name Python types; messages for users name TOML types.
_TYPE_DESCRIPTIONS = {
    "model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "tuple_type": "an array",
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip

# Names that pydantic adds to an error location for members of a union; no table has a key of such a name.
_UNION_MEMBER_PATTERN = re.compile(
    r"(constrained-)?(float|int|str|bool)|(tuple|dict|list|literal|function-\w+|nullable)\[.*\]"
)

_FORMAT_NAMES = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 32  # maximum depth of nested tables, above that of the schema and below Python's recursion limit
_MAX_NAMED_KEYS = 3
MAX_LINE = 1000  # maximum length of an error message in characters, about one screen


def read_toml(path: Path) -> Values:
    """Parse a TOML file. The result is cached by content and shared between callers, which must not change it.

    Raises:
        ConfigError: the file is missing, unreadable, too large or not TOML; the message names the line.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        values = _parse_toml(content) if len(content) <= MAX_FILE_BYTES else None
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
    except ValueError as error:  # invalid TOML, or an integer with more digits than Python parses
        format_name = _FORMAT_NAMES.get(path.suffix.lower())
        usage = f"a configuration is TOML, not {format_name}; write [table] and key = value"
        problem = usage if format_name else "not valid TOML"
        raise ConfigError(f"{path}: {problem}: {_join_lines(str(error))}") from error
    if values is None:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes, the most that a configuration may have")
    if problem := describe_unusable(values):
        raise ConfigError(f"{path}: {problem}")
    return values


@lru_cache(maxsize=4)  # the state file of a large run has half a megabyte and is read several times
def _parse_toml(content: bytes) -> Values:
    return tomllib.loads(content.decode("utf-8-sig"))


def parse(
    table: type[TableT], values: Any, *, source: str, prefix: str = "", notices: list[str] | None = None
) -> TableT:
    """Return `values` as a validated `table`; rules that change values of the user append a message to `notices`.

    Raises:
        ConfigError: the values have an error; the message has its key, value and rule, or a suggestion for the key.
    """
    try:
        return table.model_validate(values, context=None if notices is None else {"notices": notices})
    except ValidationError as error:
        # Report a misspelt key first, because it often causes the other errors.
        validation_errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        locations = [[str(key) for key in _keys(table, each)] for each in validation_errors]
        # Of a value with several possible forms, report the error of the form that fits best.
        nested = [i for i, keys in enumerate(locations) if keys[: len(locations[0])] == locations[0]]
        reported = max(nested, key=lambda i: len(locations[i]))
        message = _explain_error(table, validation_errors[reported], locations[reported], prefix, values)
        keys = dict.fromkeys(_printable_key(each, prefix) for each in locations)
        other_keys = [key for key in keys if key != _printable_key(locations[reported], prefix)]
        raise ConfigError(f"{source}: {message}{_mention_other_keys(other_keys)}") from error


class OverrideTable(dict[str, Any]):
    """Table that is created for a dotted key; when it is merged over a table, the other keys of the table remain."""


def nest_value(keys: Sequence[str], value: Any) -> Any:
    """Return `value` inside nested tables, with one table for each key in `keys`."""
    for key in reversed(keys):
        value = OverrideTable({key: value})
    return value


def merge(base: Mapping[str, Any], overriding_values: Mapping[str, Any], table: str = "") -> Values:
    """Return `base` with `overriding_values` merged into it: tables are merged, and all other values are replaced,
    including maps of names to values.

    `table` is the dotted key of both tables; it is empty for a recipe, and for an entry of `[[pipeline.stages]]`.
    """
    merged_values = type(base)(base) if isinstance(base, dict) else dict(base)
    for name, value in overriding_values.items():
        old, key = merged_values.get(name), f"{table}.{name}".removeprefix(".").removeprefix("overrides.")
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _replaces_table(key, old, value):
            merged_values[name] = merge(old, value, key)
        else:
            merged_values[name] = value
    return merged_values


def _replaces_table(key: str, base_value: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    if key == "train.train_policy":  # a table with another `type` has other keys, so it replaces the old table
        return "type" in value and value["type"] != base_value.get("type", value["type"])
    return key in _free_mapping_keys() and not isinstance(value, OverrideTable)


@cache
def _free_mapping_keys() -> frozenset[str]:
    """Return the keys of a recipe whose values are maps with free names, such as weights of rewards, not tables."""
    from cosmos_core.config.schema.recipe import Recipe

    return frozenset(key for key, _, field in all_fields(Recipe) if _has_mapping_type(field.annotation))


def _has_mapping_type(annotation: Any) -> bool:
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1] is not Any  # the table `[custom]` may contain nested tables
    return any(map(_has_mapping_type, arguments))


def without_none(value: Any) -> Any:
    """Return the value in a form that TOML supports: without keys that are None, and with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_none(item) for item in value]
    return value


def describe_unusable(values: Values) -> str:
    """Return a description of the first value that parses but cannot be used later, such as a 65-bit integer; empty if
    there is none. The search is not recursive, because tables may be nested too deeply."""
    level_values: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        lists = ([*value, *value.values()] if isinstance(value, dict) else value for value in level_values)
        nested_values = list(chain.from_iterable(lists))
        if any(isinstance(item, int) and not -(1 << 63) <= item < 1 << 63 for item in nested_values):
            return "an integer of more than 64 bits, the most that TOML has"
        # Command line arguments and file names may contain any bytes.
        texts = [item for item in nested_values if isinstance(item, str)]
        if any("\0" in text or text.encode("utf-8", "ignore").decode() != text for text in texts):
            return "a text with null characters or with bytes that are not UTF-8"
        level_values = [item for item in nested_values if isinstance(item, dict | list)]
    return f"nested more than {MAX_DEPTH} tables deep" if level_values else ""


def _mention_other_keys(keys: Sequence[str]) -> str:
    """Return the end of an error message that names other keys with errors; empty if there are none."""
    shortened_keys = [key if len(key) <= 60 else f"{key[:57]}..." for key in keys[:_MAX_NAMED_KEYS]]
    if len(keys) > len(shortened_keys):
        shortened_keys.append(f"{len(keys) - len(shortened_keys)} more")
    return f" (and {', '.join(shortened_keys)})" if shortened_keys else ""


def _printable_key(keys: Sequence[str], prefix: str) -> str:
    """Return the dotted key of an error; names with control characters are quoted for the terminal."""
    printable_names = [name if name.isprintable() and name else repr(name) for name in keys]
    return ".".join([prefix, *printable_names] if prefix else printable_names)


def _explain_error(table: type[Table], error_details: Any, keys: list[str], prefix: str, values: Any) -> str:
    key, value = _printable_key(keys, prefix), short_text(error_details.get("input"))
    error_type, context = error_details["type"], error_details.get("ctx", {})
    if error_type == "extra_forbidden":
        return f"{key}: unknown key{_suggest_key(table, keys, prefix, values)}"
    if error_type == "missing":
        return f"{key}: is required"
    if error_type == "union_tag_not_found":
        return f"{key}.{context['discriminator'].strip(chr(39))}: is required"
    if error_type == "union_tag_invalid":
        tag_key, tag = f"{key}.{context['discriminator'].strip(chr(39))}", short_text(context["tag"])
        return f"{tag_key} = {tag}: must be one of {context['expected_tags']}"
    if error_type in _TYPE_DESCRIPTIONS:
        is_unquoted = error_type == "string_type" and not isinstance(error_details["input"], dict | list)
        remedy = f", in quotes (with --set: '{key}=\"...\"')" if is_unquoted and not keys[-1].isdigit() else ""
        return f"{key} = {value}: must be {_TYPE_DESCRIPTIONS[error_type]}{remedy}"
    message = _join_lines(error_details["msg"].removeprefix("Value error, "))
    message = message[:1].lower() + message[1:]
    if error_type != "value_error":
        return f"{key} = {value}: {message}"
    # The message of a validator of the schema contains the value.
    if keys and message.startswith(f"{keys[-1]} "):
        return key + message[len(keys[-1]) :]
    return f"{key}: {message}" if key else message


def _keys(table: type[Table], error_details: Any) -> Iterator[int | str]:
    """Yield the location of an error without pydantic's names of union members, which are not part of the file."""
    current_tables: list[type[Table]] = [table]
    location, last_key = error_details["loc"], ()
    if error_details["type"] == "extra_forbidden":
        location, last_key = location[:-1], location[-1:]  # an unknown key may equal the name of a union member
    for key in location:
        fields = {name: field for model in current_tables for name, field in model.model_fields.items()}
        if key in fields:
            current_tables = tables_in(fields[str(key)].annotation)
            yield key
        elif isinstance(key, str) and any(key in _union_tags(model) for model in current_tables):
            current_tables = [model for model in current_tables if key in _union_tags(model)]
        elif not (isinstance(key, str) and _UNION_MEMBER_PATTERN.fullmatch(key)):
            yield key
    yield from last_key


def _union_tags(model: type[Table]) -> set[str]:
    tag = model.model_fields.get("type")
    return {getattr(model, "algorithm", ""), *(get_args(tag.annotation) if tag else ())}


def _suggest_key(table: type[Table], keys: list[str], prefix: str, values: Any) -> str:
    """Return the end of an error message with a suggestion for an unknown key: the equivalent of a TRL name, otherwise
    a similar name in the same table, the same name in another table, or a similar path."""
    names = sorted({key for key, *_ in all_fields(table)})
    dotted_key = ".".join(keys)
    if dotted_key in names:
        owners = [model.model_fields for key, model, _ in all_fields(table) if key == dotted_key]
        type_names = [kind for fields in owners if "type" in fields for kind in get_args(fields["type"].annotation)]
        type_choices = " or ".join(dict.fromkeys(f'"{kind}"' for kind in type_names))
        type_key = f"{'.'.join(keys[:-1])}.type"
        if not _has_type_or_value(values, keys[:-1]):
            return f" here; set {type_key} = {type_choices}"
        return f" here; it belongs to {type_key} = {type_choices}" if type_choices else " here"
    if equivalent_key := trl.describe_equivalent_key(dotted_key):
        return equivalent_key
    if (intended_key := _closest_trl_key(keys[-1], names)) and not prefix:
        return f"; did you mean {intended_key}?"
    parent = dotted_key.rpartition(".")[0]
    sibling_keys = [candidate_key for candidate_key in names if candidate_key.rpartition(".")[0] == parent]
    similar_keys = (
        difflib.get_close_matches(dotted_key, sibling_keys, n=1, cutoff=0.75)
        or [candidate_key for candidate_key in names if candidate_key.rpartition(".")[2] == keys[-1]]
        or difflib.get_close_matches(dotted_key, names, n=1, cutoff=0.8)
    )
    return f"; did you mean {f'{prefix}.' if prefix else ''}{similar_keys[0]}?" if similar_keys else ""


def _closest_trl_key(name: str, known_keys: Sequence[str]) -> str:
    """Return the key to which a misspelt name of transformers or TRL corresponds; empty if a key of this schema is at
    least as similar.

    Example: the letters of `optm_learnrate` are closer to `optm_name` than to `optm_lr`, which is the learning rate.
    """
    own_names = {_normalise_key(key.rpartition(".")[2]) for key in known_keys}
    trl_names = {_normalise_key(trl_name): keys[0] for trl_name, keys in trl.NAMES.items() if keys[0] in known_keys}
    [similar_name] = difflib.get_close_matches(_normalise_key(name), [*own_names, *trl_names], n=1, cutoff=0.75) or [""]
    return trl_names[similar_name] if similar_name in trl_names and similar_name not in own_names else ""


def _normalise_key(name: str) -> str:
    return name.removeprefix("optm_").replace("_", "")


def _has_type_or_value(values: Any, keys: list[str]) -> bool:
    """Return True if the table at the path `keys` sets `type`, or if the value at this path is not a table."""
    for key in keys:
        values = values.get(key) if isinstance(values, Mapping) else None
    return not isinstance(values, Mapping) or "type" in values


def short_text(value: Any) -> str:
    """Return the text of a value for an error message, shortened to 60 characters."""
    text = _join_lines(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def escape_controls(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _join_lines(text))


def shorten_message(message: str) -> str:
    """Return an error message on one line; the middle of a long message is omitted."""
    line = escape_controls(message)
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 300]} ... {line[-295:]}"
