"""Registry of the kinds of rows: the kind `some_name` is the class `SomeNameKind` of the file `some_name.py`."""

from functools import cache

from cosmos_core.data.kinds.base import RowKind, TokenisedKind
from cosmos_core.registry import load_named, offered_names

_FOLDER, _SUFFIX = "cosmos_core.data.kinds", "Kind"


@cache
def row_kind(name: str) -> RowKind:
    """Return the kind of rows named `name`; raise ConfigError if no kind of rows has this name."""
    return load_named(name, _FOLDER, _SUFFIX)()


def tokenised_kind(name: str) -> TokenisedKind:
    """Return the kind of text rows named `name`."""
    kind = row_kind(name)
    assert isinstance(kind, TokenisedKind)
    return kind


@cache
def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds of rows."""
    return tuple(offered_names(_FOLDER, _SUFFIX))
