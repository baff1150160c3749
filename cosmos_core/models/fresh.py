"""A fresh interpreter, which reads an export as any user's would. It imports what it is asked to run after this module,
so that it does so without garbage collection."""

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
    """Return a pool of one interpreter that knows nothing of this one, and begins with the first task."""
    return ProcessPool(1, initializer=_start, initargs=(os.getpid(),), context=get_context("spawn"))


def ask(pool: ProcessPool, function: Callable[..., T], arguments: tuple[Any, ...], seconds: float, folder: Path) -> T:
    """Return what a function gives that reads the export in `folder` in a fresh interpreter.

    Raises:
        StageFailed: it took longer, or could not read it.
    """
    failed = f"export {folder} failed the check 'reload'"
    try:
        found: T = pool.schedule(function, arguments, timeout=seconds).result()
    except TimeoutError:
        raise StageFailed(f"{failed}: not loaded after {seconds:g} s") from None
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StageFailed(f"{failed}: a fresh interpreter cannot load it: {reason[-300:]}") from error
    return found


def _start(parent: int) -> None:
    """Be killed when the trainer dies, whatever kills it, log as it does, and ask nothing of the network."""
    die_with_parent(parent)
    configure("WARNING")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the library is imported
    gc.disable()  # a task or two, and it ends
