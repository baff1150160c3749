"""Functions that look for columns with a value in a row of a data set. They do not count as reading: a
`ColumnTrackingRow` does not record these columns as read."""

from collections.abc import Iterable
from typing import Any


def has_column_value(row: dict[str, Any], column: str) -> bool:
    """Return whether a row has a value in a column, without recording the column as read."""
    return column in row and dict.get(row, column) is not None


def find_column(row: dict[str, Any], columns: Iterable[str]) -> str:
    """Return the name of the first of `columns` with a value that is not blank, else of the first with any value; empty
    if the row has none of them. Blank values come last, because CSV files store a missing value as a blank cell."""
    present_columns = [name for name in columns if has_column_value(row, name)]
    return next((name for name in present_columns if is_filled(row, name)), next(iter(present_columns), ""))


def is_filled(row: dict[str, Any], *columns: str) -> bool:
    """Return whether a row has values in all columns, none of which is a blank text or an empty list."""
    row_cells = [dict.get(row, column) for column in columns]
    return all(value.strip() if isinstance(value, str) else value is not None and value != [] for value in row_cells)
