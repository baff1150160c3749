"""Convert disk errors of any library to one-line errors that say what is lost and what is not."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from cosmos_core.errors import StageFailed

# EFBIG: a limit on the size of files; EDQUOT: a quota. For the user all three mean that there is no space.
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def translate_disk_errors(name: str, describe_rest: Callable[[], str]) -> Iterator[None]:
    """Convert errors of the operating system inside the block to one line, which includes `what_is_left()`.

    Raises:
        StageFailed: the disk is full, read-only or missing.
    """
    try:
        yield
    except CheckpointException as error:
        # A BaseException, which no `except Exception` would catch.
        cause = next(iter(error.failures.values()))[0]
        raise _disk_error(cause, name, describe_rest) from error
    except (OSError, SafetensorError) as error:
        raise _disk_error(error, name, describe_rest) from error


@contextmanager
def unwrap_checkpoint_errors() -> Iterator[None]:
    """Raise the cause of a `CheckpointException` inside the block, because `CheckpointException` is not an
    `Exception`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def _disk_error(error: BaseException, name: str, describe_rest: Callable[[], str]) -> BaseException:
    number = _error_number(error)
    if number is None:
        return error
    if number in _FULL:
        return StageFailed(f"disk full while saving {name}; {describe_rest()}; free space and run again")
    return StageFailed(f"{os.strerror(number)} while saving {name}; {describe_rest()}; mend that and run again")


def _error_number(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    # safetensors is written in Rust, and gives the error number only in the message.
    match = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    return int(match[1]) if match else None
