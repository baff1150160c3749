"""Descriptions of all configuration keys, for `cosmos config explain` and `coverage`, documentation and editors."""

import ast
import difflib
import inspect
import json
import sys
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from cosmos_core.config.compat import trl
from cosmos_core.config.compat.translate import INEFFECTIVE_KEYS, RENAMED_KEYS, current_key
from cosmos_core.config.load import shorten_message
from cosmos_core.config.schema.field_metadata import (
    FieldUnit,
    IntroducedIn,
    KeyStatus,
    StatusName,
    SupportedValues,
    find_metadata,
)
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import Table, all_fields, find_table_classes, support_status
from cosmos_core.errors import ConfigError
from cosmos_core.types import StageKind

_LABEL_BY_VERSION = {"first": "Cosmos-RL", "later": "later Cosmos-RL", "ours": "ours"}
_MAX_COMPARED_NAME_LENGTH = 200
_TOML_TYPE_NAMES = {bool: "true or false", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True)
class KeyDescription:
    """Description of one configuration key, as `cosmos config explain` and the documentation show it."""

    name: str
    """Dotted name of the key. If several tables of a union have the key, there is one description for each."""
    table: type[Table]
    type: str
    default: str
    unit: str
    description: str
    status: StatusName
    note: str
    """Reason why the key has no effect or is not supported, what to use instead, or which of its values are supported;
    otherwise empty."""
    since: str
    is_table: bool


@cache
def list_keys() -> tuple[KeyDescription, ...]:
    """Return the description of every key of a recipe, then of `[pipeline]`, in the order of the schema."""
    fields = [*all_fields(Recipe), *all_fields(PipelineConfig, "pipeline.")]
    status_by_table = {name: support_status(field) for name, _, field in fields if find_table_classes(field.annotation)}
    description_by_key = {
        (name, table): _describe_field(name, table, field, status_by_table) for name, table, field in fields
    }
    return tuple(description_by_key.values())


def find_keys(name: str) -> list[KeyDescription]:
    """Return the descriptions of a key by its current name, an older name or its name in TRL. A name without a table
    stands for the keys of this name in all tables; a name with a stage, `STAGE.KEY`, is unknown. Raises `ConfigError`
    if there is no such key; the message suggests similar keys, or the replacement for a key of TRL."""
    key_name, trl_keys = RENAMED_KEYS.get(name) or current_key(name), trl.keys_for_trl_name(name)
    descriptions = [key for key in list_keys() if key.name == key_name]
    keys_with_same_name = [key for key in list_keys() if key.name.rpartition(".")[2] == name]
    if key_name in INEFFECTIVE_KEYS and not keys_with_same_name and not trl_keys:
        raise ConfigError(f"{name} does nothing in any version; it would have meant {INEFFECTIVE_KEYS[key_name]}")
    descriptions = descriptions or [key for key in list_keys() if key.name in trl_keys or key in keys_with_same_name]
    if not descriptions:
        suggestion = trl.describe_equivalent_key(name) or _suggest_keys(name)
        raise ConfigError(shorten_message(f"{name}: unknown key{suggestion}"))
    return descriptions


def _suggest_keys(name: str) -> str:
    """Return a hint for an unknown key: the keys of the same name in other tables, otherwise the keys with `name` as a
    word of their name, otherwise the most similar key."""
    all_key_names = sorted({key.name for key in list_keys()})
    similar_keys = [key for key in all_key_names if key.rpartition(".")[2] == name.rpartition(".")[2]]
    similar_keys = similar_keys or [key for key in all_key_names if name in key.rpartition(".")[2].split("_")]
    # Do not search for keys similar to a very long name, because the comparison is slow.
    if not similar_keys and len(name) <= _MAX_COMPARED_NAME_LENGTH:
        # Keys with as many dotted parts as `name` come first, so that no table such as `train` is suggested for a key.
        # A name without a table is compared with the last parts of the keys.
        compared_parts = {key if "." in name else key.rpartition(".")[2]: key for key in reversed(all_key_names)}
        keys_of_same_depth = [key for key in compared_parts if key.count(".") == name.count(".")]
        close_match_lists = (difflib.get_close_matches(name, keys, n=1) for keys in (keys_of_same_depth, all_key_names))
        similar_keys = [compared_parts.get(key, key) for key in next(filter(None, close_match_lists), [])]
    if len(similar_keys) > 4:
        return f"; `cosmos config coverage | grep {name}` lists the keys with this word"
    suggestion_text = " or ".join(map(repr, similar_keys))
    return f"; did you mean {suggestion_text}?" if similar_keys else "; `cosmos config coverage` lists them all"


def find_kinds_that_read_key(key: KeyDescription, stage_kinds: Mapping[str, StageKind]) -> list[str]:
    """Return the names of the stage kinds that read a key."""
    return [stage_kind.name for stage_kind in stage_kinds.values() if stage_kind.reads_key(key.name)]


@cache
def effect_test_by_key() -> Mapping[str, str]:
    """Return a mapping from each key to the name of the test that shows its effect."""
    keys_by_test_name = tomllib.loads(files("cosmos_core.config").joinpath("effects.toml").read_text(encoding="utf-8"))
    return {key: test_name for test_name, tested_keys in keys_by_test_name.items() for key in tested_keys}


def explain_key(name: str, stage_kinds: Mapping[str, StageKind]) -> Iterator[str]:
    """Yield lines with type, default, unit, description and status of a key; raise `ConfigError` for an unknown key."""
    for key in find_keys(name):
        yield f"{key.name}  ({key.table.__name__})"
        if key.name in {RENAMED_KEYS.get(name), current_key(name)} - {name}:
            yield f"  was       {name}"
        elif key.name in trl.keys_for_trl_name(name):
            yield f"  in TRL    {name.rpartition('.')[2]}"
        yield f"  {key.description}"
        key_properties = {
            "type": key.type,
            "default": key.default,
            "unit": key.unit,
            "since": key.since,
            "used by": ", ".join(find_kinds_that_read_key(key, stage_kinds)) if key.status == "used" else "",
            "status": key.status + (f": {key.note}" if key.note else ""),
            "test": effect_test_by_key().get(key.name, ""),
        }
        yield from (f"  {property_name:<9} {text}" for property_name, text in key_properties.items() if text)


def _describe_field(
    name: str, table: type[Table], field: FieldInfo, status_by_table: Mapping[str, KeyStatus]
) -> KeyDescription:
    """Return the description of the key `name`, which `table` declares as `field`. If the key itself has the status
    `used`, it gets the status of the table that contains it, from `status_by_table`, which maps keys of tables to
    statuses."""
    field_unit: FieldUnit | None = find_metadata(field, FieldUnit)
    introduced_in: IntroducedIn | None = find_metadata(field, IntroducedIn)
    supported_values: SupportedValues | None = find_metadata(field, SupportedValues)
    key_status = support_status(field)
    if key_status.name == "used":
        key_status = status_by_table.get(name.rpartition(".")[0], key_status)
    introducing_version = "ours" if name.startswith("pipeline") else introduced_in.version if introduced_in else "first"
    return KeyDescription(
        name=name,
        table=table,
        type=toml_type_name(field.annotation),
        default="required" if field.is_required() else toml_text(field.get_default(call_default_factory=True)),
        unit=field_unit.name if field_unit else "",
        description=" ".join((field.description or _field_docstrings(table).get(name.rpartition(".")[2], "")).split()),
        status=key_status.name,
        note=key_status.note or (supported_values.note if supported_values else ""),
        since=_LABEL_BY_VERSION[introducing_version],
        is_table=bool(find_table_classes(field.annotation)),
    )


@cache
def _field_docstrings(table: type[Table]) -> Mapping[str, str]:
    """Return the docstring of each field of a table, inherited fields included, by field name. The source code is
    parsed at the first call, because most processes do not need the docstrings."""
    doc_by_field: dict[str, str] = {}
    for base in reversed(table.__mro__):
        doc_by_field |= _class_docstrings(base.__module__).get(base.__name__, {}) if issubclass(base, Table) else {}
    return doc_by_field


@cache
def _class_docstrings(module_name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the docstrings of the fields of each class in a module: a dict by field name for each class name."""
    docstrings_by_class: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module_name])).body:
        if isinstance(node, ast.ClassDef):
            field_docstrings = docstrings_by_class.setdefault(node.name, {})
            for class_node, next_node in pairwise(node.body):
                match class_node, next_node:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(docstring))):
                        field_docstrings[name] = docstring
    return docstrings_by_class


def toml_text(toml_value: Any) -> str:
    """Return a value in TOML syntax on one line; `None` for None, which TOML lacks, and an empty string for a table."""
    if isinstance(toml_value, Table):
        return ""
    if toml_value is None:
        return "None"
    if isinstance(toml_value, bool):
        return str(toml_value).lower()
    if isinstance(toml_value, str):
        return json.dumps(toml_value, ensure_ascii=False)
    if isinstance(toml_value, list | tuple):
        return "[" + ", ".join(toml_text(item) for item in toml_value if toml_text(item)) + "]"
    if isinstance(toml_value, dict):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in toml_value.items()) + "}"
    return str(toml_value)


def toml_type_name(type_annotation: Any) -> str:
    """Return the TOML name of a Python type, such as `list of strings`."""
    generic_type, type_arguments = get_origin(type_annotation), get_args(type_annotation)
    if type_annotation in _TOML_TYPE_NAMES:
        return _TOML_TYPE_NAMES[type_annotation]
    if generic_type is Annotated:
        return toml_type_name(type_arguments[0])
    if generic_type is Literal:
        return " or ".join(toml_text(literal_value) for literal_value in type_arguments)
    if generic_type in {Union, types.UnionType}:
        return " or ".join(toml_type_name(argument) for argument in type_arguments if argument is not type(None))
    if generic_type is tuple:
        element_types = [toml_type_name(argument) for argument in type_arguments if argument is not Ellipsis]
        return f"list of {element_types[0]}s" if Ellipsis in type_arguments else f"[{', '.join(element_types)}]"
    if generic_type is dict:
        return f"table of {toml_type_name(type_arguments[1])}s" if type_arguments[1] is not Any else "table"
    return "table" if find_table_classes(type_annotation) else "any value"
