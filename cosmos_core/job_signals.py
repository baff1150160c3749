"""Signals that ask the processes of a job to end. Some schedulers, service managers and a machine that shuts down send
them to every process at once, but only the worker of a stage handles them: the processes that it needs to save a
checkpoint must live until it ends them. This module imports only the standard library, as child processes import it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

JOB_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2})


@contextmanager
def block_job_signals() -> Iterator[None]:
    """Block the signals in `JOB_SIGNALS` during the `with` block, in this thread and in the processes that it starts.
    Signals for this thread that arrive during the block are handled at the end of the block."""
    previous_signal_mask = signal.pthread_sigmask(signal.SIG_BLOCK, JOB_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_signal_mask)


def ignore_job_signals() -> None:
    """Let this process continue after each signal in `JOB_SIGNALS`; must be called in the main thread. Child processes
    do not ignore the signals, because user code may end them with SIGTERM."""
    for signal_number in JOB_SIGNALS:
        # Set an empty handler instead of SIG_IGN, because child processes would inherit SIG_IGN.
        signal.signal(signal_number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_default_handlers)
    unblock_job_signals()


def unblock_job_signals() -> None:
    """Unblock the signals in `JOB_SIGNALS` in this thread and in the processes that it starts."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, JOB_SIGNALS)


def _restore_default_handlers() -> None:
    for signal_number in JOB_SIGNALS:
        signal.signal(signal_number, signal.SIG_DFL)
