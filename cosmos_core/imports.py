"""Import modules without garbage collection, and from one checkout. The imports of a process create a million objects
that stay alive; searching for cycles among them takes a fifth of its start-up time."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def make_python_command() -> list[str]:
    """Return the command that starts this interpreter for a module of this package. If the working directory contains
    another checkout of the package, `python -m` would import the module from there; the option `-P` prevents this."""
    is_cwd_other_clone = os.path.isdir("cosmos_core") and not os.path.samefile("cosmos_core", os.path.dirname(__file__))
    return [sys.executable, *["-P"] * is_cwd_other_clone]


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the `with` block, and exclude the objects created in it from later collections."""
    was_gc_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # unfreeze at exit, when libraries would report frozen objects as leaks
        if was_gc_enabled:
            gc.enable()
