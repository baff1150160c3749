"""Bounds for programs that come with a model: a chat template may loop without end, or write more than fits."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cosmos_core.errors import ModelError

SECONDS = 10.0
"""A conversation of a million tokens is rendered in less than one."""
MEMORY = 2 << 30
"""Bytes beyond what the process has."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _TooLong(Exception):
    """Raised in the middle of what takes too long."""


@contextmanager
def bounded(what: str) -> Iterator[None]:
    """End what runs inside the block after `SECONDS`, and give it no more than `MEMORY`.

    A loop in Python ends at its next step, and what a single operation in C may take is bounded by its memory. Only the
    main thread of a process gets the signal; elsewhere the memory alone is bounded.

    Raises:
        ModelError: it was too much; `what` names it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (_size() + MEMORY, soft, hard) if limit != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGALRM, _end) if is_main else None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)  # once more, should the first be lost in a destructor
        yield
    except _TooLong as error:
        raise ModelError(f"{what} runs on beyond {SECONDS:g} s; mend the template, or leave the row out") from error
    except MemoryError as error:
        limit = f"{MEMORY / 2**30:g} GiB of memory"
        raise ModelError(f"{what} takes more than {limit}; mend the template, or leave the row out") from error
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _end(number: int, frame: FrameType | None) -> None:
    raise _TooLong


def _size() -> int:
    """Return the bytes of the address space of this process."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(64).split()[0]) * _PAGE
