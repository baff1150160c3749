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
from cosmos_core.config.schema.field_metadata import SupportedValues, find_metadata
from cosmos_core.config.schema.table import Table, TableT, all_fields, find_table_classes
from cosmos_core.config.schema.value_types import parse_reward_weights
from cosmos_core.errors import ConfigError

TomlTable = dict[str, Any]

# Pydantic's messages name Python types; messages for users name TOML types.
_TOML_TYPE_BY_ERROR_TYPE = {
    "model_type": "a table", "model_attributes_type": "a table", "dict_type": "a table", "tuple_type": "an array",
    "string_type": "a string", "int_type": "an integer", "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip

# Names that pydantic adds to an error location for members of a union; no table has a key of such a name.
_UNION_MEMBER_PATTERN = re.compile(
    r"(constrained-)?(float|int|str|bool)|(tuple|dict|list|literal|function-\w+|nullable)\[.*\]"
)

_FORMAT_BY_SUFFIX = {".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
MAX_FILE_BYTES = 16 << 20
MAX_NESTING_DEPTH = 32  # maximum depth of nested tables, above that of the schema and below Python's recursion limit
_MAX_KEYS_IN_MESSAGE = 3
MAX_MESSAGE_LENGTH = 1000  # maximum length of an error message in characters, about one screen


def read_toml(path: Path) -> TomlTable:
    """Parse a TOML file. The result is cached by content and shared between callers, which must not change it. Raises
    `ConfigError` if the file is missing, unreadable, too large or not TOML; the message names the line."""
    try:
        with open(path, "rb") as toml_file:
            file_content = toml_file.read(MAX_FILE_BYTES + 1)
        parsed_tables = _parse_toml(file_content) if len(file_content) <= MAX_FILE_BYTES else None
    except FileNotFoundError:
        similar_names = difflib.get_close_matches(path.stem, [each.stem for each in path.parent.glob("*.toml")], n=1)
        suggestion_text = f"; did you mean {path.with_name(similar_names[0])}.toml?" if similar_names else ""
        raise ConfigError(f"{path}: no such file{suggestion_text}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder; name a .toml file in it") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except RecursionError:
        raise ConfigError(f"{path}: nested more than {MAX_NESTING_DEPTH} tables deep") from None
    except ValueError as error:  # raised for invalid TOML, or for an integer with more digits than Python parses
        wrong_format_name = _FORMAT_BY_SUFFIX.get(path.suffix.lower())
        wrong_format_hint = f"a configuration is TOML, not {wrong_format_name}; write [table] and key = value"
        problem_text = wrong_format_hint if wrong_format_name else "not valid TOML"
        if path.suffix.lower() in {".csv", ".tsv", ".jsonl", ".parquet"}:
            problem_text = f"rows, not a recipe; train on them with cosmos sft --model M --data {path}"
        raise ConfigError(f"{path}: {problem_text}: {_join_lines(str(error))}") from error
    if parsed_tables is None:
        raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes, the most that a configuration may have")
    if problem_text := describe_unsupported_value(parsed_tables):
        raise ConfigError(f"{path}: {problem_text}")
    return parsed_tables


@lru_cache(maxsize=4)  # cached, because the state file of a large run (half a megabyte) is parsed several times
def _parse_toml(file_content: bytes) -> TomlTable:
    return tomllib.loads(file_content.decode("utf-8-sig"))


def parse_table(
    table: type[TableT], values: Any, *, error_prefix: str, key_prefix: str = "", notices: list[str] | None = None
) -> TableT:
    """Return `values` as a validated `table`; a validator that changes a value of the user adds a message to `notices`.
    Raises `ConfigError` if a value is invalid or a key unknown. The message names the key, with the value and the
    violated rule or, for an unknown key, a similar key."""
    try:
        return table.model_validate(values, context=None if notices is None else {"notices": notices})
    except ValidationError as error:
        # Report a misspelt key first, because it often causes the other errors.
        validation_errors = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        key_paths = [[str(key) for key in _error_location_keys(table, each)] for each in validation_errors]
        # Pydantic reports an error for each type that a value may have; the most deeply nested error fits best.
        same_key_indices = [i for i, all_keys in enumerate(key_paths) if all_keys[: len(key_paths[0])] == key_paths[0]]
        deepest_error_index = max(same_key_indices, key=lambda i: len(key_paths[i]))
        key_path, error_details = key_paths[deepest_error_index], validation_errors[deepest_error_index]
        error_message = _describe_validation_error(table, error_details, key_path, key_prefix, values)
        all_keys = dict.fromkeys(_printable_key(each, key_prefix) for each in key_paths)
        other_error_keys = [key for key in all_keys if key != _printable_key(key_path, key_prefix)]
        listed_keys = [key if len(key) <= 60 else f"{key[:57]}..." for key in other_error_keys[:_MAX_KEYS_IN_MESSAGE]]
        if len(other_error_keys) > len(listed_keys):
            listed_keys.append(f"{len(other_error_keys) - len(listed_keys)} more")
        other_error_keys_text = f" (and {', '.join(listed_keys)})" if listed_keys else ""
        raise ConfigError(f"{error_prefix}: {error_message}{other_error_keys_text}") from error


class OverrideTable(dict[str, Any]):
    """Table that an override with a dotted key such as `a.b = 1` creates. Other keys of a table are kept when an
    `OverrideTable` is merged into it."""


def nest_value(keys: Sequence[str], nested_value: Any) -> Any:
    """Return `nested_value` inside nested tables, with one table for each key in `keys`."""
    for key in reversed(keys):
        nested_value = OverrideTable({key: nested_value})
    return nested_value


def merge_tables(old_table: Mapping[str, Any], overriding_values: Mapping[str, Any], table_key: str = "") -> TomlTable:
    """Return `old_table` with `overriding_values` merged into it: tables are merged, and all other values are replaced,
    including tables whose keys are names that the user chooses, such as rewards with their weights.

    `table_key` is the dotted key of both tables; it is empty for a recipe, and for an entry of `[[pipeline.stages]]`.
    """
    merged_values = type(old_table)(old_table) if isinstance(old_table, dict) else dict(old_table)
    for name, value in overriding_values.items():
        old_value, key = merged_values.get(name), f"{table_key}.{name}".removeprefix(".").removeprefix("overrides.")
        if isinstance(value, OverrideTable) and key.endswith(".reward_function"):
            # Convert a list of rewards to a table of weights, so that `--set KEY.NAME=WEIGHT` keeps the other rewards.
            old_value = parse_reward_weights(old_value)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping) and not _replaces_table(key, old_value, value):
            merged_values[name] = merge_tables(old_value, value, key)
        else:
            merged_values[name] = value
    return merged_values


def _replaces_table(key: str, old_table: Mapping[str, Any], new_table: Mapping[str, Any]) -> bool:
    if key == "train.train_policy":  # a table with another `type` has other keys, so it replaces the old table
        return "type" in new_table and new_table["type"] != old_table.get("type", new_table["type"])
    has_user_chosen_keys = key == "sweep.grid" or key in _list_tables_with_user_chosen_keys()
    return has_user_chosen_keys and not isinstance(new_table, OverrideTable)


@cache
def _list_tables_with_user_chosen_keys() -> frozenset[str]:
    """Return the recipe keys whose values map names that the user chooses to values, such as rewards to weights."""
    from cosmos_core.config.schema.recipe import Recipe

    return frozenset(key for key, _, field in all_fields(Recipe) if _has_user_chosen_keys(field.annotation))


def _has_user_chosen_keys(type_annotation: Any) -> bool:
    type_arguments = get_args(type_annotation)
    if get_origin(type_annotation) is dict:
        return type_arguments[1] is not Any  # tables of any values, such as `[custom]`, are merged like other tables
    return any(map(_has_user_chosen_keys, type_arguments))


def without_none(toml_value: Any) -> Any:
    """Return the value in a form that TOML supports: without keys that are None, and with lists in place of tuples."""
    if isinstance(toml_value, Mapping):
        return {key: without_none(child) for key, child in toml_value.items() if child is not None}
    if isinstance(toml_value, list | tuple):
        return [without_none(child) for child in toml_value]
    return toml_value


def describe_unsupported_value(tables: TomlTable) -> str:
    """Return a description of the first value that a configuration must not have although TOML's parser accepts it,
    such as a 65-bit integer; empty if there is none. The search is not recursive, because tables may be nested too
    deeply."""
    containers_at_depth: list[Any] = [tables]
    for _ in range(MAX_NESTING_DEPTH):
        value_lists = ([*value, *value.values()] if isinstance(value, dict) else value for value in containers_at_depth)
        child_values = list(chain.from_iterable(value_lists))
        if any(isinstance(child, int) and not -(1 << 63) <= child < 1 << 63 for child in child_values):
            return "an integer of more than 64 bits, the most that TOML has"
        # Refuse bytes that are not UTF-8, which command lines and file names may contain, but TOML cannot.
        string_values = [child for child in child_values if isinstance(child, str)]
        if any("\0" in string or string.encode("utf-8", "ignore").decode() != string for string in string_values):
            return "a text with null characters or with bytes that are not UTF-8"
        containers_at_depth = [child for child in child_values if isinstance(child, dict | list)]
    return f"nested more than {MAX_NESTING_DEPTH} tables deep" if containers_at_depth else ""


def _printable_key(key_path: Sequence[str], key_prefix: str) -> str:
    """Return the dotted key for an error message, from `key_prefix` and the names in `key_path`. A name with control
    characters is quoted, so that it does not affect the terminal."""
    printable_names = [key_part if key_part.isprintable() and key_part else repr(key_part) for key_part in key_path]
    return ".".join([key_prefix, *printable_names] if key_prefix else printable_names)


def _describe_validation_error(table: type[Table], error: Any, keys: list[str], key_prefix: str, config: Any) -> str:
    key, value = _printable_key(keys, key_prefix), shorten_value(error.get("input"))
    error_type, error_context = error["type"], error.get("ctx", {})
    if error_type == "extra_forbidden":
        return f"{key}: unknown key{_suggest_known_key(table, keys, key_prefix, config)}"
    if error_type == "missing":
        return f"{key}: is required"
    if error_type == "union_tag_not_found":
        return f"{key}.{error_context['discriminator'].strip(chr(39))}: is required"
    if error_type == "union_tag_invalid":
        type_key, discriminator_value = f"{key}.{error_context['discriminator'].strip(chr(39))}", error_context["tag"]
        return f"{type_key} = {shorten_value(discriminator_value)}: must be one of {error_context['expected_tags']}"
    if error_type in _TOML_TYPE_BY_ERROR_TYPE:
        lacks_quotes = error_type == "string_type" and not isinstance(error["input"], dict | list)
        quotes_hint = f", in quotes (with --set: '{key}=\"...\"')" if lacks_quotes and not keys[-1].isdigit() else ""
        return f"{key} = {value}: must be {_TOML_TYPE_BY_ERROR_TYPE[error_type]}{quotes_hint}"
    # List only the values that this version supports, because pydantic's message would list all values of the type.
    if error_type == "literal_error":
        fields_of_key = (key_field for name, _, key_field in all_fields(table) if name == ".".join(keys))
        supported_values_of_key = (find_metadata(key_field, SupportedValues) for key_field in fields_of_key)
        if supported_values := next(filter(None, supported_values_of_key), None):
            return f"{key} = {value}: must be {' or '.join(map(repr, supported_values.values))}"
    error_message = _join_lines(error["msg"].removeprefix("Value error, "))
    error_message = error_message[:1].lower() + error_message[1:]
    if error_type != "value_error":
        return f"{key} = {value}: {error_message}"
    # A message of a validator in the schema already contains the value, so only the key is added to it.
    if keys and error_message.startswith(f"{keys[-1]} "):
        return key + error_message[len(keys[-1]) :]
    return f"{key}: {error_message}" if key else error_message


def _error_location_keys(root_table_class: type[Table], error_details: Any) -> Iterator[int | str]:
    """Yield the keys that lead to the invalid value of a pydantic error, without the names of union members."""
    candidate_table_classes: list[type[Table]] = [root_table_class]
    error_location, unknown_key = error_details["loc"], ()
    if error_details["type"] == "extra_forbidden":
        # Yield the unknown key separately: the loop would take a key named `int` for a member of a union.
        error_location, unknown_key = error_location[:-1], error_location[-1:]
    for key in error_location:
        fields_by_name = {name: field for each in candidate_table_classes for name, field in each.model_fields.items()}
        if key in fields_by_name:
            candidate_table_classes = find_table_classes(fields_by_name[str(key)].annotation)
            yield key
        elif isinstance(key, str) and any(key in _discriminator_values(each) for each in candidate_table_classes):
            candidate_table_classes = [each for each in candidate_table_classes if key in _discriminator_values(each)]
        elif not (isinstance(key, str) and _UNION_MEMBER_PATTERN.fullmatch(key)):
            yield key
    yield from unknown_key


def _discriminator_values(table_class: type[Table]) -> set[str]:
    type_field = table_class.model_fields.get("type")
    return {getattr(table_class, "algorithm", ""), *(get_args(type_field.annotation) if type_field else ())}


def _suggest_known_key(table: type[Table], key_path: list[str], key_prefix: str, config_values: Any) -> str:
    """Return the end of an error message, which suggests a key for an unknown key: the equivalent of a name of TRL,
    otherwise a similar key of the same table, the key of this name in another table, or a similar dotted key."""
    known_keys = sorted({key for key, *_ in all_fields(table)})
    dotted_key = ".".join(key_path)
    if dotted_key in known_keys:
        fields_of_tables = [table_class.model_fields for key, table_class, _ in all_fields(table) if key == dotted_key]
        type_fields = [fields["type"] for fields in fields_of_tables if "type" in fields]
        type_names = dict.fromkeys(f'"{name}"' for field in type_fields for name in get_args(field.annotation))
        algorithm_choices = " or ".join(type_names)
        type_key = f"{'.'.join(key_path[:-1])}.type"
        for key in key_path[:-1]:
            config_values = config_values.get(key) if isinstance(config_values, Mapping) else None
        if isinstance(config_values, Mapping) and "type" not in config_values:
            return f" here; set {type_key} = {algorithm_choices}"
        return f" here; it belongs to {type_key} = {algorithm_choices}" if algorithm_choices else " here"
    if equivalent_key := trl.describe_equivalent_key(dotted_key):
        return equivalent_key
    if (intended_key := _correct_trl_name(key_path[-1], known_keys)) and not key_prefix:
        return f"; did you mean {intended_key}?"
    parent_key = dotted_key.rpartition(".")[0]
    sibling_keys = [key for key in known_keys if key.rpartition(".")[0] == parent_key]
    similar_keys = (
        difflib.get_close_matches(dotted_key, sibling_keys, n=1, cutoff=0.75)
        or [key for key in known_keys if key.rpartition(".")[2] == key_path[-1]]
        or difflib.get_close_matches(dotted_key, known_keys, n=1, cutoff=0.8)
    )
    return f"; did you mean {f'{key_prefix}.' if key_prefix else ''}{similar_keys[0]}?" if similar_keys else ""


def _correct_trl_name(name: str, known_keys: Sequence[str]) -> str:
    """Return the key to which a misspelt name of transformers or TRL corresponds; empty if no such name is similar, or
    if a key of this schema is at least as similar.

    Example: the letters of `optm_learnrate` are closer to `optm_name` than to `optm_lr`, which is the learning rate.
    """
    schema_key_names = {_normalise_key(key.rpartition(".")[2]) for key in known_keys}
    trl_keys = {_normalise_key(name): keys[0] for name, keys in trl.KEYS_BY_TRL_NAME.items() if keys[0] in known_keys}
    similar_names = difflib.get_close_matches(_normalise_key(name), [*schema_key_names, *trl_keys], n=1, cutoff=0.75)
    return "" if not similar_names or similar_names[0] in schema_key_names else trl_keys[similar_names[0]]


def _normalise_key(name: str) -> str:
    return name.removeprefix("optm_").replace("_", "")


def shorten_value(value: Any) -> str:
    """Return the text of a value for an error message, shortened to 60 characters."""
    text = _join_lines(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def make_printable(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in _join_lines(text))


def shorten_message(full_message: str) -> str:
    """Return an error message on one line; the middle of a long message is omitted."""
    line = make_printable(full_message)
    return line if len(line) <= MAX_MESSAGE_LENGTH else f"{line[: MAX_MESSAGE_LENGTH - 300]} ... {line[-295:]}"
