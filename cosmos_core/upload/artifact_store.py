"""Artifact store for machines without a shared disk: `artifact_store = "s3://BUCKET/PREFIX"` in a pipeline.

    objects/<ab>/<sha256>                         outputs of stages, each content once
    made/<fingerprint>/result.json                result of a fingerprint, for reuse by other runs
    made/<fingerprint>/lease.json                 process that makes the result now
    made/<fingerprint>/checkpoints/step_<N>.json  checkpoints of the training; their objects are below content/
    runs/<run>/run.json                           pipeline.toml and run.json; <run>-2 if another run has this id
    runs/<run>/stages/<name>/result.json          written last: the stage is complete
    runs/<run>/stages/<name>/record.json          state, metrics, samples and logs, for display on other machines

Every document is written after the objects that it names. Outputs stay until `store_retention` removes them.
"""

import itertools
import json
import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.compose import Pipeline
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.run.bucket import S3_SCHEME, Bucket, split_s3_url, translate_errors
from cosmos_core.run.directory import read_start_info
from cosmos_core.run.files import write_text
from cosmos_core.run.liveness import read_holder
from cosmos_core.run.manifest import RESULT_FILE, STORE_URL_KEY, Result
from cosmos_core.upload.bundle import ContentEntry, ContentStore, encode_document, read_document
from cosmos_core.upload.checkpoint_upload import CHECKPOINTS_FOLDER
from cosmos_core.upload.lease import Lease, LeaseHolder
from cosmos_core.upload.stored_checkpoints import JOURNAL_FILE, StoredCheckpoints
from cosmos_core.upload.stored_record import StoredRecord

logger = logging.getLogger(__name__)

_PIPELINE_FILE, _RUN_FILE = ("pipeline.toml", "run.json")
_RUNS_PATH = "/runs/"


class ArtifactStore:
    """Artifact store below one URL. Each method raises ConfigError or UploadError with a message of one line if the
    store refuses a request or does not respond."""

    def __init__(self, url: str, check_cancellation: Callable[[], None] = lambda: None) -> None:
        """Open the store at `url`. `check_cancellation` is called between the parts of a transferred file, and can
        raise an error to end the transfer."""
        bucket_name, self._key_prefix = split_s3_url(url)
        self.url = f"{S3_SCHEME}{bucket_name}/{self._key_prefix}".rstrip("/")
        self._bucket = Bucket(bucket_name)
        self._content_store = ContentStore(self._bucket, self._make_key("objects"), check_cancellation)

    def check(self) -> None:
        """Check that the bucket can be reached and written, without storing anything."""
        self._bucket.check_write_access(self._make_key("made"))

    def put_run(self, run_path: Path, *, has_new_stages: bool = False) -> str:
        """Store `pipeline.toml` and `run.json` of a run unless they are stored, and return its URL for
        `open_stored_run`. With `has_new_stages`, replace the stored files if their content differs. A run gets another
        id in the store if another machine started a run of the same id in the same second."""
        files = {name: _read_text(run_path / name) for name in (_PIPELINE_FILE, _RUN_FILE)}
        start_info = read_start_info(run_path)
        # Use the recorded id, because the local folder of the run may have another name.
        run_id = start_info.run_id if start_info and start_info.run_id else run_path.name
        with translate_errors(self.url):
            name = next(name for name in _iter_run_names(run_id) if self._claim_run_name(name, files, has_new_stages))
        return f"{self.url}{_RUNS_PATH}{name}"

    def read_run(self, run_id: str) -> dict[str, str]:
        """Return the texts of the stored files that define a run, `pipeline.toml` and `run.json`, by file name. Raise
        ConfigError if the store has no such run."""
        run_file_texts = self._read_json(f"runs/{run_id}/run.json")
        if run_file_texts is None:
            raise ConfigError(f"{self.url}{_RUNS_PATH}{run_id}: there is no such run")
        return run_file_texts

    def put_outputs(self, stage_path: Path, result: Result) -> None:
        """Store the output files that the manifest `result` of a finished stage lists; equal files are stored once."""
        file_by_digest = {record["sha256"]: stage_path / record["path"] for record in result["outputs"]}
        with translate_errors(self.url):
            self._content_store.send(file_by_digest, stage_path / JOURNAL_FILE)

    def put_result(self, run_id: str, stage_name: str, result: Result) -> None:
        """Store the manifest of a stage, which marks the stage as complete; its outputs must be stored before."""
        self._write_json(f"runs/{run_id}/stages/{stage_name}/{RESULT_FILE}", result)

    def store_result(self, result: Result) -> None:
        """Store the manifest of a stage under its fingerprint, for reuse by other runs, after storing its outputs."""
        self._write_json(f"made/{result['fingerprint']}/{RESULT_FILE}", result)

    def read_result(self, run_id: str, stage_name: str) -> Result | None:
        """Return the stored manifest of a stage of a run; None if the stage is not complete."""
        return self._read_result_document(f"runs/{run_id}/stages/{stage_name}/{RESULT_FILE}")

    def find_stored_result(self, fingerprint: str) -> Result | None:
        """Return the stored result of a stage with this fingerprint; None if the store has none, or an output of the
        result is missing or truncated."""
        result = self._read_result_document(f"made/{fingerprint}/{RESULT_FILE}")
        if result is None:
            return None
        size_by_digest = {output_record["sha256"]: output_record["size"] for output_record in result["outputs"]}
        with translate_errors(self.url):
            if missing_digest := self._content_store.find_missing_digest(size_by_digest):
                logger.warning("%s/objects/%s is gone: its stage is made again", self.url, missing_digest)
                return None
        return result

    def fetch_outputs(self, result: Result, stage_path: Path, local_files: Mapping[str, Path]) -> None:
        """Download the outputs of a result to `stage_path`, or copy them from `local_files`, local files by SHA-256."""
        entry_by_output_path = {stage_path / o["path"]: ContentEntry(o["size"], o["sha256"]) for o in result["outputs"]}
        with translate_errors(self.url):
            self._content_store.fetch(entry_by_output_path, local_files)
        for output_record in result["outputs"]:
            local_file_status = (stage_path / output_record["path"]).stat()
            output_record.update(mtime_ns=local_file_status.st_mtime_ns, inode=local_file_status.st_ino)

    def lease_result(self, fingerprint: str, holder: LeaseHolder, has_died: Callable[[LeaseHolder], bool]) -> Lease:
        """Return the lease that a process must hold while it makes the result of a stage with this fingerprint; see
        `Lease`."""
        return Lease(self._bucket, self._make_key(f"made/{fingerprint}/lease.json"), holder, has_died)

    def open_checkpoints(self, fingerprint: str, stage_path: Path) -> StoredCheckpoints:
        """Return the `StoredCheckpoints` of the training with this fingerprint, whose local checkpoints are in the
        folder of the stage, `stage_path`."""
        return StoredCheckpoints(self._bucket, self._make_key(f"made/{fingerprint}/{CHECKPOINTS_FOLDER}"), stage_path)

    def open_record(self, run_id: str, stage_path: Path, machine_name: str) -> StoredRecord:
        """Return the `StoredRecord` of a stage: stored copies of its state, metrics and logs, which other machines
        display."""
        key_prefix = self._make_key(f"runs/{run_id}/stages/{stage_path.name}")
        return StoredRecord(self._bucket, key_prefix, stage_path, machine_name)

    def _claim_run_name(self, run_name: str, run_file_texts: dict[str, str], has_new_stages: bool) -> bool:
        """Claim `run_name` as the run's name in the store. Return True if the store has the same run or, until now, no
        run under this name; return False if it has another run. `has_new_stages`: as for `put_run`."""
        object_key = self._make_key(f"runs/{run_name}/run.json")
        stored_files, _ = read_document(self._bucket, object_key)
        if stored_files is None:
            if self._bucket.replace_if_unchanged(object_key, encode_document(run_file_texts), ""):
                return True
            # Read the document again: another machine stored it first, or this request succeeded without a response.
            stored_files, _ = read_document(self._bucket, object_key)
        if stored_files is None or not _is_same_run(stored_files[_RUN_FILE], run_file_texts[_RUN_FILE]):
            return False
        if has_new_stages and stored_files[_PIPELINE_FILE] != run_file_texts[_PIPELINE_FILE]:
            self._bucket.write(object_key, encode_document(run_file_texts))
        return True

    def _read_result_document(self, document_path: str) -> Result | None:
        result = self._read_json(document_path)
        return result | {STORE_URL_KEY: self.url} if result is not None else None

    def _make_key(self, relative_key: str) -> str:
        return f"{self._key_prefix}/{relative_key}" if self._key_prefix else relative_key

    def _write_json(self, document_path: str, document: dict[str, Any]) -> None:
        with translate_errors(self.url):
            self._bucket.write(self._make_key(document_path), encode_document(document))

    def _read_json(self, document_path: str) -> dict[str, Any] | None:
        with translate_errors(self.url):
            return read_document(self._bucket, self._make_key(document_path))[0]


def open_stored_run(url: str, parent_folder: str, check_cancellation: Callable[[], None]) -> Path:
    """Return the local directory of the run that is stored at `url`; create the directory if it does not exist.

    A new directory is created in `parent_folder`, or if that is empty, in the `output_dir` of the run's pipeline. An
    existing directory gets the stages that were added to the run since, unless a process executes the run there.
    """
    store_url, _, run_id = url.rpartition(_RUNS_PATH)
    run_file_texts = ArtifactStore(store_url, check_cancellation).read_run(run_id)
    pipeline = tomllib.loads(run_file_texts[_PIPELINE_FILE])
    runs_folder = Path(parent_folder or pipeline["pipeline"].get("output_dir") or "outputs").expanduser().absolute()
    pipeline["pipeline"]["output_dir"] = str(runs_folder)
    pipeline_text = tomli_w.dumps(pipeline)
    for run_path in (runs_folder / name for name in _iter_run_names(run_id)):
        local_pipeline_text = _read_text(run_path / _PIPELINE_FILE)
        if local_pipeline_text and not _is_same_run(_read_text(run_path / _RUN_FILE), run_file_texts[_RUN_FILE]):
            continue  # try the next name, because another run has a directory of this name
        if not local_pipeline_text or (local_pipeline_text != pipeline_text and read_holder(run_path) is None):
            (run_path / "stages").mkdir(parents=True, exist_ok=True)
            write_text(run_path / _RUN_FILE, run_file_texts[_RUN_FILE])
            write_text(run_path / _PIPELINE_FILE, pipeline_text)
        return run_path
    raise AssertionError("there are more names than runs")


def _is_same_run(run_json: str, second_run_json: str) -> bool:
    """Return True if the contents of two files `run.json` identify one run; invalid contents are compared as text."""
    with suppress(ValueError):
        run_documents = [json.loads(text) for text in (run_json, second_run_json)]
        if all(isinstance(each, dict) for each in run_documents):
            run_identities = [[each.get(name) for name in ("run_id", "started", "host")] for each in run_documents]
            return run_identities[0] == run_identities[1]
    return run_json == second_run_json


def _iter_run_names(run_id: str) -> Iterator[str]:
    return itertools.chain([run_id], (f"{run_id}-{number}" for number in itertools.count(2)))


def _read_text(file: Path) -> str:
    """Return the text of a file of a run; an empty string for a missing file, so that a damaged run can continue."""
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def make_result_lookup(pipeline: Pipeline) -> Callable[[str], Result | None]:
    """Return a function that finds the stored result of a fingerprint in a pipeline's artifact store. The function
    returns None if there is no such result, or if the pipeline has no artifact store."""
    store_url = pipeline.config.artifact_store
    return ArtifactStore(store_url).find_stored_result if store_url else lambda fingerprint: None


def check_store(pipeline: Pipeline) -> None:
    """Raise ConfigError if the artifact store of a pipeline refuses access, UploadError if it does not respond."""
    store_url = pipeline.config.artifact_store
    try:
        if store_url:
            ArtifactStore(store_url).check()
    except (ConfigError, UploadError) as error:
        raise type(error)(f"{pipeline.source_path}: pipeline.artifact_store = {store_url!r}: {error}") from error
