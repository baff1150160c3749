"""Checkpoints of one training in an artifact store, from which a machine with an empty disk can continue."""

import logging
from collections.abc import Callable
from pathlib import Path

from cosmos_core.errors import UploadError
from cosmos_core.run.bucket import Bucket, translate_errors
from cosmos_core.run.files import parse_step, read_json_object
from cosmos_core.upload.bundle import ContentEntry, ContentStore, read_index, write_index
from cosmos_core.upload.checkpoint_upload import CHECKPOINTS_FOLDER, MANIFEST_FILE, link_checkpoint, saved_manifests

logger = logging.getLogger(__name__)

JOURNAL_FILE = "stored.jsonl"
"""Name of the journal file in the folder of a stage: it lists the parts and objects that have arrived in the artifact
store, so that an interrupted upload continues."""
_METRICS_FILE = "metrics.jsonl"
_TRAINING_STATE_FILE = "extra.json"
"""Name of the file of a checkpoint that records the training state, such as the step of the best checkpoint."""


class StoredCheckpoints:
    """Checkpoints of one training in an artifact store; `push` also removes those that were removed locally."""

    def __init__(self, bucket: Bucket, key_prefix: str, stage_path: Path) -> None:
        self._bucket, self._key_prefix, self._stage_path = bucket, key_prefix, stage_path
        self._stored_checkpoint_names: set[str] | None = None
        self._damaged_checkpoint_names: set[str] = set()

    def push(self, check_cancellation: Callable[[], None] = lambda: None) -> list[str]:
        """Upload each complete checkpoint that the store does not have, with the training's metrics. Then remove older
        checkpoints from the store that were removed locally. Return the names of the new checkpoints, `step_N`.
        `check_cancellation` can raise an error to end the upload."""
        sent_checkpoint_names, manifest_by_name = [], saved_manifests(self._stage_path)
        for name, manifest in manifest_by_name.items():
            with translate_errors(self._bucket.url(self._key_prefix)):
                if self._stored_checkpoint_names is None:
                    self._stored_checkpoint_names = set(self.list_names()) - self._damaged_checkpoint_names
                if name in self._stored_checkpoint_names:
                    continue
                with link_checkpoint(manifest.parent, self._stage_path / "storing" / name) as folder:
                    if folder is None:
                        continue
                    self._send_checkpoint(name, folder, check_cancellation)
            self._stored_checkpoint_names.add(name)
            sent_checkpoint_names.append(name)
        if sent_checkpoint_names:
            self._remove_old_checkpoints(set(manifest_by_name))
        return sent_checkpoint_names

    def pull(self) -> str:
        """Download the newest intact checkpoint and its metrics from the store, unless a local checkpoint is as new.
        Return the name of the checkpoint, `step_N`; "" if none was downloaded."""
        newest_local_step = max(map(parse_step, saved_manifests(self._stage_path)), default=-1)
        with translate_errors(self._bucket.url(self._key_prefix)):
            for name in sorted(self.list_names(), key=parse_step, reverse=True):
                if parse_step(name) <= newest_local_step:
                    return ""
                try:
                    if self._fetch_checkpoint(name):
                        self._fetch_best_checkpoint(name)
                        return name
                except UploadError as error:
                    logger.warning("checkpoint %s is passed over: %s", name, error)
                    self._damaged_checkpoint_names.add(name)
        return ""

    def clear(self) -> None:
        """Remove all stored checkpoints of a training that starts again from the beginning."""
        with translate_errors(self._bucket.url(self._key_prefix)):
            for stored_object in list(self._bucket.list_objects(f"{self._key_prefix}/")):
                self._bucket.remove(stored_object.key)

    def _open_content_store(self, check_cancellation: Callable[[], None] = lambda: None) -> ContentStore:
        return ContentStore(self._bucket, f"{self._key_prefix}/content", check_cancellation)

    def list_names(self) -> list[str]:
        """Return the names of the stored checkpoints, `step_N`."""
        stored_objects = self._bucket.list_objects(f"{self._key_prefix}/step_")
        keys = [stored_object.key for stored_object in stored_objects if stored_object.key.endswith(".json")]
        return [key.removeprefix(f"{self._key_prefix}/").removesuffix(".json") for key in keys]

    def _send_checkpoint(self, name: str, folder: Path, check_cancellation: Callable[[], None]) -> None:
        content_store = self._open_content_store(check_cancellation)
        manifest_files = read_json_object(folder / MANIFEST_FILE).get("files", {})
        file_by_digest = {entry["sha256"]: folder / file for file, entry in manifest_files.items()}
        content_store.send(file_by_digest, self._stage_path / JOURNAL_FILE)
        folder_prefix = f"{CHECKPOINTS_FOLDER}/{name}/policy"
        files = {f"{folder_prefix}/{file}": ContentEntry(e["size"], e["sha256"]) for file, e in manifest_files.items()}
        files[f"{folder_prefix}/{MANIFEST_FILE}"] = content_store.write((folder / MANIFEST_FILE).read_bytes())
        if (metrics_path := self._stage_path / _METRICS_FILE).is_file():
            files[_METRICS_FILE] = content_store.write(metrics_path.read_bytes())
        write_index(self._bucket, f"{self._key_prefix}/{name}.json", files)

    def _fetch_best_checkpoint(self, name: str) -> None:
        """Download the best checkpoint of the training, whose step is recorded in the downloaded checkpoint `name`: a
        training keeps its best checkpoint in addition to the `max_keep` newest."""
        policy_folder = self._stage_path / CHECKPOINTS_FOLDER / name / "policy"
        training_state = read_json_object(policy_folder / _TRAINING_STATE_FILE)
        best_checkpoint_name = f"step_{(training_state.get('best') or {}).get('step')}"
        if best_checkpoint_name != name and best_checkpoint_name in self.list_names():
            try:  # do not overwrite the metrics file, which belongs to the newer checkpoint `name`
                self._fetch_checkpoint(best_checkpoint_name, excluded_path=_METRICS_FILE)
            except UploadError as error:
                logger.warning("the best checkpoint %s is passed over: %s", best_checkpoint_name, error)
                self._damaged_checkpoint_names.add(best_checkpoint_name)

    def _fetch_checkpoint(self, name: str, excluded_path: str = "") -> bool:
        entry_by_path, *_ = read_index(self._bucket, f"{self._key_prefix}/{name}.json")
        fetched_entries = {path: entry for path, entry in entry_by_path.items() if path != excluded_path}
        manifest_paths = [path for path in fetched_entries if path.endswith(f"/{MANIFEST_FILE}")]
        for paths in ([path for path in fetched_entries if path not in manifest_paths], manifest_paths):
            self._open_content_store().fetch({self._stage_path / path: fetched_entries[path] for path in paths})
        return bool(entry_by_path)

    def _remove_old_checkpoints(self, local_checkpoint_names: set[str]) -> None:
        newest_step = max(map(parse_step, local_checkpoint_names))
        with translate_errors(self._bucket.url(self._key_prefix)):
            stored_checkpoint_names, referenced_digests = self.list_names(), set()
            for name in stored_checkpoint_names:
                if name not in local_checkpoint_names and parse_step(name) < newest_step:
                    self._bucket.remove(f"{self._key_prefix}/{name}.json")
                    continue
                entry_by_path, *_ = read_index(self._bucket, f"{self._key_prefix}/{name}.json")
                referenced_digests |= {entry.sha256 for entry in entry_by_path.values()}
            self._open_content_store().remove_all_except(referenced_digests)
