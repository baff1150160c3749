"""An error of the disk, wherever it surfaces, as one line that says what is lost and what is not."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from cosmos_core.errors import StageFailed

# EFBIG is what a limit on the size of files gives, EDQUOT a quota: to the user all three mean no space.
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def saving(what: str, what_is_left: Callable[[], str]) -> Iterator[None]:
    """Turn errors of the operating system inside the block into one line; `what_is_left()` is part of it.

    Raises:
        StageFailed: the disk is full, read-only, gone, ...
    """
    try:
        yield
    except CheckpointException as error:
        # A BaseException: left as it is, it would pass every `except Exception` on its way up.
        cause = next(iter(error.failures.values()))[0]
        raise _readable(cause, what, what_is_left) from error
    except (OSError, SafetensorError) as error:
        raise _readable(error, what, what_is_left) from error


@contextmanager
def loading() -> Iterator[None]:
    """Let what goes wrong while a checkpoint is read be an `Exception`, which `torch.distributed.checkpoint` wraps in
    something that is none."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _readable(error: BaseException, what: str, what_is_left: Callable[[], str]) -> BaseException:
    number = _error_number(error)
    if number is None:
        return error
    if number in _FULL:
        return StageFailed(f"disk full while saving {what}; {what_is_left()}; free space and run again")
    return StageFailed(f"{os.strerror(number)} while saving {what}; {what_is_left()}; mend that and run again")


def _error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors writes in Rust, which keeps the number in the text only.
    match = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    return int(match[1]) if match else None
