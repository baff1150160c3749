"""Let processes end with their parent, however the parent ends. This module imports only the standard library, so that
a child process starts without delay."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # option of prctl(2) that sends this process a signal when its parent ends
_PR_SET_CHILD_SUBREAPER = 36


def kill_with_parent(parent_pid: int) -> None:
    """Ask the kernel to send SIGKILL to this process when the process `parent_pid`, or its thread that started this
    process, ends: a process that hangs does not notice the end of its parent. Linux only."""
    _call_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # end if the parent has ended before prctl could watch it
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _call_prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _call_prctl(prctl_option: int, prctl_argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(prctl_option, prctl_argument)
