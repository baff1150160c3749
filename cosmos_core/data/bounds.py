"""Bounds for programs that come with a model: a chat template may loop without end, or write more than fits."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    try:
        with _memory_limit(), _alarm():
            yield
    except _TooLong as error:
        raise ModelError(f"{what} runs on beyond {SECONDS:g} s; mend the template, or leave the row out") from error
    except MemoryError as error:
        limit = f"{MEMORY / 2**30:g} GiB of memory"
        raise ModelError(f"{what} takes more than {limit}; mend the template, or leave the row out") from error


@contextmanager
def _memory_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * _PAGE
    limits = [limit for limit in (size + MEMORY, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _alarm() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1.0)  # once more, should the first be lost in a destructor
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
