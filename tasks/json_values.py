"""Conversion of the parameters of Python flows and of the arguments of tasks to JSON values."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_jsonable_python


def json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON, from which pydantic restores parameters of the same types."""
    converted: dict[str, Any] = json.loads(json.dumps(values, default=_jsonable))
    return converted


def _jsonable(value: Any) -> Any:
    if isinstance(value, set | frozenset):  # the order of the elements differs between processes
        return sorted(value, key=repr)
    if isinstance(value, BaseModel):
        return value.model_dump(by_alias=True)
    if callable(to_python := getattr(value, "tolist", None)):  # scalars and arrays of NumPy and torch
        return to_python()
    return to_jsonable_python(value, fallback=str)
