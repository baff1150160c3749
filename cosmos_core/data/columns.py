"""Functions that check the values of columns of a row; a `ColumnTrackingRow` does not record the columns as read."""

from collections.abc import Iterable
from typing import Any


def has_column_value(row: dict[str, Any], column: str) -> bool:
    """Return whether a row has a value in a column, without recording the column as read."""
    return column in row and dict.get(row, column) is not None


def find_column(row: dict[str, Any], columns: Iterable[str]) -> str:
    """Return the first of `columns` with a value that is not blank, else the first with any value; empty if there is no
    such column. Blank values count as missing, because CSV files store a missing value as a blank cell."""
    present_columns = [name for name in columns if has_column_value(row, name)]
    return next((name for name in present_columns if is_filled(row, name)), next(iter(present_columns), ""))


def is_filled(row: dict[str, Any], *columns: str) -> bool:
    """Return whether a row has values in all columns, none of which is a blank text or an empty list."""
    cells = [dict.get(row, column) for column in columns]
    return all(value.strip() if isinstance(value, str) else value is not None and value != [] for value in cells)
