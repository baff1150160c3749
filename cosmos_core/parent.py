"""Processes that end with the one that started them, whatever ends that. The standard library alone: what is started
must not wait for anything else."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the process `parent` ends, or its thread that started this one: what hangs would
    never see that it has. Only Linux does it."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request was made
        os._exit(1)


def adopt_orphans() -> None:
    """Let whatever loses its parent below this process fall to it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
