"""Imports without garbage collection. What a process here imports makes a million objects, all of which stay: to look
through them for cycles, again and again, is a fifth of the time in which it starts."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside the block; what it left is not looked at by later collections either."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries count at the end what nobody has collected, and say so
        if was_enabled:
            gc.enable()
