"""Cells of a matrix that `make acceptance` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full(*cases: Any) -> list[Any]:
    """The cases, a tuple for several arguments, as parameters that are marked `full`."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]


def cells(names: Iterable[str], alike: Collection[str]) -> list[Any]:
    """The names as parameters, of which those in `alike` are marked `full`."""
    return [pytest.param(name, marks=[pytest.mark.full] * (name in alike)) for name in names]
