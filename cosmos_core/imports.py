"""Import modules without garbage collection. The imports of a process create a million objects that stay alive;
searching for cycles among them takes a fifth of its start-up time."""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block, and exclude the objects created in it from later collections."""
    was_collection_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # unfreeze at exit, when libraries would report frozen objects as leaks
        if was_collection_enabled:
            gc.enable()
