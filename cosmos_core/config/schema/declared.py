"""Build pydantic fields for the configuration keys that `unused.toml` declares.

A declaration has `is` (a name in `FIELD_TYPES`) or `of` (the allowed values), `default` (without it the key may be
left out), `unit` and `means` (the description).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt, TypeAdapter

from cosmos_core.config.schema.field_metadata import FieldUnit
from cosmos_core.config.schema.value_types import StringOrList

FIELD_TYPES: dict[str, Any] = {
    "switch": bool, "text": str, "integer": int, "count": PositiveInt, "not below 0": NonNegativeFloat,
    "names": StringOrList,
}  # fmt: skip


def field_definition(declaration: dict[str, Any], field_types: dict[str, Any] = FIELD_TYPES) -> tuple[Any, Any]:
    """Return the type and the default of the pydantic field that a declaration of `unused.toml` describes."""
    value_type: Any = Literal[tuple(declaration["of"])] if "of" in declaration else field_types[declaration["is"]]
    default_value = declaration.get("default", ... if declaration.get("required") else None)
    if isinstance(default_value, list | dict):
        default_value = TypeAdapter(value_type).validate_python(default_value)
    description_fields = [Field(description=" ".join(declaration["means"].split()))] if "means" in declaration else []
    unit_metadata = [FieldUnit(declaration["unit"])] if "unit" in declaration else []
    optional_type = value_type | None if default_value is None else value_type
    metadata = [*description_fields, *unit_metadata]
    return Annotated[optional_type, *metadata] if metadata else optional_type, default_value
