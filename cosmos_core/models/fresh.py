"""A fresh interpreter that reads an export as a user's process would. It imports the function to call after this
module,
so that these imports run without garbage collection."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessPool

from cosmos_core.errors import StageFailed
from cosmos_core.observe.logs import configure
from cosmos_core.parent import die_with_parent

T = TypeVar("T")


def fresh_interpreter() -> ProcessPool:
    """Return a pool with one new interpreter, which starts with the first task and shares no state with this one."""
    return ProcessPool(1, initializer=_start, initargs=(os.getpid(),), context=get_context("spawn"))


def call_in_interpreter(
    pool: ProcessPool, function: Callable[..., T], arguments: tuple[Any, ...], seconds: float, folder: Path
) -> T:
    """Return the result of a function that reads the export in `folder`, called in a fresh interpreter.

    Raises:
        StageFailed: the function raised an error, or took longer than `seconds`.
    """
    failed = f"export {folder} failed the check 'reload'"
    try:
        result: T = pool.schedule(function, arguments, timeout=seconds).result()
    except TimeoutError:
        raise StageFailed(f"{failed}: not loaded after {seconds:g} s") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StageFailed(f"{failed}: a fresh interpreter cannot load it: {reason[-300:]}") from error
    return result


def _start(parent: int) -> None:
    """Prepare the interpreter: it dies with its parent, logs warnings, and never uses the network."""
    die_with_parent(parent)
    configure("WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    gc.disable()  # the process is short-lived
