"""Upload checkpoints to a bucket during training.

A thread of the flow's process sends the checkpoints with the lowest priority, so that the training never waits. The
thread hard-links the files of a checkpoint first, so that the checkpoint arrives complete even if the training removes
it meanwhile. The manifest of a checkpoint is sent last.
"""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from cosmos_core.error_handling import log_errors
from cosmos_core.errors import CosmosError, Preempted
from cosmos_core.run.bucket import Bucket, split_s3_url, translate_errors
from cosmos_core.run.files import link_or_copy, parse_step, read_json_object
from cosmos_core.run.lock import FileLock
from cosmos_core.run.state import record_event
from cosmos_core.upload.transfer import FileTransfer, UploadJournal

logger = logging.getLogger(__name__)

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
_UPLOAD_JOURNAL_FILE = "saves.jsonl"
_LOWEST_CPU_PRIORITY = 19
_POLL_INTERVAL_SECONDS = 1.0
_RETRY_DELAY_SECONDS = 30.0


def checkpoint_url(parent_url: str, training_name: str, run_id: str) -> str:
    """Return the upload URL for a training's checkpoints, below `parent_url`; empty if `parent_url` is empty."""
    return f"{parent_url}/{training_name}/saves/{run_id}" if parent_url else ""


class CheckpointUploader:
    """Uploader of the checkpoints of one training to a URL."""

    def __init__(self, stage_path: Path, url: str) -> None:
        bucket_name, self._key_prefix = split_s3_url(url)
        self._bucket, self._stage_path = Bucket(bucket_name), stage_path
        self._uploaded_names: set[str] = set()

    def push(self, check_cancellation: Callable[[], None] = lambda: None) -> Iterator[str]:
        """Upload every complete checkpoint that the bucket does not have; yield the name of each, `step_N`, after its
        upload. `check_cancellation` is called between requests and during waits, and can raise an error to end the
        upload. Raise ConfigError or UploadError if a request fails; uploaded files remain."""
        with FileLock(self._stage_path / "sending.lock") as lock:  # lock out another stage that uploads the checkpoints
            lock.acquire(on_poll=check_cancellation)
            for name, manifest_file in saved_manifests(self._stage_path).items():
                if name not in self._uploaded_names and self._push_checkpoint(name, manifest_file, check_cancellation):
                    yield name

    def _push_checkpoint(self, name: str, manifest_file: Path, check_cancellation: Callable[[], None]) -> bool:
        """Upload the checkpoint `name`, whose manifest is `manifest_file`, unless the bucket has it or the training has
        removed it. Return True if it was uploaded."""
        staging_path, store_url = self._stage_path / "sending" / name, self._bucket.url(self._key_prefix)
        with translate_errors(store_url), link_checkpoint(manifest_file.parent, staging_path) as folder:
            if folder is None:
                return False
            # Contents are compared, because a training that starts again makes other checkpoints of the same names.
            manifest_key, manifest_bytes = self._make_key(name, MANIFEST_FILE), (folder / MANIFEST_FILE).read_bytes()
            stored_manifest = self._bucket.read(manifest_key)
            is_manifest_stored = stored_manifest == manifest_bytes
            if not is_manifest_stored:
                if stored_manifest is not None:
                    # Remove only an existing object: an account that may not remove can then send new checkpoints.
                    self._bucket.remove(manifest_key)
                file_entries: dict[str, Any] = read_json_object(folder / MANIFEST_FILE).get("files", {})
                files = {self._make_key(name, file): (folder / file, e["sha256"]) for file, e in file_entries.items()}
                journal = UploadJournal(self._stage_path / _UPLOAD_JOURNAL_FILE)
                FileTransfer(self._bucket, journal, check_cancellation).send(files)
                self._bucket.write(manifest_key, manifest_bytes)
        self._uploaded_names.add(name)
        return not is_manifest_stored

    def _make_key(self, checkpoint_name: str, file_name: str) -> str:
        return f"{self._key_prefix}/{checkpoint_name}/policy/{file_name}"


@contextmanager
def upload_checkpoints_in_background(
    stage_path: Path, url: str, check_stop: Callable[[], None] | None = None
) -> Iterator[None]:
    """Upload each checkpoint of a training when it is saved, while the `with` block runs; do nothing if `url` is empty.
    An upload that fails is logged and tried again, at the latest by the `upload` stage. Pass `check_stop` if the
    `upload` stage can run on another machine: the remaining checkpoints are then sent at the end of the `with` block,
    and `check_stop` is called between their requests, where it can raise an error to end the upload."""
    if not url:
        yield
        return
    stop_event = threading.Event()
    thread_arguments = (stage_path, url, stop_event)
    upload_thread = threading.Thread(target=_upload_until_stopped, args=thread_arguments, name="saves", daemon=True)
    upload_thread.start()
    try:
        yield
    finally:
        stop_event.set()
        upload_thread.join()
    if check_stop is not None:
        with log_errors(partial(logger.warning, "%s: the last checkpoints were not sent: %s", stage_path.name)):
            for name in CheckpointUploader(stage_path, url).push(check_stop):
                record_event(stage_path, "sent", f"{name} to {url}")


def _upload_until_stopped(stage_path: Path, url: str, stop_event: threading.Event) -> None:
    def check_cancellation() -> None:
        if stop_event.is_set():
            raise Preempted("the training has ended")  # the `upload` stage sends the remaining checkpoints

    lower_cpu_priority()
    uploader = None
    while not stop_event.wait(_POLL_INTERVAL_SECONDS):
        try:
            uploader = uploader or CheckpointUploader(stage_path, url)
            for name in uploader.push(check_cancellation):
                record_event(stage_path, "sent", f"{name} to {url}")
        except Preempted:
            return
        except Exception as error:  # noqa: BLE001 - no error of an upload may stop the training
            error_message = str(error) if isinstance(error, CosmosError) else f"{type(error).__name__}: {error}"
            logger.warning("%s: a checkpoint was not sent, it is tried again: %s", stage_path.name, error_message)
            with suppress(OSError):
                record_event(stage_path, "not sent", error_message)
            stop_event.wait(_RETRY_DELAY_SECONDS)


def lower_cpu_priority() -> None:
    """Give the current thread, and threads that it starts, the lowest CPU priority."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_CPU_PRIORITY)


@contextmanager
def link_checkpoint(source_folder: Path, target_folder: Path) -> Iterator[Path | None]:
    """Hard-link a checkpoint's files into `target_folder` during the `with` block; yield `target_folder`, or None if
    the checkpoint has been removed."""
    shutil.rmtree(target_folder, ignore_errors=True)
    target_folder.mkdir(parents=True)
    linked_folder = None
    try:
        with suppress(FileNotFoundError):
            for file_name in [*read_json_object(source_folder / MANIFEST_FILE).get("files", {}), MANIFEST_FILE]:
                (target_folder / file_name).parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(source_folder / file_name, target_folder / file_name)
            linked_folder = target_folder
        yield linked_folder
    finally:
        shutil.rmtree(target_folder, ignore_errors=True)


def saved_manifests(stage_path: Path) -> dict[str, Path]:
    """Return the manifest file of each complete checkpoint of a training by name, `step_N`, the oldest first."""
    manifest_files = stage_path.glob(f"{CHECKPOINTS_FOLDER}/step_*/policy/{MANIFEST_FILE}")
    return {path.parts[-3]: path for path in sorted(manifest_files, key=lambda path: parse_step(path.parts[-3]))}
