"""Registry of the kinds of stages: every module of this folder that defines `KIND`. Imports no Prefect."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import tasks
from cosmos_core.types import StageKind

_NOT_KINDS = {
    "kinds", "stage", "layout", "credentials", "elsewhere", "artifacts", "events", "reward_service", "stored",
    "cancellation", "ending", "reuse",
}  # fmt: skip


@cache
def all_kinds() -> dict[str, StageKind]:
    """Return every stage kind by its name."""
    names = [module.name for module in pkgutil.iter_modules(tasks.__path__) if module.name not in _NOT_KINDS]
    return {name: importlib.import_module(f"tasks.{name}").KIND for name in sorted(names)}
