"""Convert a deprecated `--wfm-mode` recipe of Cosmos-RL (`[model]`, `[model_parallel]`, ...) into a recipe.

    python tools/convert_wfm.py OLD.toml > NEW.toml

Such recipes train the video models of Cosmos-Predict2.5: diffusion SFT, FlowGRPO or DDRL. Keys that they leave out have
the defaults of their schema, not of ours. `convert_wfm.toml` maps every key; this program applies it.
"""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import tomli_w
from jinja2 import Environment, StrictUndefined
from pydantic import Field, NonNegativeInt, PositiveFloat, create_model

from cosmos_core.config.load import TomlTable, merge_tables, parse_table, read_toml, shorten_value, without_none
from cosmos_core.config.schema.declared import FIELD_TYPES, field_definition
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import Table, all_fields
from cosmos_core.config.schema.value_types import Fraction
from cosmos_core.errors import ConfigError

DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

_TYPES = FIELD_TYPES | {
    "name": Annotated[str, Field(min_length=1)], "number": float, "count or 0": NonNegativeInt,
    "above 0": PositiveFloat, "fraction": Fraction, "decay": Annotated[float, Field(ge=0, lt=1)], "anything": Any,
    "arguments": dict[str, Any],
}  # fmt: skip


def is_key(says: TomlTable) -> bool:
    """Return whether it is a key that is declared, rather than a table of them."""
    return "is" in says or "of" in says


def declared(title: str, keys: TomlTable) -> type[Table]:
    """Return the model of a table. What a key `is` may be a list of names: an array of that many, with "..." of any
    number, but `at_least` so many."""
    fields: TomlTable = {}
    for name, says in keys.items():
        if not is_key(says):
            inner = declared(name, says)
            fields[name] = inner, inner()
        elif isinstance(says.get("is"), list):
            fields[name] = field_definition(
                {**says, "is": "array"}, {"array": _array(says["is"], says.get("at_least"))}
            )
        else:
            fields[name] = field_definition(says, _TYPES)
    return create_model(title, __base__=Table, **fields)


def _array(names: list[str], at_least: int | None) -> Any:
    array: Any = tuple  # of types that are known when this runs
    if names[-1] == "...":
        return Annotated[array[_TYPES[names[0]], ...], Field(strict=False, min_length=at_least)]
    return Annotated[array[tuple(_TYPES[name] for name in names)], Field(strict=False)]


def _fields(keys: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key of convert_wfm.toml as (dotted name, what is said of it)."""
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
_TODAY = frozenset({*Recipe.model_fields, "pipeline", "extends"})
_EXPRESSIONS = Environment(undefined=StrictUndefined)


def from_wfm(values: TomlTable, source: str, notices: list[str]) -> TomlTable:
    """Return the recipe in today's keys; what was mapped and what has no counterpart is told in `notices`.

    Raises:
        ConfigError: an unknown key, a wrong value, tables of both schemas, or something that cannot be said today.
    """
    _one_schema(values, source)
    lost: list[tuple[str, str]] = []
    old: Any = parse_table(Root, _with_counterpart(values, "", source, lost), error_prefix=source)
    translation = _Translation(old, source, lost)
    for rule in DATA["refused"]:
        translation.apply(rule)
    translation.same()
    for rule in DATA["rules"]:
        translation.apply(rule)
    notices += translation.told()
    return translation.values


def _one_schema(values: TomlTable, source: str) -> None:
    today = [root for root in values if root in _TODAY]
    if today:
        raise ConfigError(
            f"{source}: [model] is of the deprecated --wfm-mode schema and {today[0]} of today's: a file has one of "
            f"them; take the keys of today into a file of their own, which `extends` the converted one"
        )
    if "model" not in values:
        raise ConfigError(
            f"{source}: [{next(iter(values))}] is of the deprecated --wfm-mode schema, whose recipes have [model]; "
            f"write today's keys"
        )


def _with_counterpart(table: TomlTable, prefix: str, source: str, lost: list[tuple[str, str]]) -> TomlTable:
    """The keys that have a counterpart; those without one go to `lost`, all others are refused."""
    kept: TomlTable = {}
    for name, value in table.items():
        key = prefix + (name if name.isprintable() else repr(name))
        value = _by_name(value, source) if key == "trainer.callbacks" else value
        if key in REASONS:
            lost.append((key, REASONS[key]))
        elif key in FIELDS and not (key in TABLES and isinstance(value, dict)):
            kept[name] = value
        elif key in FIELDS:
            kept[name] = _with_counterpart(value, f"{key}.", source, lost)
        elif key in TABLES:
            _drop(value, key, source, lost)
        else:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.75)
            raise ConfigError(f"{source}: {key}: unknown key{f'; did you mean {near[0]}?' if near else ''}")
    return kept


def _by_name(callbacks: Any, source: str) -> TomlTable:
    """The list of callbacks as tables: the arguments of each below its name."""
    entries: list[Any] = callbacks if isinstance(callbacks, list) else [None]
    if not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        raise ConfigError(
            f"{source}: trainer.callbacks = {shorten_value(callbacks)}: must be an array of tables with a name"
        )
    if extra := {key for entry in entries for key in entry} - {"name", "args", "step_size"}:
        raise ConfigError(f"{source}: trainer.callbacks.{min(extra)}: unknown key; a callback has a name and args")
    return {entry["name"]: entry.get("args", {}) for entry in entries}


def _drop(value: Any, key: str, source: str, lost: list[tuple[str, str]]) -> None:
    """A table, or a list of them, none of whose keys has a counterpart: told as one, once its keys are known."""
    tables = value if isinstance(value, list) else [value]
    if not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source}: {key}: must be a table")
    inner: list[tuple[str, str]] = []
    for table in tables:
        _with_counterpart(table, f"{key}.", source, inner)
    lost += [(key, reason) for _, reason in inner[:1]]


class _Translation:
    """Today's values as they come about, and what is to be told about them."""

    def __init__(self, old: Any, source: str, lost: list[tuple[str, str]]) -> None:
        self.old, self.source, self.lost = old, source, lost
        self.values: TomlTable = {}
        self._mapped: list[str] = []
        self._filled: list[str] = []
        self._named: set[str] = set()
        self._names = dict(old)
        self._paths = {name: self._text(path) for name, path in DATA["names"].items()}
        self._names |= {name: reduce(getattr, path.split("."), old) for name, path in self._paths.items()}

    def said(self, key: str) -> bool:
        """Return whether the file has a key, rather than its default."""
        table: Any = self.old
        for name in key.split("."):
            if name not in table.model_fields_set:
                return False
            table = getattr(table, name)
        return True

    def apply(self, rule: TomlTable) -> None:
        """Do what a rule of wfm.toml says, where its `if` holds.

        Raises:
            ConfigError: it refuses.
        """
        if not self._value(rule.get("if", "true")):
            return
        if "refuse" in rule:
            raise ConfigError(f"{self.source}: {self._text(rule['refuse'])}")
        olds = [old for key in rule.get("of", []) for old in self._keys(key)]
        if "why" in rule:
            why = self._text(rule["why"])
            self.lost += [(self._text(key), why) for key in rule.get("left_out", [])]
            self.lose(why, *olds)
        for new in rule.get("to", []):
            self.put(new, self._value(rule["value"]), *olds)
        self._named |= set(olds)

    def _value(self, expression: str) -> Any:
        return _EXPRESSIONS.compile_expression(expression, undefined_to_none=False)(**self._names)

    def _text(self, template: str) -> str:
        return _EXPRESSIONS.from_string(template).render(**self._names)

    def _keys(self, key: str) -> list[str]:
        """The key behind one that begins with a name of `names`; behind `TABLE.*` those that no rule has named."""
        first, dot, rest = key.partition(".")
        path = self._paths.get(first, first) + dot + rest
        if not path.endswith(".*"):
            return [path]
        table = reduce(getattr, path.split(".")[:-1], self.old)
        inner = [path.removesuffix("*") + name for name in type(table).model_fields]
        return [name for name in inner if name not in self._named]

    def same(self) -> None:
        """Write every key whose value is that of a key of today; None and the empty string were left out."""
        is_rl = self.old.model.rl.enabled
        for old, field in TYPED.items():
            to = field.get("to", ())
            value = reduce(getattr, old.split("."), self.old)
            if value is not None and value != "" and (is_rl or not old.startswith("model.rl.")):
                for new in [to] if isinstance(to, str) else to:
                    self._write(new, value, [old] if self.said(old) else [], "")
        for new, value in {**DATA["always"], **(DATA["always_in_rl"] if is_rl else {})}.items():
            self.put(new, value)

    def put(self, new: str, value: Any, *olds: str) -> None:
        """Write what was computed from old keys; from none: what the deprecated mode always does."""
        self._write(new, value, [old for old in olds if self.said(old)], f" = {_shown(value)}")

    def lose(self, reason: str, *keys: str) -> None:
        """Say why keys of the file have no counterpart."""
        self.lost += [(key, reason) for key in keys if self.said(key)]

    def told(self) -> list[str]:
        """Return one line each: what was mapped, what was left out, what has no counterpart."""
        lines = [f"the deprecated --wfm-mode schema in today's keys: {', '.join(self._mapped)}"] if self._mapped else []
        lines.append(f"left out, so as in the deprecated schema: {', '.join(self._filled)}")
        reasons: dict[str, list[str]] = {}
        for key, reason in self.lost:
            reasons.setdefault(reason, []).append(key)
        without = [f"{', '.join(_gathered(keys))} ({reason})" for reason, keys in reasons.items()]
        return [*lines, f"without counterpart: {'; '.join(without)}"] if without else lines

    def _write(self, new: str, value: Any, said: list[str], shown: str) -> None:
        if said:
            self._mapped.append(f"{' + '.join(said)} -> {new}{shown}")
        elif value != _default(new):
            self._filled.append(f"{new} = {_shown(value)}")
        table = without_none(value)
        for name in reversed(new.split(".")):
            table = {name: table}
        self.values = merge_tables(self.values, table)


def _default(key: str) -> Any:
    found = [field for name, _, field in all_fields(Recipe) if name == key]
    return found[-1].get_default(call_default_factory=True) if found else None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(without_none(value))


def _gathered(keys: Iterable[str]) -> list[str]:
    """Keys of one table in one word: `table.{key, key}`."""
    tables: dict[str, list[str]] = {}
    for key in keys:
        table, dot, name = key.rpartition(".")
        tables.setdefault(table + dot, []).append(name)
    return [table + (names[0] if len(names) == 1 else f"{{{', '.join(names)}}}") for table, names in tables.items()]


def main() -> None:
    """Print the recipe; what was mapped and what has no counterpart is said on standard error."""
    notices: list[str] = []
    try:
        [name] = sys.argv[1:]
        values = from_wfm(read_toml(Path(name)), name, notices)
        parse_table(Recipe, values, error_prefix=name)
    except (ConfigError, ValueError) as error:
        sys.exit(f"convert_wfm: {error if isinstance(error, ConfigError) else 'give one file'}")
    sys.stderr.writelines(f"convert_wfm: note: {notice}\n" for notice in notices)
    sys.stdout.write(tomli_w.dumps(values))


if __name__ == "__main__":
    main()
