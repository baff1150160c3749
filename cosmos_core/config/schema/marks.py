"""Marks of fields: properties of a key in addition to its type."""

import types
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from cosmos_core.registry import offered_names

StatusName = Literal["used", "no effect", "planned", "unsupported"]


@dataclass(frozen=True)
class Status:
    """Support of a field in this version, as declared in `config/status.toml`."""

    name: StatusName
    note: str = ""
    """Reason for the status, or the key to use instead."""


@dataclass(frozen=True)
class IntroducedIn:
    """Generation of recipes that introduced the key: the `first` reference version of Cosmos-RL, a `later` version of
    it, or `ours`, this project."""

    generation: Literal["first", "later", "ours"]


@dataclass(frozen=True)
class RequiresEnabledField:
    """Mark of a field that has an effect only while the field `switch` of the same table is set."""

    switch: str


@dataclass(frozen=True)
class SupportedValues:
    """Values that this version supports; the schema accepts more values."""

    values: tuple[Any, ...]
    note: str
    """Advice for the error message on an unsupported value."""
    takes_import_paths: bool = False
    """Whether import paths of user code, `module:name` and `file.py:name`, are also supported."""

    def is_supported(self, value: Any) -> bool:
        """Return True if this version supports the value."""
        return value in self.values or (self.takes_import_paths and isinstance(value, str) and ":" in value)


class NamedThing(Enum):
    """Kind of thing outside the recipe that a text field names. Paths in such fields are made absolute, so that a run
    can be resumed from any folder, and the content that they name enters the fingerprint."""

    PATH = "path"
    """A file or folder, or a model or data set that is not a local path: `stage:NAME`, a name on the Hub."""
    CODE = "code"
    """Code: the name of a module in a folder of this package, or a user's `module:thing` or `path/file.py:thing`."""
    PUBLISHED = "published"
    """Publication target: a folder that may not exist yet, a URL, or user code."""


def accepts_registered(folder: str, suffix: str) -> SupportedValues:
    """Return the `Annotated` metadata of a field whose value names a class in a folder of this package (see
    `registry.offered_names`) or user code."""
    names = tuple(offered_names(folder, suffix))
    advice = "take one of them, or a class of your own, path/file.py:Class"
    return SupportedValues(names, f"this version has {', '.join(map(repr, names))}; {advice}", takes_import_paths=True)


@dataclass(frozen=True)
class UnitMark:
    """Unit of a numeric field, such as `tokens`."""

    name: str


@dataclass(frozen=True)
class AffectsResult:
    """Whether a used field enters the fingerprint of the stages that read it."""

    value: bool
    omits_empty: bool = False
    """Whether a fingerprint omits an empty value, as it does in versions without the field."""


NoResult = AffectsResult(False)
"""Mark of a field that changes how a run is shown or stored, never what it computes."""
OmittedIfEmpty = AffectsResult(True, omits_empty=True)
"""Mark of a field that is left out of fingerprints while it is empty."""


def find_mark(field: FieldInfo, mark_type: type) -> Any:
    """Return the object of type `mark_type` in the `Annotated` metadata of a field; None if there is none."""
    cached_entry = _MARKS_BY_FIELD.get(id(field))
    if cached_entry is None:
        cached_entry = _MARKS_BY_FIELD[id(field)] = field, [*field.metadata, *_marks_in_union(field.annotation)]
    return next((item for item in cached_entry[1] if isinstance(item, mark_type)), None)


_MARKS_BY_FIELD: dict[int, tuple[FieldInfo, list[Any]]] = {}
"""Cache of the marks of fields by the `id` of the field, because fields are not hashable; it holds each field, so that
no other object gets the same `id`."""


def _marks_in_union(annotation: Any) -> list[Any]:
    """Return the marks inside a union, such as those of `Annotated[int, ...] | None`."""
    members = get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else ()
    return [mark for each in members if get_origin(each) is Annotated for mark in get_args(each)[1:]]
