"""Calls of functions in a new Python interpreter, which loads an export as a user's process would.

The interpreter imports this module, which disables garbage collection, before the module of the called function, so
that imports are fast.
"""

import gc
import importlib
import os
from collections.abc import Callable
from concurrent.futures import wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessPool

from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import StageFailed
from cosmos_core.observe.logs import configure_logging
from cosmos_core.parent import kill_with_parent

T = TypeVar("T")
_POLL_SECONDS = 2.0
_prestarted_pools: list[ProcessPool] = []
"""Process pool for the next call of `open_interpreter_pool`, as the only element; empty: the call makes a new pool."""


def prestart_interpreter(module_name: str) -> None:
    """Start the Python interpreter that the next call of `open_interpreter_pool` returns in a pool, and import the
    module `module_name` in it; do nothing if the interpreter is already started."""
    if not _prestarted_pools:
        _prestarted_pools.append(_make_pool())
        _prestarted_pools[0].schedule(_import_module, (module_name,))


def open_interpreter_pool() -> ProcessPool:
    """Return a pool with one new Python interpreter, which shares no state with this process. The interpreter
    was started by `prestart_interpreter`, or starts with the first task of the pool."""
    return _prestarted_pools.pop() if _prestarted_pools else _make_pool()


def call_in_interpreter(
    interpreter_pool: ProcessPool,
    called_function: Callable[..., T],
    arguments: tuple[Any, ...],
    timeout_seconds: float | None,
    export_folder: Path,
    on_poll: Callable[[], None] = lambda: None,
) -> T:
    """Call `called_function(*arguments)`, which reads the export in `export_folder`, in the process of
    `interpreter_pool`, and return the result; raise StageFailed if the function raised an error or took longer than
    `timeout_seconds` (None: no limit).

    `on_poll` is called every few seconds until the function returns. If `on_poll` raises an error, the interpreter is
    stopped.
    """
    failure_prefix = f"export {export_folder} failed the check 'reload'"
    result_future = interpreter_pool.schedule(called_function, arguments, timeout=timeout_seconds)
    with cleanup_on_error(interpreter_pool.stop):
        while not wait([result_future], _POLL_SECONDS).done:
            on_poll()
    try:
        return result_future.result()
    except TimeoutError:
        raise StageFailed(f"{failure_prefix}: not loaded after {timeout_seconds:g} s") from None
    except Exception as error:
        error_text = " ".join(str(error).split()) or type(error).__name__
        raise StageFailed(f"{failure_prefix}: a fresh interpreter cannot load it: {error_text[-300:]}") from error


def _make_pool() -> ProcessPool:
    return ProcessPool(1, initializer=_prepare_interpreter, initargs=(os.getpid(),), context=get_context("spawn"))


def _import_module(module_name: str) -> None:
    importlib.import_module(module_name)


def _prepare_interpreter(parent_pid: int) -> None:
    """Prepare the new interpreter: it ends with its parent process, logs only warnings, and never uses the network."""
    kill_with_parent(parent_pid)
    configure_logging("WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads the variable when it is imported, which happens later
    gc.disable()  # imports are faster without garbage collection, which a short-lived process does not need
