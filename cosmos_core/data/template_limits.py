"""Limits on time and memory of chat templates, which are programs in a model's files that may never end."""

import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from cosmos_core.errors import ModelError

MAX_TEMPLATE_SECONDS = 10.0
"""Time limit in seconds; rendering a conversation of a million tokens takes less than one second."""
MAX_TEMPLATE_BYTES = 2 << 30
"""Memory limit in bytes, in addition to what the process already uses."""
_PAGE_SIZE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TEMPLATE_REMEDY = "mend the template, or leave the row out"


class _TimeLimitExceeded(Exception):
    """Error that the signal handler raises inside code that exceeds the time limit."""


@contextmanager
def limit_resources(description: str) -> Iterator[None]:
    """Limit the time and the additional memory of the code in a `with` block; raise ModelError, which names the code by
    `description`, if it exceeds a limit.

    A loop in Python stops at its next bytecode; a single operation in C is limited only by memory. The time limit needs
    a signal, which only the main thread of a process receives; other threads have the memory limit only.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    limits = [
        limit
        for limit in (_read_address_space_bytes() + MAX_TEMPLATE_BYTES, soft_limit, hard_limit)
        if limit != resource.RLIM_INFINITY
    ]
    previous_signal_handler = signal.signal(signal.SIGALRM, _raise_time_limit_exceeded) if is_main_thread else None
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard_limit))
        if is_main_thread:
            # Repeat the signal each second, in case a destructor swallows the exception.
            signal.setitimer(signal.ITIMER_REAL, MAX_TEMPLATE_SECONDS, 1.0)
        yield
    except _TimeLimitExceeded as error:
        raise ModelError(f"{description} runs on beyond {MAX_TEMPLATE_SECONDS:g} s; {_TEMPLATE_REMEDY}") from error
    except MemoryError as error:
        raise ModelError(
            f"{description} takes more than {MAX_TEMPLATE_BYTES / 2**30:g} GiB of memory; {_TEMPLATE_REMEDY}"
        ) from error
    finally:
        if is_main_thread:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_signal_handler)
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))


def _raise_time_limit_exceeded(signal_number: int, frame: FrameType | None) -> None:
    raise _TimeLimitExceeded


def _read_address_space_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read(64).split()[0]) * _PAGE_SIZE_BYTES
