"""Conversion of disk errors of any library to one-line errors that say which files are lost and which are intact."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from cosmos_core.errors import StageFailed

# ENOSPC: the disk is full; EFBIG: a limit on the size of a file; EDQUOT: a quota. The remedy is to free space.
_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def translate_disk_errors(name: str, describe_rest: Callable[[], str]) -> Iterator[None]:
    """Convert errors of the operating system inside the block, which writes `name`, to one line.

    The message includes the result of `describe_rest()`, a text about the files that are still intact.

    Raises:
        StageFailed: the disk is full, read-only or missing.
    """
    try:
        yield
    except CheckpointException as error:
        # CheckpointException is a BaseException, so `except Exception` clauses of callers would not catch it.
        cause = next(iter(error.failures.values()))[0]
        raise _disk_error(cause, name, describe_rest) from error
    except (OSError, SafetensorError) as error:
        raise _disk_error(error, name, describe_rest) from error


@contextmanager
def unwrap_checkpoint_errors() -> Iterator[None]:
    """Replace a `CheckpointException` of the block by its cause, because `CheckpointException` is no `Exception`."""
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
    # safetensors, a library in Rust, has the error number only in the text of its exceptions.
    match = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, SafetensorError) else None
    return int(match[1]) if match else None
