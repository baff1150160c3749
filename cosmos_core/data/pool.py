"""Initializer of the processes that tokenise rows, in a small module, so that logging is set up before slow imports."""

import importlib
import multiprocessing
import os
import threading
from multiprocessing.connection import wait

from cosmos_core.imports import without_garbage_collection
from cosmos_core.observe.logs import configure_logging


def initialise_process() -> None:
    """Configure logging as in the parent process, and let this process of the pool exit when the parent ends. Otherwise
    it would outlive a parent that was killed, because it waits on a pipe that it keeps open."""
    configure_logging()
    parent_process = multiprocessing.parent_process()
    assert parent_process is not None
    threading.Thread(target=lambda: (wait([parent_process.sentinel]), os._exit(1)), daemon=True).start()
    with without_garbage_collection():
        importlib.import_module("cosmos_core.data.prepare")
