"""Registry of stage kinds: `KIND` of each module in `tasks/stages`. This module does not import Prefect."""

import importlib
import pkgutil
from functools import cache

import tasks.stages
from cosmos_core.types import StageKind


@cache
def all_kinds() -> dict[str, StageKind]:
    """Return every stage kind by its name."""
    kind_names = sorted(module.name for module in pkgutil.iter_modules(tasks.stages.__path__))
    return {name: importlib.import_module(f"tasks.stages.{name}").KIND for name in kind_names}
