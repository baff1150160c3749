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


def field_of(says: dict[str, Any], types: dict[str, Any] = TYPES) -> tuple[Any, Any]:
    """Return the type and the default of a key, in the form that pydantic expects."""
    kind: Any = Literal[tuple(says["of"])] if "of" in says else types[says["is"]]
    default = says.get("default", ... if says.get("required") else None)
    if isinstance(default, list | dict):
        default = TypeAdapter(kind).validate_python(default)
    description_fields = [Field(description=" ".join(says["means"].split()))] if "means" in says else []
    units = [UnitMark(says["unit"])] if "unit" in says else []
    optional_type = kind | None if default is None else kind
    marks = [*description_fields, *units]
    return Annotated[optional_type, *marks] if marks else optional_type, default
