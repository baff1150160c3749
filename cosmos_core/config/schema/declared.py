"""Build pydantic fields for the configuration keys that `unused.toml` declares.

A declaration has `is` (a name in `TYPES`) or `of` (the allowed values), `default` (none: the key may be left out),
`unit` and `means` (the description).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from cosmos_core.config.schema.marks import UnitMark
from cosmos_core.config.schema.value_types import Names, NonNegativeFloat, PositiveInt

TYPES: dict[str, Any] = {
    "switch": bool, "text": str, "integer": int, "count": PositiveInt, "not below 0": NonNegativeFloat, "names": Names,
}  # fmt: skip


def field_of(declaration: dict[str, Any], types: dict[str, Any] = TYPES) -> tuple[Any, Any]:
    """Return the type and the default of a key, in the form that pydantic expects."""
    value_type: Any = Literal[tuple(declaration["of"])] if "of" in declaration else types[declaration["is"]]
    default_value = declaration.get("default", ... if declaration.get("required") else None)
    if isinstance(default_value, list | dict):
        default_value = TypeAdapter(value_type).validate_python(default_value)
    description_fields = [Field(description=" ".join(declaration["means"].split()))] if "means" in declaration else []
    unit_marks = [UnitMark(declaration["unit"])] if "unit" in declaration else []
    optional_type = value_type | None if default_value is None else value_type
    field_marks = [*description_fields, *unit_marks]
    return Annotated[optional_type, *field_marks] if field_marks else optional_type, default_value
