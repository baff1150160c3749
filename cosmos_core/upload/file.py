"""Publication target `file`: folders `<target>/<version>/`, and a link `<target>/latest`, which is replaced last."""

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, DamagedRecord, UploadError
from cosmos_core.run.files import list_files_below, read_json, replace_folder, sha256, sync_folder, write_json
from cosmos_core.upload.base import RECORD_FILE, append_version, is_publication_record

HISTORY_FILE = "history.json"


class FileTarget:
    """Publication target that stores versions in sub-folders of one folder."""

    def __init__(self, location: str) -> None:
        self.folder = Path(location)
        self._check_cancellation: Callable[[], None] = lambda: None

    def prepare_upload(self, folder: Path, check_cancellation: Callable[[], None]) -> None:
        """Set the function `check_cancellation`, which `publish` calls before it replaces the link `latest`, and which
        can raise an error to end the publication. No journal is kept in `folder`: an interrupted copy starts again."""
        self._check_cancellation = check_cancellation

    def check(self) -> None:
        """Raise ConfigError if the folder of the target cannot be written or, if it is missing, cannot be created. The
        check changes nothing."""
        nearest_existing_path = next(path for path in (self.folder, *self.folder.parents) if os.path.lexists(path))
        if not nearest_existing_path.is_dir():
            raise ConfigError(f"{self.folder} cannot be written: {nearest_existing_path} is no folder")
        if not os.access(nearest_existing_path, os.W_OK | os.X_OK):
            raise ConfigError(f"{self.folder} cannot be written: no permission to write {nearest_existing_path}")

    def published(self) -> dict[str, Any] | None:
        latest_link = self.folder / "latest"
        with self._translate_errors("read"):
            if not latest_link.is_symlink() and not latest_link.exists():
                return None
            return self._read_record_file(latest_link, f"publish again, or remove {latest_link}")

    def record_of(self, version: str) -> dict[str, Any]:
        """Return the publication record of the model version `version`; raise DamagedRecord if the record is missing
        or damaged."""
        with self._translate_errors("read"):
            return self._read_record_file(self.folder / version, "publish again")

    def history(self) -> list[str]:
        """Return the model versions to which the link `latest` has pointed, the current version last."""
        latest_link = self.folder / "latest"
        current_version = os.path.basename(os.readlink(latest_link)) if latest_link.is_symlink() else ""
        saved_names = read_json(self.folder / HISTORY_FILE)
        version_names = [name for name in saved_names if isinstance(name, str)] if isinstance(saved_names, list) else []
        return append_version(version_names, current_version) if current_version else []

    def versions(self) -> list[str]:
        """Return the names of all model versions in the target's folder, the version published first at the start."""
        # Skip folders whose names begin with a dot, because they are unfinished copies.
        record_files = [file for file in self.folder.glob(f"[!.]*/{RECORD_FILE}") if not file.parent.is_symlink()]
        return [file.parent.name for file in sorted(record_files, key=lambda file: (file.stat().st_mtime, file))]

    def where(self, version: str) -> str:
        """Return the path of the folder with the published model version `version`."""
        return str(self.folder / version)

    def damage(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Compare the stored files of a version with the digests in `record["files"]`. Return a message about the first
        file that is missing or altered; empty if all files are intact."""
        version_folder = self.folder / version
        if read_json(version_folder / RECORD_FILE) is None:
            return "no record"
        file_by_name = {str(file.relative_to(version_folder)): file for file in list_files_below(version_folder)}
        for name, digest in record["files"].items():
            if name not in file_by_name or sha256(file_by_name[name]) != digest:
                return f"{name} is missing or altered"
        return ""

    def point_to(self, version: str, history: list[str] | None = None) -> None:
        """Let the link `latest` point to a stored model version. Then save the list of versions to which the link has
        pointed: `history`, or the list saved before if `history` is None, with `version` appended. Raise UploadError if
        the version is incomplete, is a link to another version, or cannot be read or written."""
        if (self.folder / version).is_symlink() or Path(version).name != version:
            raise UploadError(f"{version!r} is no version of {self.folder}; the pointer was not moved")
        with self._translate_errors("written"):
            if damage_message := self.damage(self.folder, version, self.record_of(version)):
                raise UploadError(f"{self.folder / version}: {damage_message}; the pointer was not moved")
            self._move_pointer(version, history)

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        version_folder = self.folder / version
        with self._translate_errors("written"):
            if read_json(version_folder / RECORD_FILE) != record or self.damage(folder, version, record):
                with replace_folder(version_folder) as temporary_folder:
                    shutil.copytree(folder, temporary_folder, dirs_exist_ok=True)
                    # Make copies of read-only folders writable, so that the record can be added and the copy replaced.
                    for path, *_ in os.walk(temporary_folder):
                        os.chmod(path, os.stat(path).st_mode | stat.S_IRWXU)
                    write_json(temporary_folder / RECORD_FILE, record)
            if damage_message := self.damage(folder, version, record):
                raise UploadError(f"{version_folder}: {damage_message} after the copy; the pointer was not moved")
            self._check_cancellation()
            self._move_pointer(version)
        return str(version_folder)

    @contextmanager
    def _translate_errors(self, operation: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # Take the reason from the first file that `shutil.copytree` could not copy: the error itself has none.
            error_reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
            pointer_note = "; the pointer was not moved" if operation == "written" else ""
            error_message = f"target {self.folder} cannot be {operation}: {error_reason}{pointer_note}"
            raise (ConfigError if isinstance(error, PermissionError) else UploadError)(error_message) from error

    def _read_record_file(self, folder: Path, remedy: str) -> dict[str, Any]:
        record = read_json(folder / RECORD_FILE)
        if not is_publication_record(record):
            raise DamagedRecord(f"{folder / RECORD_FILE} is missing or damaged; {remedy}")
        return record

    def _move_pointer(self, version: str, history: list[str] | None = None) -> None:
        folder_fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(OSError):  # NFS cannot lock folders
                fcntl.flock(folder_fd, fcntl.LOCK_EX)  # a publication at the same time must not overwrite the history
            new_history = append_version(self.history(), version, history)
            if history is not None:  # with the old history, the pointer of a rollback would look like a publication
                write_json(self.folder / HISTORY_FILE, new_history)
            temporary_link = self.folder / f".latest.{os.getpid()}.tmp"
            temporary_link.unlink(missing_ok=True)
            temporary_link.symlink_to(version)
            os.replace(temporary_link, self.folder / "latest")
            if history is None:
                write_json(self.folder / HISTORY_FILE, new_history)
            sync_folder(self.folder)
        finally:
            os.close(folder_fd)
