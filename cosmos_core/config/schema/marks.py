"""Marks of fields: properties of a key in addition to its type."""

from __future__ import annotations

import types
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from cosmos_core.registry import offered_names

StatusName = Literal["used", "no effect", "planned", "unsupported"]


@dataclass(frozen=True)
class Status:
    """What this version does with a field, see `config/status.toml`."""

    name: StatusName
    note: str = ""
    """The reason, or what to use instead."""


@dataclass(frozen=True)
class Since:
    """Which generation of recipes knows the key: Cosmos-RL's `first` reference, `later`, or `ours`."""

    generation: Literal["first", "later", "ours"]


@dataclass(frozen=True)
class Needs:
    """The field means something only while its sibling `switch` is set."""

    switch: str


@dataclass(frozen=True)
class Only:
    """Values that this version supports; the schema accepts more values."""

    values: tuple[Any, ...]
    note: str
    """What to do instead."""
    takes_import_paths: bool = False
    """Whether import paths of user code, `module:name` and `file.py:name`, are also supported."""

    def allows(self, value: Any) -> bool:
        """Return True if this version supports the value."""
        return value in self.values or (self.takes_import_paths and isinstance(value, str) and ":" in value)


class Where(Enum):
    """What a text names beside this machine's own vocabulary: such texts are made absolute, so that a run can be
    resumed from any folder, and their content enters the fingerprint."""

    PATH = "path"
    """A file or folder, or something that is elsewhere: `stage:NAME`, a name on the Hub."""
    CODE = "code"
    """A name in a folder of ours, or a user's own `module:thing` or `path/file.py:thing`."""
    PUBLISHED = "published"
    """A folder that may not be there yet, a URL, or code."""


def registered(folder: str, suffix: str) -> Only:
    """Take what a folder of ours offers (see `registry.offered_names`), and a user's own code."""
    names = tuple(offered_names(folder, suffix))
    note = (
        f"this version has {', '.join(map(repr, names))}; take one of them, or a class of your own, path/file.py:Class"
    )
    return Only(names, note, takes_import_paths=True)


@dataclass(frozen=True)
class Unit:
    """What a number counts."""

    name: str


@dataclass(frozen=True)
class AffectsResult:
    """Whether a used field enters the fingerprint of the stages that read it."""

    value: bool


NoResult = AffectsResult(False)
"""Changes how a run looks or is kept, never what it computes."""


def mark(field: FieldInfo, kind: type) -> Any:
    """Return the mark of a class in a field's annotation; None if the field has no such mark."""
    found = _FOUND.get(id(field))
    if found is None:
        found = _FOUND[id(field)] = field, [*field.metadata, *_nested(field.annotation)]
    return next((item for item in found[1] if isinstance(item, kind)), None)


_FOUND: dict[int, tuple[FieldInfo, list[Any]]] = {}
"""Of fields by their identity, since they have no hash; each is kept, so that no other gets its number."""


def _nested(annotation: Any) -> list[Any]:
    """Yield the marks inside a union, such as those of `Annotated[int, ...] | None`."""
    members = get_args(annotation) if get_origin(annotation) in {Union, types.UnionType} else ()
    return [item for member in members if get_origin(member) is Annotated for item in get_args(member)[1:]]
