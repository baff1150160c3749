"""Limits on time and memory of chat templates, which are programs in a model's files that may never end."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cosmos_core.errors import ModelError

SECONDS = 10.0
"""Time limit in seconds; rendering a conversation of a million tokens takes less than one second."""
MEMORY = 2 << 30
"""Memory limit in bytes, in addition to what the process already uses."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


class _TooLong(Exception):
    """Error that the signal handler raises inside code that exceeds the time limit."""


@contextmanager
def limit_resources(what: str) -> Iterator[None]:
    """Limit the code in a `with` block to `SECONDS` of time and to `MEMORY` bytes of additional memory.

    A loop in Python stops at its next bytecode; a single operation in C is limited only by memory. The time limit needs
    a signal, which only the main thread of a process receives; other threads have the memory limit only.

    Raises:
        ModelError: the code exceeded a limit; `what` names the code in the message.
    """
    is_main = threading.current_thread() is threading.main_thread()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (_size() + MEMORY, soft, hard) if limit != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGALRM, _end) if is_main else None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        if is_main:
            signal.setitimer(
                signal.ITIMER_REAL, SECONDS, 1.0
            )  # repeat the signal each second, in case a destructor swallows the exception
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
