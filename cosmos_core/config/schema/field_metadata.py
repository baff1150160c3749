"""Classes for the `Annotated` metadata of a field: properties of a key in addition to its type."""

import types
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from cosmos_core.registry import list_defined_names

StatusName = Literal["used", "no effect", "planned", "unsupported"]


@dataclass(frozen=True)
class KeyStatus:
    """Metadata of a field with its support status in this version, as declared in `config/status.toml`."""

    name: StatusName
    note: str = ""
    """Reason why a configuration key has no effect or is not supported, or the key to use instead; empty if the key has
    its effect."""


@dataclass(frozen=True)
class IntroducedIn:
    """Metadata of a field with the version that introduced its key: the `first` version of Cosmos-RL that is supported,
    a `later` version of it, or `ours`, a version of this project."""

    version: Literal["first", "later", "ours"]


@dataclass(frozen=True)
class EnabledBy:
    """Metadata of a field that has an effect only while another field of the same table, `enabling_field`, is set."""

    enabling_field: str


@dataclass(frozen=True)
class SupportedValues:
    """Metadata of a field of which this version supports only some values, although the schema accepts more."""

    values: tuple[Any, ...]
    note: str
    """Advice for the error message on an unsupported value."""
    takes_import_paths: bool = False
    """Whether import paths of user code, `module:name` and `file.py:name`, are also supported."""

    def is_supported(self, value: Any) -> bool:
        """Return True if `value` is in `values` or, with `takes_import_paths`, is the import path of user code."""
        return value in self.values or (self.takes_import_paths and isinstance(value, str) and ":" in value)


class ReferenceKind(Enum):
    """What a text field of a recipe refers to: a path, code or a publication target. Paths in such fields are made
    absolute, so that a run can be resumed from any folder; the content that they name enters the fingerprint."""

    PATH = "path"
    """Path of a file or folder, or another reference to a model or data set: `stage:NAME`, or a name on the Hub."""
    CODE = "code"
    """Code: the name of a module in a folder of this package, or a user's `module:thing` or `path/file.py:thing`."""
    PUBLICATION_TARGET = "publication target"
    """Publication target: a folder that may not exist yet, a URL, or user code."""


def class_choices(package_folder: str, suffix: str) -> SupportedValues:
    """Return the metadata with the supported values of a field that names a class: import paths of user code, and names
    of built-in classes in a folder of this package (see `registry.list_defined_names`), without their `suffix`."""
    names = tuple(list_defined_names(package_folder, suffix))
    remedy = "take one of them, or a class of your own, path/file.py:Class"
    return SupportedValues(names, f"this version has {', '.join(map(repr, names))}; {remedy}", takes_import_paths=True)


@dataclass(frozen=True)
class FieldUnit:
    """Metadata of a numeric field with its unit, such as `tokens`."""

    name: str


@dataclass(frozen=True)
class AffectsResult:
    """Metadata of a field that says whether its value enters the fingerprint of the stages that read it."""

    enters_fingerprint: bool
    omits_empty_value: bool = False
    """Whether the fingerprint of a stage omits the field while its value is empty, so that the fingerprint is the same
    as in an older version of this project that lacks the field."""


ResultNeutral = AffectsResult(False)
"""Metadata of a field whose value fingerprints omit. The value changes how a run is shown or stored, never what the run
computes, or the value names content that itself enters fingerprints."""
OmittedIfEmpty = AffectsResult(True, omits_empty_value=True)
"""Metadata of a field that is left out of fingerprints while it is empty."""


def find_metadata(field: FieldInfo, metadata_type: type) -> Any:
    """Return the object of type `metadata_type` in the metadata of a field, or of a member of its union, such as
    `Annotated[int, ...] | None`; None if there is none."""
    if (field_and_metadata := _METADATA_BY_FIELD.get(id(field))) is None:
        is_union = get_origin(field.annotation) in {Union, types.UnionType}
        union_members = [each for each in get_args(field.annotation) if is_union and get_origin(each) is Annotated]
        metadata_in_union = [item for union_member in union_members for item in get_args(union_member)[1:]]
        field_and_metadata = _METADATA_BY_FIELD[id(field)] = field, [*field.metadata, *metadata_in_union]
    return next((metadata for metadata in field_and_metadata[1] if isinstance(metadata, metadata_type)), None)


_METADATA_BY_FIELD: dict[int, tuple[FieldInfo, list[Any]]] = {}
"""Cache of the metadata of fields by the `id` of the field, because fields are not hashable. The cache keeps a
reference to each field, so that no other object gets the same `id`."""
