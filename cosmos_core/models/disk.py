"""Write exports, and convert disk errors to one-line errors that name the lost file and the intact files."""

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from cosmos_core.errors import StageFailed
from cosmos_core.run.files import replace_folder

# Errors that freeing space resolves: disk full (ENOSPC), file size limit exceeded (EFBIG), quota used up (EDQUOT).
_DISK_FULL_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


@contextmanager
def translate_disk_errors(name: str, describe_intact_files: Callable[[], str]) -> Iterator[None]:
    """Convert disk errors in the `with` block, which writes the file `name`, to a `StageFailed` with a message of one
    line. The message includes the text of `describe_intact_files()`, which says what files are still intact."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # `SafetensorError`, which is raised by Rust code, and `shutil.Error` have the error number only in their texts.
        errno_match = re.search(r"(?:\(os error |\[Errno )(\d+)", str(error))
        error_number = getattr(error, "errno", None) or (int(errno_match[1]) if errno_match else None)
        if error_number is None:
            raise
        reason, remedy = os.strerror(error_number), "mend that"
        if error_number in _DISK_FULL_ERRORS:
            reason, remedy = "disk full", "free space"
        raise StageFailed(f"{reason} while saving {name}; {describe_intact_files()}; {remedy} and run again") from error


@contextmanager
def write_export(export_folder: Path, extra_files: Mapping[str, bytes]) -> Iterator[Path]:
    """Yield a temporary folder that replaces `export_folder` when the `with` block ends. Before that, `extra_files` are
    written to the folder: the content of each file, by path. Raise StageFailed if the disk is full or broken."""
    disk_error_context = translate_disk_errors(f"export {export_folder}", lambda: "nothing is left of it")
    with disk_error_context, replace_folder(export_folder) as staging_folder:
        yield staging_folder
        for relative_path, content in extra_files.items():
            (staging_folder / relative_path).parent.mkdir(exist_ok=True)
            (staging_folder / relative_path).write_bytes(content)


@contextmanager
def unwrap_checkpoint_errors() -> Iterator[None]:
    """Replace a `CheckpointException` of torch that the `with` block raises by the error that caused it, because
    `except Exception` does not catch a `CheckpointException`."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
