"""Publication targets: a folder, `NAME://LOCATION`, or user code `file.py:Class` or `file.py:Class://LOCATION`."""

import os
from collections.abc import Callable

from cosmos_core.registry import is_user_code

PUBLICATION_TARGETS_FOLDER = "cosmos_core.upload"
LOCAL_FOLDER_TARGET = "file"
"""Name of the publication target that is a local folder. A target without a name is such a folder too."""


def split_publication_target(publication_target: str) -> tuple[str, str]:
    """Return the name or import path of a publication target, and its location."""
    target_name, separator, location = publication_target.partition("://")
    if separator:
        return target_name, location
    return (publication_target, "") if is_user_code(publication_target) else (LOCAL_FOLDER_TARGET, publication_target)


def absolute_publication_target(publication_target: str, make_absolute: Callable[[str], str]) -> str:
    """Return a publication target with an absolute path in place of the path of a folder or, converted by
    `make_absolute`, of a file with user code. A folder `~USER/FOLDER` of an unknown user is returned unchanged."""
    if not publication_target:
        return ""
    target_name, location = split_publication_target(publication_target)
    if target_name == LOCAL_FOLDER_TARGET:
        target_folder = os.path.expanduser(location)
        return target_folder if target_folder.startswith("~") else os.path.abspath(target_folder)
    file_path, separator, object_name = target_name.rpartition(":")
    target_name = f"{make_absolute(file_path)}{separator}{object_name}" if file_path.endswith(".py") else target_name
    return f"{target_name}://{location}" if location else target_name
