"""What the schema says of each key, for people: one source of `explain`, `coverage`, the reference and editors."""

from __future__ import annotations

import ast
import difflib
import inspect
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
from cosmos_core.config.compat.translate import DEAD, MOVED, today
from cosmos_core.config.load import fit
from cosmos_core.config.schema.marks import Only, Since, Status, StatusName, Unit, mark
from cosmos_core.config.schema.pipeline import PipelineConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import Table, all_fields, status, tables_in
from cosmos_core.errors import ConfigError
from cosmos_core.types import StageKind

_GENERATIONS = {"first": "Cosmos-RL", "later": "later Cosmos-RL", "ours": "ours"}
MAX_NAME = 200
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "string"}


@dataclass(frozen=True)
class Key:
    """One key of the schema."""

    name: str
    """Dotted; a key that two tables of a union share has one entry for each, told apart by `table`."""
    table: type[Table]
    type: str
    default: str
    unit: str
    meaning: str
    status: StatusName
    note: str
    """Why it has no effect, or what to use instead."""
    since: str
    is_table: bool


@cache
def all_keys() -> tuple[Key, ...]:
    """Return every key of a recipe, then of `[pipeline]`, in the order of the schema."""
    found = [*all_fields(Recipe), *all_fields(PipelineConfig, "pipeline.")]
    tables = {name: status(field) for name, _, field in found if tables_in(field.annotation)}
    return tuple({(name, table): _key(name, table, field, tables) for name, table, field in found}.values())


def find_key(name: str) -> list[Key]:
    """Return the entries of a key, in today's name, an older one or that of TRL; of a name without a table those of all
    tables. `STAGE.KEY` is not known here.

    Raises:
        ConfigError: there is no such key; those that are near are suggested, or what is here in place of one of TRL.
    """
    now = MOVED.get(name) or today(name)
    keys = [key for key in all_keys() if key.name == now]
    if now in DEAD and not trl.keys_of(name):
        raise ConfigError(f"{name} does nothing in any version; it would have meant {DEAD[now]}")
    keys = keys or [key for key in all_keys() if key.name in trl.keys_of(name) or key.name.rpartition(".")[2] == name]
    if not keys:
        raise ConfigError(fit(f"{name}: unknown key{trl.told(name) or _near(name)}"))
    return keys


def _near(name: str) -> str:
    """The keys that may be meant: of the same name in other tables, else those that look alike."""
    known = sorted({key.name for key in all_keys()})
    near = [key for key in known if key.rpartition(".")[2] == name.rpartition(".")[2]]
    if not near and len(name) <= MAX_NAME:  # to compare longer ones takes long, and says nothing
        near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else "; `cosmos config coverage` lists them all"


def used_by(key: Key, kinds: Mapping[str, StageKind]) -> list[str]:
    """Return the kinds of stages that read a key."""
    if key.name.startswith("pipeline."):
        return []
    return [kind.name for kind in kinds.values() if kind.reads(key.name)]


@cache
def effects() -> Mapping[str, str]:
    """Map each key to the test in which changing it changes something that can be seen."""
    tests = tomllib.loads(files("cosmos_core.config").joinpath("effects.toml").read_text(encoding="utf-8"))
    return {key: test for test, keys in tests.items() for key in keys}


def explain(name: str, kinds: Mapping[str, StageKind]) -> Iterator[str]:
    """Yield lines about a key: type, default, unit, meaning, status.

    Raises:
        ConfigError: there is no such key.
    """
    for key in find_key(name):
        yield f"{key.name}  ({key.table.__name__})"
        if key.name in {MOVED.get(name), today(name)} - {name}:
            yield f"  was       {name}"
        elif key.name in trl.keys_of(name):
            yield f"  in TRL    {name.rpartition('.')[2]}"
        yield f"  {key.meaning}"
        rows = {
            "type": key.type,
            "default": key.default,
            "unit": key.unit,
            "since": key.since,
            "used by": ", ".join(used_by(key, kinds)) if key.status == "used" else "",
            "status": key.status + (f": {key.note}" if key.note else ""),
            "test": effects().get(key.name, ""),
        }
        yield from (f"  {label:<9} {text}" for label, text in rows.items() if text)


def _key(name: str, table: type[Table], field: FieldInfo, tables: Mapping[str, Status]) -> Key:
    """`tables` has the status of each table: one that is not used has no keys that are."""
    unit: Unit | None = mark(field, Unit)
    since: Since | None = mark(field, Since)
    only: Only | None = mark(field, Only)
    found = status(field)
    if found.name == "used":
        found = tables.get(name.rpartition(".")[0], found)
    ours = name.startswith("pipeline") or (since is not None and since.generation == "ours")
    return Key(
        name=name,
        table=table,
        type=type_name(field.annotation),
        default="required" if field.is_required() else default_text(field),
        unit=unit.name if unit else "",
        meaning=" ".join((field.description or _documented(table).get(name.rpartition(".")[2], "")).split()),
        status=found.name,
        note=found.note or (only.note if only else ""),
        since=_GENERATIONS["ours" if ours else since.generation if since else "first"],
        is_table=bool(tables_in(field.annotation)),
    )


@cache
def _documented(table: type[Table]) -> Mapping[str, str]:
    """Map each field to the string below it. Only descriptions need them, so they are read here, and not by every
    process that imports the schema."""
    found: dict[str, str] = {}
    for base in reversed(table.__mro__):
        found |= _strings(base.__module__).get(base.__name__, {}) if issubclass(base, Table) else {}
    return found


@cache
def _strings(module: str) -> Mapping[str, Mapping[str, str]]:
    """Map each class of a module to its fields with the string below each."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for item, below in pairwise(node.body):
                match item, below:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        fields[name] = text
    return found


def default_text(field: FieldInfo) -> str:
    """Return the default as TOML writes it; empty: a table."""
    return toml_text(field.get_default(call_default_factory=True))


def toml_text(value: Any) -> str:
    """Return a value as TOML writes it on one line; None and tables have no such form."""
    if isinstance(value, Table):
        return ""
    if value is None:
        return "None"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_text(item) for item in value if toml_text(item)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_text(item)}" for key, item in value.items()) + "}"
    return str(value)


def type_name(annotation: Any) -> str:
    """Return a type in a TOML user's words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _WORDS:
        return _WORDS[annotation]
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(toml_text(value) for value in arguments)
    if origin in {Union, types.UnionType}:
        return " or ".join(type_name(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        members = [type_name(argument) for argument in arguments if argument is not Ellipsis]
        return f"list of {members[0]}s" if Ellipsis in arguments else f"[{', '.join(members)}]"
    if origin is dict:
        return f"table of {type_name(arguments[1])}s" if arguments[1] is not Any else "table"
    return "table" if tables_in(annotation) else "any value"
