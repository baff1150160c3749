"""The beginning of each process that makes rows, in a module of its own: what is imported behind it is logged too."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from multiprocessing.connection import wait

from cosmos_core.imports import without_collection
from cosmos_core.observe.logs import configure


def begin() -> None:
    """Log as the worker does, and end with the parent: a pool's process waits on a pipe that it holds open itself, and
    would outlive a killed one."""
    configure()
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    with without_collection():
        importlib.import_module("cosmos_core.data.prepare")
