"""Writing so that nobody ever reads half a file, and reading what was written."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from cosmos_core.errors import DiskFull

logger = logging.getLogger(__name__)

SHARED = ".cosmos"
"""Folder, beside the runs, of what they have in common."""
_BLOCK = 1 << 20
_WRITER = re.compile(r"\.(\d+)(?:-\d+)?\.tmp$")


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def disk_full(error: BaseException | None, where: Path) -> DiskFull | None:
    """Return what to tell the user if an error, or one that it came from, means that a disk took nothing more: it was
    full, or read-only."""
    while error is not None and not (isinstance(error, OSError) and error.errno in {*_NO_ROOM, errno.EROFS}):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    what, remedy = ("read-only", "make it writable") if error.errno == errno.EROFS else ("disk full", "free space")
    return DiskFull(f"{what}: {error.strerror}: {error.filename or where}; {remedy} and resume")


@contextmanager
def telling_of_full_disk(where: Path) -> Iterator[None]:
    """Raise a `DiskFull` in place of an error of the block that means it."""
    try:
        yield
    except OSError as error:
        if full := disk_full(error, where):
            raise full from error
        raise


@contextmanager
def room_may_be_missing(what: str) -> Iterator[None]:
    """Go on, with one line in the log, when the block cannot write: what it notes is known from other files too."""
    try:
        yield
    except OSError as error:
        if disk_full(error, Path(what)) is None:
            raise
        logger.warning("%s was not noted, the disk is full or read-only: %s", what, error)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by `value` as JSON in one rename; `durable` waits for the disk."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` in one rename; `durable` waits for the disk."""
    write_bytes(path, text.encode(), durable=durable)


def write_bytes(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace `path` by `content` in one rename; `durable` waits for the disk."""
    # Threads of one process may replace the same file at once, stages side by side the cache of digests for example.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):  # what went wrong first is told
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def read_json(path: Path) -> Any | None:
    """Return the value of a JSON file; None when it is missing or damaged."""
    try:
        return from_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None


class Document(BaseModel):
    """What a JSON file of a run directory holds: types are as declared, keys that are not declared are left out."""

    model_config = ConfigDict(strict=True)


Seconds = Annotated[float, Field(ge=0, le=1e11)]
"""A time, counted from 1970, that a calendar has."""
DocumentT = TypeVar("DocumentT", bound=Document)


def read_document(path: Path, shape: type[DocumentT]) -> DocumentT | None:
    """Return what a JSON file holds; None when it is missing, damaged or of another shape."""
    try:
        return shape.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one when it is missing, damaged or another value."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def parsed(values: Iterable[Any], shape: type[DocumentT]) -> list[DocumentT]:
    """Return values that JSON gave in a shape; those that have another are passed over."""
    found = []
    for value in values:
        with suppress(ValueError):
            found.append(shape.model_validate(value))
    return found


def json_objects(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the objects in lines of JSON; one that a kill has cut, or that is another value, is passed over."""
    found = []
    for line in lines:
        with suppress(ValueError):
            found.append(from_json(line))
    return [value for value in found if isinstance(value, dict)]


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def user_cache() -> Path:
    """Return the folder of what all runs of this user share on this machine, which may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cosmos-posttrain"


@contextmanager
def replaced_folder(target: Path) -> Iterator[Path]:
    """Make a new empty folder that replaces `target` when the block ends without an error.

    What stood at `target` is moved aside first and removed last, so a reader finds the old or the new one,
    or for an instant none, never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    _remove_leftovers(target)
    building.mkdir()
    try:
        yield building
        for folder, _, names in os.walk(building):
            for name in names:
                with open(os.path.join(folder, name), "rb") as file:  # a copy of a read-only file is read-only
                    os.fsync(file.fileno())
            sync_folder(Path(folder))
        old = target.with_name(f".{target.name}.{os.getpid()}.old")
        if is_replaced := target.exists():
            os.rename(target, old)
        try:
            os.rename(building, target)
        except OSError:
            if is_replaced:
                os.rename(old, target)
            raise
        sync_folder(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def sha256(path: Path, *, durable: bool = False) -> str:
    """Return the hex digest of a file's bytes; `durable` first waits until they are on the disk."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if durable:
            os.fsync(file.fileno())
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def files_below(root: Path) -> list[Path]:
    """Return every regular file at or below `root`, sorted, but those with temporary names (`.x.tmp`)."""
    if root.is_file():
        return [root]
    found = [path for path in root.rglob("*") if path.is_file()]
    return sorted(path for path in found if not any(_is_temporary(part) for part in path.relative_to(root).parts))


def step_of(name: str) -> int:
    """Return the step of a folder `step_N`; -1: the name is another one."""
    number = name.removeprefix("step_")
    return int(number) if number.isdigit() else -1


def remove_leftovers(folder: Path) -> None:
    """Remove what writers at any depth of a folder left behind that were killed on this machine."""
    for path in folder.rglob(".*.tmp"):
        writer = _WRITER.search(path.name)
        if writer and not Path(f"/proc/{writer[1]}").exists():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def copy_file(source: str | Path, target: str | Path) -> None:
    """Copy a file with its time of change; file systems that can share blocks until one side changes share them."""
    with open(source, "rb") as old, open(target, "wb") as new:
        try:
            while os.copy_file_range(old.fileno(), new.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            shutil.copyfileobj(old, new)  # from where it got to: the kernel copies between other file systems
    shutil.copystat(source, target)


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Give a file a second name, or make a copy where the file system has no such thing."""
    try:
        os.link(source, target)
    except OSError:
        copy_file(source, target)


def follow_umask(path: Path) -> None:
    """Let those read and write a file that the umask lets: safetensors makes its own for the owner alone."""
    path.chmod(path.stat().st_mode | (0o666 & ~umask()))


def umask() -> int:
    """Return the umask of this process without changing it, which another thread could meet."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


def _remove_leftovers(target: Path) -> None:
    """Remove what writers of `target` left behind that were killed, on this machine, and what this process left."""
    for folder in target.parent.iterdir():
        name, _, pid = folder.stem.rpartition(".")
        if name == f".{target.name}" and _is_temporary(folder.name) and pid.isdigit() and not _is_another(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_another(pid: int) -> bool:
    return pid != os.getpid() and Path(f"/proc/{pid}").exists()


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith((".tmp", ".old"))
