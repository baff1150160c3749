"""Write files atomically, and read JSON files so that a missing or damaged file is no error."""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from cosmos_core.errors import ConfigError, DiskFull

logger = logging.getLogger(__name__)

SHARED_FOLDER = ".cosmos"
"""Name of the folder in the output folder with the data that all runs share, such as digests."""
_WRITER_PID_PATTERN = re.compile(r"\.(\d+)(?:-\d+)?\.tmp$")
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRITE_TEST_BYTES = 1 << 20  # number of bytes that a disk must accept to count as writable


def make_disk_full_error(error: BaseException | None, path: Path) -> DiskFull | None:
    """Return a `DiskFull` error if an error, or one of its causes, means a full or read-only disk; otherwise None."""
    while error is not None and not (isinstance(error, OSError) and error.errno in {*_DISK_FULL_ERRNOS, errno.EROFS}):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    disk_problem, remedy = (
        ("read-only", "make it writable") if error.errno == errno.EROFS else ("disk full", "free space")
    )
    return DiskFull(f"{disk_problem}: {error.strerror}: {error.filename or path}; {remedy} and resume")


def find_disk_error(folder: Path) -> DiskFull | None:
    """Return the error that prevents writing to a folder now, or None if writing succeeds."""
    try:
        # The write is buffered, because a raw write to a nearly full disk writes only some bytes and raises no error.
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_WRITE_TEST_BYTES))
        return None
    except OSError as error:
        return make_disk_full_error(error, folder)


@contextmanager
def raise_disk_full(path: Path) -> Iterator[None]:
    """Raise `DiskFull` in place of an `OSError` of the `with` block if it means that the disk is full or read-only."""
    try:
        yield
    except OSError as error:
        if disk_full_error := make_disk_full_error(error, path):
            raise disk_full_error from error
        raise


@contextmanager
def warn_if_disk_full(description: str) -> Iterator[None]:
    """Log a warning about `description` in place of an `OSError` of the `with` block if the disk is full or
    read-only."""
    try:
        yield
    except OSError as error:
        if make_disk_full_error(error, Path(description)) is None:
            raise
        logger.warning("%s was not noted, the disk is full or read-only: %s", description, error)


def write_json(path: Path, json_value: Any, *, fsync: bool = True) -> None:
    """Replace `path` atomically by `json_value` as JSON; with `fsync`, wait until the file is on the disk."""
    write_text(path, json.dumps(json_value, indent=1) + "\n", fsync=fsync)


def write_text(path: Path, text: str, *, fsync: bool = True) -> None:
    """Replace `path` atomically by `text`; with `fsync`, wait until the file is on the disk."""
    write_bytes(path, text.encode(), fsync=fsync)


def write_bytes(path: Path, content: bytes, *, fsync: bool = True) -> None:
    """Replace `path` atomically by `content`; with `fsync`, wait until the file is on the disk."""
    with replace_file(path) as temporary_path, open(temporary_path, "wb") as file:
        file.write(content)
        if fsync:
            file.flush()
            os.fsync(file.fileno())
    if fsync:
        sync_folder(path.parent)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces `path` atomically when the `with` block ends without an
    error."""
    # The name has the thread id, because threads for parallel stages may replace the same file at the same time.
    temporary_path = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary_path
        os.replace(temporary_path, path)
    finally:
        with suppress(OSError):  # ignore that the temporary file is gone after a successful rename
            temporary_path.unlink()


def read_again_if_stale(read_file: Callable[[], bytes]) -> bytes:
    """Return what `read_file` reads from a file that it opens; call it again if another machine has replaced the file
    meanwhile, for which NFS raises an error."""
    try:
        return read_file()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return read_file()


def read_json(path: Path) -> Any | None:
    """Return the value of a JSON file; None if the file is missing or damaged."""
    try:
        return from_json(read_again_if_stale(path.read_bytes))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None


class JsonDocument(BaseModel):
    """Base class of the schemas of JSON files in a run directory: types are strict, undeclared keys are ignored."""

    model_config = ConfigDict(strict=True)


UnixSeconds = Annotated[float, Field(ge=0, le=1e11)]
"""Time in seconds since 1970, limited to values that can be formatted as a date."""
JsonDocumentT = TypeVar("JsonDocumentT", bound=JsonDocument)


def read_document(path: Path, document_class: type[JsonDocumentT]) -> JsonDocumentT | None:
    """Return the content of a JSON file as an instance of `document_class`; None if it is missing or invalid."""
    try:
        return document_class.model_validate_json(read_again_if_stale(path.read_bytes))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing, damaged or holds another type."""
    json_value = read_json(path)
    return json_value if isinstance(json_value, dict) else {}


def parse_documents(json_value_list: Any, document_class: type[JsonDocumentT]) -> list[JsonDocumentT]:
    """Return the values of a JSON list that match `document_class`, as instances of it; empty if it is no list."""
    valid_documents = []
    for json_value in json_value_list if isinstance(json_value_list, list) else ():
        with suppress(ValueError):
            valid_documents.append(document_class.model_validate(json_value))
    return valid_documents


def parse_json_objects(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the JSON objects in lines of text; skip truncated lines and values of another type."""
    json_values = []
    for line in lines:
        with suppress(ValueError):
            json_values.append(from_json(line))
    return [value for value in json_values if isinstance(value, dict)]


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that a rename inside it survives a power failure."""
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def user_cache_folder() -> Path:
    """Return the cache folder of this user on this machine; the folder may not exist. Raise `ConfigError` if the user
    has no home folder, as the user id of a container may have none."""
    cache_home = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if cache_home.startswith("~"):
        raise ConfigError(f"HOME is not set, and user {os.getuid()} has no home folder; set HOME to a folder")
    return Path(cache_home) / "cosmos-posttrain"


@contextmanager
def replace_folder(target_folder: Path) -> Iterator[Path]:
    """Yield a new empty folder that replaces `target_folder` when the `with` block ends without an error. A reader sees
    the old folder, for an instant no folder, then the new folder, but never a mixture of both."""
    target_folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = target_folder.with_name(f".{target_folder.name}.{os.getpid()}.tmp")
    _remove_stale_folders(target_folder)
    temporary_folder.mkdir()
    try:
        yield temporary_folder
        for folder, _, file_names in os.walk(temporary_folder):
            for file_name in file_names:
                # The file is opened for reading, because a copy of a read-only file is not writable.
                with open(os.path.join(folder, file_name), "rb") as file:
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        replaced_folder = target_folder.with_name(f".{target_folder.name}.{os.getpid()}.old")
        if has_old_folder := target_folder.exists():
            os.rename(target_folder, replaced_folder)
        try:
            os.rename(temporary_folder, target_folder)
        except OSError:
            if has_old_folder:
                os.rename(replaced_folder, target_folder)
            raise
        sync_folder(target_folder.parent)
        shutil.rmtree(replaced_folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        raise


def sha256(path: Path, *, fsync: bool = False) -> str:
    """Return the SHA-256 hex digest of a file; with `fsync`, first wait until the file is on the disk."""
    with open(path, "rb") as file:
        if fsync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files_below(root: Path) -> list[Path]:
    """Return the regular files at or below `root`, sorted, except temporary files (`.x.tmp`, `.x.old`). Follow links to
    folders, except links to a folder that contains the link."""
    if root.is_file():
        return [root]
    files: list[Path] = []
    ancestors_by_folder: dict[str, tuple[Path, ...]] = {}
    for folder, subfolders, names in os.walk(root, followlinks=True):
        resolved_ancestors = (*ancestors_by_folder.pop(folder, ()), Path(folder).resolve())
        resolved_subfolders = {name: Path(folder, name).resolve() for name in subfolders}
        subfolders[:] = [
            name
            for name, target in resolved_subfolders.items()
            if not any(each.is_relative_to(target) for each in resolved_ancestors)
        ]
        ancestors_by_folder.update((os.path.join(folder, name), resolved_ancestors) for name in subfolders)
        files += (path for name in names if (path := Path(folder, name)).is_file())
    return sorted(path for path in files if not any(map(_is_temporary_name, path.relative_to(root).parts)))


def parse_step(name: str) -> int:
    """Return the step number of a folder name `step_N`; -1 for any other name."""
    step_text = name.removeprefix("step_")
    return int(step_text) if step_text.isdigit() else -1


def remove_temporary_files(folder: Path, is_on_other_machine: Callable[[Path], bool] = lambda path: False) -> None:
    """Remove each temporary file or folder below `folder` if the process that wrote it has ended, unless
    `is_on_other_machine` returns True for its path."""
    for path in folder.rglob(".*.tmp"):
        writer_pid_match = _WRITER_PID_PATTERN.search(path.name)
        with suppress(FileNotFoundError):  # a writer on another machine may have renamed the file
            if writer_pid_match and not is_on_other_machine(path) and not Path(f"/proc/{writer_pid_match[1]}").exists():
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()


def copy_file(source_path: str | Path, target_path: str | Path) -> None:
    """Replace `target_path` atomically by a copy of `source_path` with its modification time; share the blocks if the
    file system supports copy-on-write. Other hard links of the target, and its readers, keep the old content."""
    with replace_file(Path(target_path)) as temporary_path:
        with open(source_path, "rb") as source_file, open(temporary_path, "wb") as target_file:
            try:
                while os.copy_file_range(source_file.fileno(), target_file.fileno(), 1 << 30):
                    pass
            except OSError as error:
                if error.errno in _DISK_FULL_ERRNOS:
                    raise
                # If the kernel cannot copy between these file systems, continue in Python at the current offsets.
                shutil.copyfileobj(source_file, target_file)
            target_file.flush()
            os.fsync(target_file.fileno())  # the copy must be on disk before a manifest names it
        shutil.copystat(source_path, temporary_path)


def link_or_copy(source_path: str | Path, target_path: str | Path) -> None:
    """Create a hard link to a file, or a copy if the file system does not support hard links."""
    try:
        os.link(source_path, target_path)
    except OSError:
        copy_file(source_path, target_path)


def apply_umask(path: Path) -> None:
    """Give a file the permissions that the umask allows, because safetensors makes files for their owner only."""
    path.chmod(path.stat().st_mode | (0o666 & ~read_umask()))


def read_umask() -> int:
    """Return the umask of this process from `/proc`, because the system call would change it for all threads."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def _remove_stale_folders(target_folder: Path) -> None:
    """Remove the temporary folders for `target_folder` that this process or a killed local process has created."""
    for folder in target_folder.parent.iterdir():
        name, _, pid = folder.stem.rpartition(".")
        is_folder_stale = pid.isdigit() and (int(pid) == os.getpid() or not Path(f"/proc/{int(pid)}").exists())
        if name == f".{target_folder.name}" and _is_temporary_name(folder.name) and is_folder_stale:
            shutil.rmtree(folder, ignore_errors=True)


def _is_temporary_name(name: str) -> bool:
    return name.startswith(".") and name.endswith((".tmp", ".old"))
