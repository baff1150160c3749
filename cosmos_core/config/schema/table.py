"""Base class of every TOML table, and functions that iterate over the fields of nested tables."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from cosmos_core.config.schema.declared import field_definition
from cosmos_core.config.schema.field_metadata import (
    AffectsResult,
    EnabledBy,
    IntroducedIn,
    KeyStatus,
    ReferenceKind,
    StatusName,
    find_metadata,
)

if TYPE_CHECKING:
    from cosmos_core.config.schema.recipe import Recipe
    from cosmos_core.types import StageKind


_STATUS_NOTES: dict[str, Any] = tomllib.loads(files("cosmos_core.config").joinpath("status.toml").read_text("utf-8"))
_UNUSED_KEY_DECLARATIONS: dict[str, Any] = tomllib.loads(files(__package__).joinpath("unused.toml").read_text("utf-8"))


def _read_notes(status_name: str) -> dict[tuple[str, str], str]:
    """Return the notes in one section of `status.toml`, each by its pair of a table class name and a key; the key "*"
    stands for all keys of the table."""
    return {
        (table_name, key_name): note
        for note, keys_by_table in _STATUS_NOTES.get(status_name, {}).items()
        for table_name, key_names in keys_by_table.items()
        for key_name in key_names.split()
    }


_STATUS_BY_KEY: dict[tuple[str, str], Any] = {
    key: KeyStatus(name, note) for name in get_args(StatusName)[1:] for key, note in _read_notes(name).items()
}
_VERSION_BY_KEY: dict[tuple[str, str], Any] = {key: IntroducedIn(note) for key, note in _read_notes("since").items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class StageContext:
    """Context in which a table is checked: the recipe, and the kind of the stage that runs it."""

    recipe: Recipe
    kind: StageKind

    @property
    def measures_held_out_rows(self) -> bool:
        """Return whether the stage measures a model on held-out rows."""
        return self.kind.makes == "metrics" or (self.kind.trains_model and self.recipe.validation.enable)


class Table(BaseModel):
    """TOML table as a pydantic model that refuses unknown keys, does not coerce types, and is immutable."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, validate_default=True, defer_build=True
    )

    enabling_field: ClassVar[str] = ""
    """Name of the field that enables the table; while it is off, other fields have no effect. Empty: always enabled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Add the keys that `unused.toml` declares for the table, after its other keys."""
        super().__init_subclass__(**kwargs)
        annotations = inspect.get_annotations(cls)
        for key_name, declaration in _UNUSED_KEY_DECLARATIONS.get(cls.__name__, {}).items():
            annotations[key_name], default_value = field_definition(declaration)
            setattr(cls, key_name, default_value)
        cls.__annotations__ = annotations

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Add the status and the version of each field in `status.toml` to the metadata of the field."""
        annotations = inspect.get_annotations(cls)
        for name, field in cls.model_fields.items():
            for metadata_by_key in (_STATUS_BY_KEY, _VERSION_BY_KEY) if name in annotations else ():
                table_metadata = None if is_table(field.annotation) else metadata_by_key.get((cls.__name__, "*"))
                if key_metadata := metadata_by_key.get((cls.__name__, name), table_metadata):
                    field.metadata = [*field.metadata, key_metadata]

    def unsupported_setting_errors(self, stage: StageContext) -> Iterator[str]:
        """Yield a message, with full dotted keys, for each combination of values that is not supported in the stage."""
        yield from ()

    def notices(self, stage: StageContext) -> Iterator[str]:
        """Yield notices, with full dotted keys, about accepted settings whose effect a user may not expect."""
        yield from ()

    def is_set(self, name: str) -> bool:
        """Return True if a field was set to another value than its default."""
        value, default = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
        # Do not count False for the default None as set, because validation may have copied it from another table.
        return name in self.model_fields_set and value != default and not (default is None and value is False)

    def copy_with(self, **new_values: Any) -> Self:
        """Return a copy with derived values, which are not validated and do not count as set by the user."""
        table_copy: Any = type(self).model_construct(_fields_set=set(self.model_fields_set), **dict(self) | new_values)
        return table_copy  # type: ignore[no-any-return]


TableT = TypeVar("TableT", bound=Table)
_USED_STATUS = KeyStatus("used")


def support_status(field_info: FieldInfo) -> KeyStatus:
    """Return whether this version uses the field (`used`, the default), ignores it (`no effect`) or refuses it if it is
    set (`planned`, `unsupported`), with the reason."""
    key_status: KeyStatus | None = find_metadata(field_info, KeyStatus)
    return key_status or _USED_STATUS


def affects_result(field_info: FieldInfo) -> bool:
    """Return whether a field enters the fingerprint of the stages that read it."""
    metadata = find_metadata(field_info, AffectsResult)
    return support_status(field_info) == _USED_STATUS and (metadata is None or metadata.enters_fingerprint)


def is_table(type_annotation: Any) -> bool:
    """Return whether the type of a field is one table class, rather than a container or union of table classes."""
    return isinstance(type_annotation, type) and issubclass(type_annotation, Table)


def find_table_classes(type_annotation: Any) -> list[type[Table]]:
    """Return the table classes in the type of a field, unions and containers included."""
    if is_table(type_annotation):
        return [type_annotation]
    return [table_class for argument in get_args(type_annotation) for table_class in find_table_classes(argument)]


def all_fields(table_class: type[Table], key_prefix: str = "") -> Iterator[tuple[str, type[Table], FieldInfo]]:
    """Yield every key below a table as (dotted path, table that declares it, field), in the order of the schema."""
    for name, field in table_class.model_fields.items():
        yield key_prefix + name, table_class, field
        for subtable in find_table_classes(field.annotation):
            yield from all_fields(subtable, f"{key_prefix}{name}.")


def active_tables(table: Table) -> Iterator[Table]:
    """Yield the table and every nested table that has an effect with the present values; nothing if the table is
    off."""
    if table.enabling_field and not getattr(table, table.enabling_field):
        return
    yield table
    for _, field, field_value in _iterate_active_fields(table):
        subtables = field_value if _are_tables(field_value) else (field_value,)
        if isinstance(subtables[0], Table) and support_status(field) == _USED_STATUS:
            for subtable in subtables:
                yield from active_tables(subtable)


def _iterate_active_fields(table: Table) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield (name, field, value) of each field unless its enabling field, or that of the table, is off."""
    is_table_enabled = not table.enabling_field or getattr(table, table.enabling_field)
    for name, field in type(table).model_fields.items():
        enabled_by: EnabledBy | None = find_metadata(field, EnabledBy)
        is_field_enabled = enabled_by is None or getattr(table, enabled_by.enabling_field)
        if is_field_enabled and (is_table_enabled or name == table.enabling_field):
            yield name, field, getattr(table, name)


def disabled_settings(table: Table, key_prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (dotted path, value, name of the enabling field) of every key that was set but has no effect, because the
    field that enables it is off."""
    if table.enabling_field and not getattr(table, table.enabling_field):
        yield from ((key, value, table.enabling_field) for key, value in _changed_settings(table, key_prefix))
        return
    for name, field in type(table).model_fields.items():
        value, enabled_by = getattr(table, name), find_metadata(field, EnabledBy)
        if not enabled_by or getattr(table, enabled_by.enabling_field):
            yield from disabled_settings(value, f"{key_prefix}{name}.") if isinstance(value, Table) else ()
        elif isinstance(value, Table) and name in table.model_fields_set:
            for key, nested_value in _changed_settings(value, f"{key_prefix}{name}."):
                yield key, nested_value, enabled_by.enabling_field
        elif not isinstance(value, Table) and table.is_set(name):
            yield f"{key_prefix}{name}", value, enabled_by.enabling_field


def _changed_settings(table: Table, key_prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every key below a table that was set to another value than its default."""
    default_table = type(table)()
    for name in type(table).model_fields:
        key, value = f"{key_prefix}{name}", getattr(table, name)
        if name in table.model_fields_set and value != getattr(default_table, name):
            yield from _changed_settings(value, f"{key}.") if isinstance(value, Table) else [(key, value)]


def active_fields(table: Table, key_prefix: str = "") -> Iterator[tuple[str, FieldInfo, Any, bool]]:
    """Yield every key that has an effect with the present values, as (dotted path, field, value, whether it was set and
    differs from its default). Keys of a table that validation copied from another table do not count as set."""
    for name, field, field_value in _iterate_active_fields(table):
        if isinstance(field_value, Table) and support_status(field) == _USED_STATUS:
            for key, nested_field, nested_value, is_set in active_fields(field_value, f"{key_prefix}{name}."):
                yield key, nested_field, nested_value, is_set and name in table.model_fields_set
        elif _are_tables(field_value):
            for i, subtable in enumerate(field_value):
                yield from active_fields(subtable, f"{key_prefix}{name}.{i}.")
        else:
            yield key_prefix + name, field, field_value, table.is_set(name)


def _are_tables(field_value: Any) -> bool:
    return isinstance(field_value, tuple) and bool(field_value) and isinstance(field_value[0], Table)


def result_values(table: Table) -> dict[str, Any]:
    """Return the values of a table that can change results, nested tables included, JSON types only."""
    value_by_name: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        field_value = getattr(table, name)
        omits_empty_value = getattr(find_metadata(field, AffectsResult), "omits_empty_value", False)
        if not affects_result(field) or (not field_value and omits_empty_value):
            continue
        # Store a list of subtables as one list of values for each key, because fingerprints select values by key.
        if omits_empty_value and _are_tables(field_value):
            subtable_values = [result_values(subtable) for subtable in field_value]
            subtable_keys = dict.fromkeys(key for row in subtable_values for key in row)
            value_by_name[name] = {key: [row.get(key) for row in subtable_values] for key in subtable_keys}
        elif not isinstance(field_value, Table):
            value_by_name[name] = list(field_value) if isinstance(field_value, tuple) else field_value
        elif nested_values := result_values(field_value):
            value_by_name[name] = nested_values
    return value_by_name


def convert_references(table: TableT, convert_reference_fn: Callable[[ReferenceKind, str], str]) -> TableT:
    """Return a copy of a table in which `convert_reference_fn` has converted the values of all fields with a
    `ReferenceKind`, nested tables included."""
    reference_kinds, converted_values = _reference_kinds(type(table)), dict[str, Any]()
    for name in type(table).model_fields:
        value, reference_kind = getattr(table, name), reference_kinds.get(name)
        if isinstance(value, Table):
            converted_values[name] = convert_references(value, convert_reference_fn)
        elif _are_tables(value):
            converted_values[name] = tuple(convert_references(subtable, convert_reference_fn) for subtable in value)
        elif reference_kind and isinstance(value, str):
            converted_values[name] = convert_reference_fn(reference_kind, value)
        elif reference_kind and isinstance(value, tuple):
            converted_values[name] = tuple(convert_reference_fn(reference_kind, item) for item in value)
        elif reference_kind and isinstance(value, dict):
            converted_values[name] = {convert_reference_fn(reference_kind, key): item for key, item in value.items()}
    converted_values = {name: value for name, value in converted_values.items() if value is not getattr(table, name)}
    return table.copy_with(**converted_values) if converted_values else table


@cache
def _reference_kinds(table_type: type[Table]) -> dict[str, ReferenceKind]:
    kinds = {name: find_metadata(field, ReferenceKind) for name, field in table_type.model_fields.items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def flatten_nonempty_tables(nested_tables: Mapping[str, Any], key_prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one flat dict with dotted keys; empty tables are left out."""
    flat_values: dict[str, Any] = {}
    for name, value in nested_tables.items():
        key = f"{key_prefix}{name}"
        flat_values |= flatten_nonempty_tables(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat_values


def bounds_validator(lower_field: str, upper_field: str) -> Any:
    """Return a validator of a table that refuses a value of `lower_field` above that of `upper_field`."""

    def check_bounds(table: TableT) -> TableT:
        lower_bound, upper_bound = getattr(table, lower_field), getattr(table, upper_field)
        if lower_bound > upper_bound:
            raise ValueError(f"{lower_field} = {lower_bound} must not be above {upper_field} = {upper_bound}")
        return table

    return model_validator(mode="after")(check_bounds)


def short_toml(setting_value: object) -> str:
    """Return the text of a value for a message, in TOML notation, shortened to 60 characters."""
    if isinstance(setting_value, bool):
        return str(setting_value).lower()
    toml_text = repr(list(setting_value) if isinstance(setting_value, tuple) else setting_value)
    return toml_text if len(toml_text) <= 60 else toml_text[:57] + "..."


def add_notice(info: ValidationInfo, notice: str) -> None:
    """Record a notice to the user about an accepted value, which `load.parse_table` collects."""
    if info.context is not None:
        info.context["notices"].append(notice)
