"""Publication targets: a folder, `NAME://LOCATION`, or user code `file.py:Class` or `file.py:Class://LOCATION`."""

import os
from collections.abc import Callable

from cosmos_core.registry import is_code

TARGETS_FOLDER = "cosmos_core.upload"
FOLDER = "file"
"""Name of the publication target that is a local folder, and the default for a target without a name."""


def split_target(target: str) -> tuple[str, str]:
    """Return the name or import path of a publication target, and its location."""
    name, separator, location = target.partition("://")
    if separator:
        return name, location
    return (target, "") if is_code(target) else (FOLDER, target)


def absolute_target(target: str, to_absolute: Callable[[str], str]) -> str:
    """Return a publication target with the path of its folder made absolute; for user code, the function `to_absolute`
    makes the path of the file absolute."""
    if not target:
        return ""
    name, location = split_target(target)
    if name == FOLDER:
        return os.path.abspath(os.path.expanduser(location))
    file_path, separator, object_name = name.rpartition(":")
    name = f"{to_absolute(file_path)}{separator}{object_name}" if file_path.endswith(".py") else name
    return f"{name}://{location}" if location else name
