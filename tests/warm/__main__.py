"""A fork server: imports everything, then forks the programs that are requested."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel
from sqlalchemy.orm import configure_mappers

from cosmos_core.observe.report import open_template_environment
from tests.warm import spawner  # noqa: F401
from tests.warm.process import serve
from tests.warm.programs import READ, import_all

_ENDS = {
    "logging": "shutdown", "multiprocessing.util": "_exit_function", "multiprocess.util": "_exit_function",
    "pebble.pool.process": "interpreter_shutdown",
}  # fmt: skip
"""What of the registered functions does something for a program that has begun something."""
_MADV_COLLAPSE = 25
_libc = ctypes.CDLL(None, use_errno=True)


def _take_large_pages() -> None:
    """Let the kernel put the memory of this process into large pages, where it can: forks take a third of the time."""
    size = 2 << 20
    with open("/proc/self/maps") as file:
        mapped = [line.split() for line in file]
    for bounds, rights, *_, name in ([*line[:2], *(line[5:] or [""])] for line in mapped):
        if rights.startswith("rw") and name in {"", "[heap]"}:
            start, end = (int(each, 16) for each in bounds.split("-"))
            for address in range(-(-start // size) * size, end // size * size, size):
                _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_COLLAPSE)


def _prepare() -> None:
    """Do once what programs do at first: build the models of the configuration, those of Prefect's database, and the
    pages of the report. Let Ray start its workers by `ray_worker.py`."""
    configure_mappers()
    classes: list[type[BaseModel]] = [BaseModel]
    for each in classes:
        classes += each.__subclasses__()
        if not each.__pydantic_complete__ and each.__module__.startswith(("cosmos_core.", "prefect.")):
            each.model_rebuild(raise_errors=False, _types_namespace={})
    with suppress(ImportError):
        from ray._private import ray_constants

        ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__).with_name("ray_worker.py"))
    templates = open_template_environment()
    for page in templates.list_templates(extensions=["html", "svg", "css"]):
        templates.get_template(page)


def _end_quickly() -> None:
    """Let a forked program end without undoing what was imported here, which would touch, so copy, most of it."""
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False
    atexit._clear()
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    for module, name in _ENDS.items():
        atexit.register(getattr(importlib.import_module(module), name))
    if worker := sys.modules.get("ray._private.worker"):  # its end imports further modules, even if nothing was begun
        atexit.register(lambda: worker.shutdown(True) if worker.is_initialized() else None)


def main() -> None:
    """Be a fork server."""
    READ.update(os.environ)
    os.environ |= {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}  # Ray reads them when it is imported
    gc.disable()
    import_all()
    _prepare()
    _end_quickly()
    gc.collect()
    gc.freeze()
    gc.enable()
    _take_large_pages()
    connection, listener = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection.sendall(b"ready")
    serve(connection, listener)


if __name__ == "__main__":
    main()
