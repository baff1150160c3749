"""Limits on time and memory of chat templates, which are programs in a model's files that can run forever."""

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

from cosmos_core.errors import ModelError

MAX_TEMPLATE_SECONDS = 10.0
"""Time limit in seconds for the code in a `limit_resources` block, which renders with a chat template. Rendering a
conversation of a million tokens takes less than one second."""
MAX_TEMPLATE_BYTES = 2 << 30
"""Memory limit in bytes for the code in a `limit_resources` block, in addition to what the process already uses."""
_PAGE_SIZE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEMORY_SIZE_REFRESH_SECONDS = 0.02
"""Time in seconds for which the measured memory size of the process is reused, because measuring it takes longer than
rendering a short row."""
_TEMPLATE_REMEDY = "mend the template, or leave the row out"


class _TimeLimitExceeded(Exception):
    """Error that the timer's signal handler raises inside a `limit_resources` block that exceeds its time limit."""


class _ProcessLimits:
    """Timer and measured memory size of this process, which all `limit_resources` blocks share."""

    def __init__(self) -> None:
        self.deadline = math.inf
        """Time of the monotonic clock at which the running `limit_resources` block exceeds its time limit; infinity if
        no block runs."""
        self.is_timer_running = False
        self._address_space_bytes, self._next_size_measurement_time = 0, -math.inf

    @contextmanager
    def run_timer(self) -> Iterator[None]:
        """Run a timer during the `with` block. The signal handler of the timer raises an error in a `limit_resources`
        block that exceeds its time limit."""
        previous_handler: Any = signal.signal(signal.SIGALRM, self._raise_if_late)
        self.is_timer_running = True
        try:
            self.ensure_timer_runs()
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)
            self.is_timer_running = False

    def ensure_timer_runs(self) -> None:
        """Start the timer unless it runs: a forked process has no timer, and other code can have stopped it."""
        if signal.getitimer(signal.ITIMER_REAL)[1] == 0:
            timer_interval_seconds = min(1.0, MAX_TEMPLATE_SECONDS / 10)
            signal.setitimer(signal.ITIMER_REAL, timer_interval_seconds, timer_interval_seconds)

    def _raise_if_late(self, signal_number: int, stack_frame: FrameType | None) -> None:
        if time.monotonic() >= self.deadline:  # raise at each timer signal, since a destructor may ignore one error
            raise _TimeLimitExceeded

    def measure_address_space(self) -> int:
        """Return the size in bytes of this process's address space; a measured size is reused for
        `_MEMORY_SIZE_REFRESH_SECONDS`."""
        if time.monotonic() >= self._next_size_measurement_time:
            with open("/proc/self/statm", "rb", buffering=0) as file:
                self._address_space_bytes = int(file.read(64).split()[0]) * _PAGE_SIZE_BYTES
            self._next_size_measurement_time = time.monotonic() + _MEMORY_SIZE_REFRESH_SECONDS
        return self._address_space_bytes


_process_limits = _ProcessLimits()


@contextmanager
def share_template_timer() -> Iterator[None]:
    """Return a context manager in which all `limit_resources` blocks of the main thread use one timer, which saves most
    of their overhead."""
    with _process_limits.run_timer() if _is_main_thread() and not _process_limits.is_timer_running else nullcontext():
        yield


@contextmanager
def limit_resources(code_description: str) -> Iterator[None]:
    """Limit the time and the additional memory of the code in a `with` block; raise ModelError, which names the code by
    `code_description`, if it exceeds a limit.

    A loop in Python stops at its next bytecode; a single operation in C is limited only by memory. The time limit needs
    a signal, which only the main thread of a process receives; other threads have the memory limit only.
    """
    is_main_thread = _is_main_thread()
    if is_main_thread and not _process_limits.is_timer_running:
        with _process_limits.run_timer(), limit_resources(code_description):
            yield
        return
    soft_limit, hard_memory_limit = resource.getrlimit(resource.RLIMIT_AS)
    address_space_limits = (_process_limits.measure_address_space() + MAX_TEMPLATE_BYTES, soft_limit, hard_memory_limit)
    try:
        address_space_limit = min(each for each in address_space_limits if each != resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_AS, (address_space_limit, hard_memory_limit))
        if is_main_thread:
            _process_limits.ensure_timer_runs()
            _process_limits.deadline = time.monotonic() + MAX_TEMPLATE_SECONDS
        yield
    except _TimeLimitExceeded as error:
        raise ModelError(f"{code_description} runs on beyond {MAX_TEMPLATE_SECONDS:g} s; {_TEMPLATE_REMEDY}") from error
    except MemoryError as error:
        memory_limit_text = f"{MAX_TEMPLATE_BYTES / 2**30:g} GiB of memory"
        raise ModelError(f"{code_description} takes more than {memory_limit_text}; {_TEMPLATE_REMEDY}") from error
    finally:
        if is_main_thread:
            _process_limits.deadline = math.inf
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_memory_limit))


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
