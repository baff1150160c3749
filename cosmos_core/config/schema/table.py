"""Base class of every TOML table, and functions that iterate over the fields of nested tables."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo
from pydantic.fields import FieldInfo

from cosmos_core.config.schema.declared import field_of
from cosmos_core.config.schema.marks import AffectsResult, Needs, Since, Status, StatusName, Where, mark

if TYPE_CHECKING:
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.types import StageKind


_NOTES: dict[str, Any] = tomllib.loads(files("cosmos_core.config").joinpath("status.toml").read_text("utf-8"))
_UNUSED: dict[str, Any] = tomllib.loads(files("cosmos_core.config.schema").joinpath("unused.toml").read_text("utf-8"))


def _noted(kind: str) -> dict[tuple[str, str], str]:
    """Return the notes of `status.toml` below `kind` by (table, key); the key "*" stands for all keys of the table."""
    return {
        (table, name): note
        for note, tables in _NOTES.get(kind, {}).items()
        for table in tables
        for name in tables[table].split()
    }


_STATUS: dict[tuple[str, str], Any] = {
    at: Status(kind, note) for kind in get_args(StatusName)[1:] for at, note in _noted(kind).items()
}
_SINCE: dict[tuple[str, str], Any] = {at: Since(note) for at, note in _noted("since").items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class InStage:
    """Context in which a table is checked: the recipe, and the kind of the stage that runs it."""

    recipe: Recipe
    kind: StageKind

    @property
    def measures(self) -> bool:
        """Return whether the stage measures a model on held-out rows."""
        return self.kind.makes == "metrics" or (self.kind.trains and self.recipe.validation.enable)


class Table(BaseModel):
    """One TOML table: unknown keys refused, values immutable, types not coerced."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        defer_build=True,
    )

    switch: ClassVar[str] = ""
    """Field that enables the whole table; while it is off the other fields have no effect. Empty: always enabled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the keys that `unused.toml` declares for the table, after its other keys."""
        super().__init_subclass__(**kwargs)
        annotations = inspect.get_annotations(cls)
        for name, says in _UNUSED.get(cls.__name__, {}).items():
            annotations[name], default = field_of(says)
            setattr(cls, name, default)
        cls.__annotations__ = annotations

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Mark each field with its status and generation in `status.toml`."""
        annotations = inspect.get_annotations(cls)
        for name, field in cls.model_fields.items():
            for notes in (_STATUS, _SINCE) if name in annotations else ():
                of_all = None if is_table(field.annotation) else notes.get((cls.__name__, "*"))
                if note := notes.get((cls.__name__, name), of_all):
                    field.metadata = [*field.metadata, note]

    def refusals(self, stage: InStage) -> Iterator[str]:
        """Yield an error message for each combination of values that this version does not support in the stage, with
        full keys."""
        yield from ()

    def notices(self, stage: InStage) -> Iterator[str]:
        """Yield notices about accepted settings whose effect a user may not expect, with full keys."""
        yield from ()

    def is_set(self, name: str) -> bool:
        """Return True if a field was set to another value than its default."""
        default = type(self).model_fields[name].get_default(call_default_factory=True)
        return name in self.model_fields_set and not _same(getattr(self, name), default)

    def derived(self, **values: Any) -> Self:
        """Return a copy with values that a rule derives; they are not validated and do not count as set by the user."""
        copy: Any = type(self).model_construct(_fields_set=set(self.model_fields_set), **dict(self) | values)
        return copy  # type: ignore[no-any-return]


TableT = TypeVar("TableT", bound=Table)


_USED = Status("used")


def status(field: FieldInfo) -> Status:
    """Return what this version does with a field."""
    status_mark: Status | None = mark(field, Status)
    return status_mark or _USED


def affects_result(field: FieldInfo) -> bool:
    """Return whether a field enters the fingerprint of the stages that read it."""
    effect = mark(field, AffectsResult)
    return status(field) == _USED and (effect is None or effect.value)


def is_table(annotation: Any) -> bool:
    """Return whether the type of a field is a table, rather than a container or union of tables."""
    return isinstance(annotation, type) and issubclass(annotation, Table)


def tables_in(annotation: Any) -> list[type[Table]]:
    """Return the table classes in the type of a field, unions and containers included."""
    if is_table(annotation):
        return [annotation]
    return [table for argument in get_args(annotation) for table in tables_in(argument)]


def all_fields(table: type[Table], prefix: str = "") -> Iterator[tuple[str, type[Table], FieldInfo]]:
    """Yield every key below a table as (dotted path, table that declares it, field), in the order of the schema."""
    for name, field in table.model_fields.items():
        yield prefix + name, table, field
        for inner in tables_in(field.annotation):
            yield from all_fields(inner, f"{prefix}{name}.")


def active_tables(table: Table) -> Iterator[Table]:
    """Yield the table and every nested table that has an effect with the present values."""
    if table.switch and not getattr(table, table.switch):
        return
    yield table
    for _, field, value in _active_fields(table):
        if isinstance(value, Table) and status(field) == _USED:
            yield from active_tables(value)


def _active_fields(table: Table) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield (name, field, value) of each field that neither the table's `switch` nor the field's `Needs` disables."""
    is_off = bool(table.switch) and not getattr(table, table.switch)
    for name, field in type(table).model_fields.items():
        needs: Needs | None = mark(field, Needs)
        if not (needs and not getattr(table, needs.switch)) and (not is_off or name == table.switch):
            yield name, field, getattr(table, name)


def switched_off(table: Table, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield every key that was set and has no effect, because the field that it `Needs` is off, as (dotted path, value,
    name of that field)."""
    if table.switch and not getattr(table, table.switch):
        return
    for name, field in type(table).model_fields.items():
        value, needs = getattr(table, name), mark(field, Needs)
        if needs and not getattr(table, needs.switch):
            if table.is_set(name) and not isinstance(value, Table):
                yield f"{prefix}{name}", value, needs.switch
        elif isinstance(value, Table):
            yield from switched_off(value, f"{prefix}{name}.")


def active_fields(table: Table, prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any, bool]]:
    """Yield every key that has an effect with the present values, as (dotted path, field, value, whether it was set and
    differs from its default)."""
    for name, field, value in _active_fields(table):
        if isinstance(value, Table) and status(field) == _USED:
            yield from active_fields(value, f"{prefix}{name}.")
        elif _are_tables(value):
            for i, each in enumerate(value):
                yield from active_fields(each, f"{prefix}{name}.{i}.")
        else:
            yield prefix + name, field, value, table.is_set(name)


def _same(value: Any, default: Any) -> bool:
    """Return whether a value has the same meaning as the default; False counts as a default of None, since None mostly
    means the setting of another table."""
    return bool(value == default) or (default is None and value is False)


def _are_tables(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], Table)


def result_values(table: Table) -> dict[str, Any]:
    """Return the values of a table that can change results, nested tables included, JSON types only."""
    values: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value = getattr(table, name)
        is_left_out_if_empty = getattr(mark(field, AffectsResult), "if_set", False)
        if not affects_result(field) or (not value and is_left_out_if_empty):
            continue
        if is_left_out_if_empty and _are_tables(
            value
        ):  # by key, so that a kind of stages reads some keys of all tables
            rows = [result_values(each) for each in value]
            values[name] = {
                key: [row.get(key) for row in rows] for key in dict.fromkeys(k for row in rows for k in row)
            }
        elif not isinstance(value, Table):
            values[name] = list(value) if isinstance(value, tuple) else value
        elif inner := result_values(value):
            values[name] = inner
    return values


def with_located(table: TableT, convert: Callable[[Where, str], str]) -> TableT:
    """Return a table in which `convert` has replaced the values of fields that are marked `Where`, nested tables
    included."""
    changed: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        value, where = getattr(table, name), mark(field, Where)
        if isinstance(value, Table):
            changed[name] = with_located(value, convert)
        elif _are_tables(value):
            changed[name] = tuple(with_located(each, convert) for each in value)
        elif where and isinstance(value, str):
            changed[name] = convert(where, value)
        elif where and isinstance(value, tuple):
            changed[name] = tuple(convert(where, item) for item in value)
        elif where and isinstance(value, dict):
            changed[name] = {convert(where, key): item for key, item in value.items()}
    return table.derived(**changed) if changed else table


def flat_keys(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one flat dict with dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flat_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flattened


def check_order(table: Table, low: str, high: str) -> None:
    """Refuse a table whose field `low` is above its field `high`.

    Raises:
        ValueError: `low` is above `high`.
    """
    least, most = getattr(table, low), getattr(table, high)
    if least > most:
        raise ValueError(f"{low} = {least} must not be above {high} = {most}")


def as_toml(value: object) -> str:
    """Return the text of a value for a message, in TOML notation, shortened to 60 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def warn(info: ValidationInfo, text: str) -> None:
    """Record a notice to the user about an accepted value, which `load.parse` collects."""
    if info.context is not None:
        info.context["notices"].append(text)
