"""Decide which runs and results of an artifact store can be removed, and remove them, for `cosmos clean --store`.

A run can be removed if none of its objects was written for long enough. The stored result of a stage fingerprint can be
removed if in addition no remaining run uses it, and a stored file content if no remaining result lists it. Ages are
measured with the store's own clock. Nothing is removed while a process makes a result, because this result can refer to
file contents that are already stored.
"""

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cosmos_core.errors import ConfigError
from cosmos_core.run.bucket import S3_SCHEME, Bucket, StoredObject, split_s3_url, translate_errors
from cosmos_core.run.liveness import APPROVAL_TIMEOUT_SECONDS
from cosmos_core.run.manifest import RESULT_FILE
from cosmos_core.run.plan import FINGERPRINT_FILE
from cosmos_core.upload.bundle import ContentStore, read_document, read_index
from cosmos_core.upload.lease import EXPIRY_SECONDS

_LEASE_FILE = "lease.json"
SECONDS_PER_DAY = 24 * 3600.0


@dataclass
class StoredFolder:
    """Objects in an artifact store that belong to one run, or to the result of one fingerprint."""

    name: str
    objects: list[StoredObject] = field(default_factory=list)
    pipeline: str = ""
    age_seconds: float = 0.0
    """Age in seconds of the newest object of the folder."""
    reason_to_keep: str = ""
    """Reason to keep the folder; an empty string if the folder can be removed."""

    @property
    def size(self) -> int:
        """Return the total size in bytes of the objects in the folder."""
        return sum(stored_object.size for stored_object in self.objects)


class StoreRetention:
    """Selection of the runs and results of an artifact store that can be removed, computed at construction."""

    def __init__(
        self, url: str, *, num_kept_runs: int, older_than_seconds: float, min_age_seconds: float = SECONDS_PER_DAY
    ) -> None:
        """Select what can be removed from the store at `url`. The newest `num_kept_runs` runs of each pipeline are
        kept, and all objects younger than `older_than_seconds` or, if that is longer, `min_age_seconds`: a running
        pipeline can refer to young objects later.

        Raises:
            ConfigError: the store refuses a request, or a process is making a result, which can refer to old objects.
            UploadError: the store cannot be reached.
        """
        bucket_name, self._key_prefix = split_s3_url(url)
        self._bucket, self._min_age_seconds = Bucket(bucket_name), max(older_than_seconds, min_age_seconds)
        self.url = f"{S3_SCHEME}{bucket_name}/{self._key_prefix}".rstrip("/")
        with translate_errors(self.url):
            self._clock_time = self._bucket.read_clock(self._make_key("made"))
            self._require_no_active_lease()
            self.runs = self._list_folders("runs")
            for run in self.runs:
                run_file_texts, _ = read_document(self._bucket, self._make_key(f"runs/{run.name}/run.json"))
                with suppress(AttributeError, KeyError, TypeError, ValueError):
                    pipeline_table = tomllib.loads((run_file_texts or {})["pipeline.toml"])["pipeline"]
                    run.pipeline = str(pipeline_table["name"])
                    if run.age_seconds < APPROVAL_TIMEOUT_SECONDS and self._may_wait_for_approval(run, pipeline_table):
                        run.reason_to_keep = "it has published nothing yet: it may wait for an approval"
            self._mark_runs_to_keep(num_kept_runs)
            result_folders = self._list_folders("made")
            kept_runs = [run for run in self.runs if run.reason_to_keep]
            needed_fingerprints = {each for run in kept_runs for each in self._iter_result_values(run, "fingerprint")}
            needed_fingerprints |= {each for run in kept_runs for each in self._iter_stage_fingerprints(run)}
            for result_folder in result_folders:
                if result_folder.name in needed_fingerprints or result_folder.age_seconds < self._min_age_seconds:
                    result_folder.reason_to_keep = "a run that stays has it, or it is not old enough"
            stored_folders = [*self.runs, *result_folders]
            unreferenced_objects = self._find_unreferenced_objects(
                [each for each in stored_folders if each.reason_to_keep]
            )
            self._removable_folders = [each for each in stored_folders if not each.reason_to_keep]
            self.removable_bytes = sum(each.size for each in self._removable_folders)
            self.removable_bytes += sum(each.size for each in unreferenced_objects)
            """Number of bytes that `remove` would free."""

    def remove(self) -> tuple[int, int]:
        """Remove from the store the selected runs and results, and the outputs to which no other run or result refers;
        return the number of removed runs and of freed bytes."""
        freed_bytes = 0
        with translate_errors(self.url):
            for folder in self._removable_folders:
                metadata_file_names = (f"runs/{folder.name}/run.json", f"made/{folder.name}/{RESULT_FILE}")
                metadata_keys = set(map(self._make_key, metadata_file_names))
                # Documents are removed before the objects that they name, so that no document names a missing object.
                for each in sorted(folder.objects, key=lambda stored: stored.key not in metadata_keys):
                    self._bucket.remove(each.key)
                freed_bytes += folder.size
            self._require_no_active_lease()
            for each in self._find_unreferenced_objects([*self._list_folders("runs"), *self._list_folders("made")]):
                self._bucket.remove(each.key)
                freed_bytes += each.size
        return sum(not run.reason_to_keep for run in self.runs), freed_bytes

    def _require_no_active_lease(self) -> None:
        clock_time = self._bucket.read_clock(self._make_key("made"))
        for each in self._bucket.list_objects(f"{self._make_key('made')}/"):
            if each.key.endswith(f"/{_LEASE_FILE}") and clock_time - each.modified_time < EXPIRY_SECONDS:
                lease_document, _ = read_document(self._bucket, each.key)
                machine = f" on {lease_document.get('machine')}" if lease_document else ""
                raise ConfigError(f"{self.url}: a stage is made now{machine}; clean when no pipeline uses the store")

    def _list_folders(self, parent_folder: str) -> list[StoredFolder]:
        key_prefix, objects_by_folder = f"{self._make_key(parent_folder)}/", defaultdict[str, list[StoredObject]](list)
        for each in self._bucket.list_objects(key_prefix):
            objects_by_folder[each.key.removeprefix(key_prefix).partition("/")[0]].append(each)
        stored_folders = [StoredFolder(name, objects) for name, objects in objects_by_folder.items()]
        for folder in stored_folders:
            folder.age_seconds = max(0.0, self._clock_time - max(each.modified_time for each in folder.objects))
        return stored_folders

    def _mark_runs_to_keep(self, num_kept_runs: int) -> None:
        runs_by_pipeline = defaultdict[str, list[StoredFolder]](list)
        for run in sorted(self.runs, key=lambda run: run.age_seconds):
            runs_by_pipeline[run.pipeline].append(run)
        for pipeline_runs in runs_by_pipeline.values():
            for run in pipeline_runs[:num_kept_runs]:
                run.reason_to_keep = f"one of the newest {num_kept_runs} of its pipeline"
        for run in self.runs:
            if not run.reason_to_keep and run.age_seconds < self._min_age_seconds:
                run.reason_to_keep = "not old enough"

    def _may_wait_for_approval(self, run: StoredFolder, pipeline_table: dict[str, Any]) -> bool:
        """Return True if a stage of the run that publishes a model is not complete. Such a run is treated as waiting
        for an approval, because the store has no record of requests for approval."""
        publishing_stages = [stage["name"] for stage in pipeline_table.get("stages", ()) if stage.get("target")]
        result_keys = {self._make_key(f"runs/{run.name}/stages/{name}/{RESULT_FILE}") for name in publishing_stages}
        return not result_keys <= {each.key for each in run.objects}

    def _find_unreferenced_objects(self, kept_folders: list[StoredFolder]) -> list[StoredObject]:
        """Return the stored stage outputs that are old enough to be removed and that no result in `kept_folders`
        lists."""
        output_lists = [files for folder in kept_folders for files in self._iter_result_values(folder, "outputs")]
        referenced_digests = {each["sha256"] for files in output_lists for each in files}
        outputs = self._bucket.list_objects(f"{self._make_key('objects')}/")
        expired_outputs = [each for each in outputs if self._clock_time - each.modified_time >= self._min_age_seconds]
        return [each for each in expired_outputs if each.key.rpartition("/")[2] not in referenced_digests]

    def _iter_result_values(self, folder: StoredFolder, result_key: str) -> Iterator[Any]:
        for each in folder.objects:
            if each.key.endswith(f"/{RESULT_FILE}") and (result_document := read_document(self._bucket, each.key)[0]):
                yield result_document[result_key]

    def _iter_stage_fingerprints(self, run: StoredFolder) -> Iterator[str]:
        """Yield the fingerprint of each stage of a run, also if the stage has no result: an interrupted training
        continues from the checkpoints that are stored under its fingerprint."""
        for each in run.objects:
            if each.key.endswith("/record.json"):
                content_store = ContentStore(self._bucket, f"{each.key.removesuffix('/record.json')}/content")
                fingerprint_entry = read_index(self._bucket, each.key)[0].get(FINGERPRINT_FILE)
                fingerprint_bytes = content_store.read(fingerprint_entry) if fingerprint_entry else None
                yield str(json.loads(fingerprint_bytes or "{}").get("value"))

    def _make_key(self, relative_key: str) -> str:
        return f"{self._key_prefix}/{relative_key}" if self._key_prefix else relative_key
