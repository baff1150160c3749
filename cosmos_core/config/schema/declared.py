"""Tables that are declared as data: those of `planned.toml`, and the schema in `tools/convert_wfm.toml`.

A key says what a value `is`, by a name of `TYPES` (a list of names: an array of that many; with "..." of any number,
but `at_least` so many), or `of` which values it is one; its `default` (none: the key may be left out, unless it is
`required`), its `unit` and what it `means`. What says neither is a table of its own.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, create_model

from cosmos_core.config.schema.marks import Unit
from cosmos_core.config.schema.table import Table
from cosmos_core.config.schema.values import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

TYPES: dict[str, Any] = {
    "switch": bool, "text": str, "name": Annotated[str, Field(min_length=1)], "integer": int, "number": float,
    "count": PositiveInt, "count or 0": NonNegativeInt, "above 0": PositiveFloat, "not below 0": NonNegativeFloat,
    "fraction": Fraction, "decay": Annotated[float, Field(ge=0, lt=1)], "anything": Any,
    "arguments": dict[str, Any],
}  # fmt: skip


def is_key(says: dict[str, Any]) -> bool:
    """Return whether it is a key that is declared, rather than a table of them."""
    return "is" in says or "of" in says


def declared(title: str, keys: dict[str, Any], switch: str = "") -> type[Table]:
    """Return the model of a table."""
    fields: dict[str, Any] = {name: _field(name, says) for name, says in keys.items()}
    model = create_model(title, __base__=Table, **fields)
    model.switch = switch
    return model


def _field(name: str, says: dict[str, Any]) -> tuple[Any, Any]:
    """Type and default, as pydantic takes them."""
    if not is_key(says):
        inner = declared(name, says)
        return inner, inner()
    kind: Any = Literal[tuple(says["of"])] if "of" in says else _type(says["is"], says.get("at_least"))
    default = says.get("default", ... if says.get("required") else None)
    if isinstance(default, list | dict):
        default = TypeAdapter(kind).validate_python(default)
    about = [Field(description=" ".join(says["means"].split()))] if "means" in says else []
    units = [Unit(says["unit"])] if "unit" in says else []
    optional = kind | None if default is None else kind
    return (Annotated[optional, *about, *units] if about or units else optional), default


def _type(name: str | list[str], at_least: int | None) -> Any:
    if isinstance(name, str):
        return TYPES[name]
    array: Any = tuple  # of types that are known when this runs
    if name[-1] == "...":
        return Annotated[array[TYPES[name[0]], ...], Field(strict=False, min_length=at_least)]
    return Annotated[array[tuple(TYPES[item] for item in name)], Field(strict=False)]
