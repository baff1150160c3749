"""Registry of the kinds of stages: every module of `tasks/stages` that defines `KIND`. Imports no Prefect."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from cosmos_core.types import StageKind
from tasks import stages


@cache
def all_kinds() -> dict[str, StageKind]:
    """Return every stage kind by its name."""
    names = sorted(module.name for module in pkgutil.iter_modules(stages.__path__))
    return {name: importlib.import_module(f"{stages.__name__}.{name}").KIND for name in names}
