"""Registry of the kinds of rows: the kind `some_name` is the class `SomeNameKind` of the file `some_name.py`."""

from functools import cache

from cosmos_core.data.kinds.base import RowKind, TokenisedKind
from cosmos_core.registry import list_defined_names, load_class

_KINDS_PACKAGE, _KIND_CLASS_SUFFIX = "cosmos_core.data.kinds", "Kind"


@cache
def load_row_kind(name: str) -> RowKind:
    """Return the kind of rows named `name`; raise ConfigError if no kind of rows has this name."""
    return load_class(name, _KINDS_PACKAGE, _KIND_CLASS_SUFFIX)()


def load_tokenised_kind(name: str) -> TokenisedKind:
    """Return the kind `name`, which must be a kind of text rows, such as `sequences`, `pairs` or `prompts`."""
    row_kind = load_row_kind(name)
    assert isinstance(row_kind, TokenisedKind)
    return row_kind


@cache
def list_row_kind_names() -> tuple[str, ...]:
    """Return the names of all kinds of rows."""
    return tuple(list_defined_names(_KINDS_PACKAGE, _KIND_CLASS_SUFFIX))
