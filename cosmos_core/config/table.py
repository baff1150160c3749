"""The base of every TOML table, and what a field may say about itself beside its type."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo


class Table(BaseModel):
    """One TOML table: unknown keys refused, values immutable, types not coerced."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )


T = TypeVar("T")

# A field that changes how a run looks or is kept, never what it computes, stays out of the fingerprint.
NoResult = Field(json_schema_extra={"affects_result": False})

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

Nucleus = Annotated[float, Field(gt=0, le=1)]
"""Probability mass that is kept; 1: all of it."""


def _top_k(count: int) -> int:
    if count != -1 and count < 1:
        raise ValueError(f"{count} must be -1 (all tokens) or at least 1")
    return count


TopK = Annotated[int, AfterValidator(_top_k)]
"""Number of likeliest tokens that are kept; -1: all."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(strict=False)]
"""One string or a list of strings."""


def affects_result(field: FieldInfo) -> bool:
    """Whether a field enters the fingerprint of the stages that read it."""
    extra = field.json_schema_extra
    return not (isinstance(extra, dict) and extra.get("affects_result") is False)


def result_values(table: Table) -> dict[str, Any]:
    """The values of a table that can change results, nested tables included, JSON types only."""
    values: dict[str, Any] = {}
    for name, field in type(table).model_fields.items():
        if not affects_result(field):
            continue
        value = getattr(table, name)
        values[name] = result_values(value) if isinstance(value, Table) else _plain(value)
    return values


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
