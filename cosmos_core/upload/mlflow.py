"""Publication target `mlflow`: a registered model of MLflow, `mlflow://MODEL`.

A version is an MLflow run with the files of the model as artifacts, and a version of the registered model with lineage
as tags; the pointer is the alias `published`. MLflow keeps no digests, so stored files are compared by size. A training
cannot start from a version that is stored in MLflow.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError, DamagedRecord, UploadError
from cosmos_core.run.hub import call_with_timeout
from cosmos_core.run.mlflow import RUN_KEY_TAG, get_or_create_run, open_client, sanitize_metric_name
from cosmos_core.upload.base import RECORD_FILE, append_version, is_publication_record

PUBLISHED_ALIAS = "published"
VERSION_TAG = "cosmos.version"
_PUBLISHED_VERSIONS_TAG = "cosmos.history"
_CHECK_TIMEOUT_SECONDS = 8.0


class MlflowTarget:
    """Publication target that stores versions of one registered model of MLflow."""

    def __init__(self, location: str) -> None:
        if not location or set(location) & set("/:'`"):
            raise ConfigError(f"mlflow://{location} names no registered model; write mlflow://MODEL")
        self.name = location
        self._check_cancellation: Callable[[], None] = lambda: None

    @cached_property
    def client(self) -> Any:
        """Return the client of MLflow; raise ConfigError if MLflow is not installed."""
        return open_client()

    def check(self) -> None:
        """Check that the MLflow server responds. Raise ConfigError if MLflow is not installed or the server refuses the
        credentials, and UploadError for other errors of the server."""
        with self._translate_errors():
            call_with_timeout(_CHECK_TIMEOUT_SECONDS, self._find_registered_model)

    def prepare_upload(self, folder: Path, check_cancellation: Callable[[], None]) -> None:
        """Set the function `check_cancellation`, which is called before a file is sent or a version is created; the
        function can raise an error to end the publication. No journal is kept in `folder`, because stored files are not
        sent again."""
        self._check_cancellation = check_cancellation

    def published(self) -> dict[str, Any] | None:
        with self._translate_errors():
            current_version = self._find_current_version()
        return None if current_version is None else self.record_of(current_version.tags.get(VERSION_TAG, ""))

    def record_of(self, version: str) -> dict[str, Any]:
        """Return the publication record of the model version `version`; raise DamagedRecord if the record is missing
        or damaged."""
        with self._translate_errors():
            model_version = self._find_version(version)
            if record := self._read_record(model_version.run_id, model_version.source) if model_version else None:
                return record
        raise DamagedRecord(f"mlflow://{self.name}: {RECORD_FILE} of {version} is missing or damaged; publish again")

    def history(self) -> list[str]:
        """Return the model versions to which the alias `published` has pointed, the current version last."""
        with self._translate_errors():
            current_version, registered_model = self._find_current_version(), self._find_registered_model()
            names = json.loads(registered_model.tags.get(_PUBLISHED_VERSIONS_TAG, "[]")) if registered_model else []
        return append_version(names, current_version.tags.get(VERSION_TAG, "")) if current_version else []

    def versions(self) -> list[str]:
        """Return the names of all published versions of the registered model, the oldest first."""
        with self._translate_errors():
            tags_by_version = [each.tags for each in self._find_versions()]
        return list(dict.fromkeys(each[VERSION_TAG] for each in tags_by_version if VERSION_TAG in each))

    def where(self, version: str) -> str:
        """Return the address of a version, `mlflow://MODEL@NUMBER`, with the number that MLflow gave to the version."""
        with self._translate_errors():
            model_version = self._find_version(version)
        return f"mlflow://{self.name}@{model_version.version if model_version else version}"

    def damage(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        """Compare the stored files of a version with `record` and `folder`. Return a message about the first file of
        `record` that is missing or has another size or digest; empty if all files agree."""
        with self._translate_errors():
            model_version = self._find_version(version)
            if model_version:
                return self._find_damaged_file(model_version, folder, record)
        return f"the version {version} is missing"

    def point_to(self, version: str, history: list[str] | None = None) -> None:
        """Move the alias `published` to a stored model version, and save the list of versions to which the alias has
        pointed: `history`, or the list saved before if `history` is None, with `version` appended. Raise UploadError if
        the registered model has no such version."""
        with self._translate_errors():
            if not (model_version := self._find_version(version)):
                raise UploadError(f"mlflow://{self.name} has no version {version!r}; the alias was not moved")
            new_history = append_version(self.history(), version, history)
            self._move_alias(model_version, new_history, is_rollback=history is not None)

    def publish(self, folder: Path, version: str, record: dict[str, Any]) -> str:
        with self._translate_errors():
            lineage_tags = {f"cosmos.input.{name}": digest for name, digest in record.get("inputs", {}).items()}
            lineage_tags |= {"cosmos.run": str(record.get("run_id", "")), "cosmos.stage": str(record.get("stage", ""))}
            # The key contains a digest of the files, so that other weights of a forced rerun become a new version.
            tags = lineage_tags | {VERSION_TAG: version, RUN_KEY_TAG: f"{version}-{_get_artifact_folder(record)}"}
            mlflow_run = get_or_create_run(self.client, self.name, tags[RUN_KEY_TAG], version, lineage_tags)
            self._send_files(mlflow_run, folder, record)
            self._check_cancellation()
            if self._find_registered_model() is None:
                self.client.create_registered_model(self.name)
            if not self._find_versions(RUN_KEY_TAG, tags[RUN_KEY_TAG]):
                artifact_uri = f"{mlflow_run.info.artifact_uri}/{_get_artifact_folder(record)}"
                self.client.create_model_version(self.name, artifact_uri, run_id=mlflow_run.info.run_id, tags=tags)
            model_version, *duplicate_versions = self._find_versions(RUN_KEY_TAG, tags[RUN_KEY_TAG])
            for duplicate in duplicate_versions:  # delete versions that repeated requests created after a lost response
                self.client.delete_model_version(self.name, duplicate.version)
            if damage_message := self._find_damaged_file(model_version, folder, record):
                raise UploadError(f"mlflow://{self.name}: {damage_message} after the upload; the alias was not moved")
            self._move_alias(model_version, append_version(self.history(), version))
        return f"mlflow://{self.name}@{model_version.version}"

    def _send_files(self, mlflow_run: Any, folder: Path, record: dict[str, Any]) -> None:
        """Send the files of `folder` that an MLflow run lacks, then the record, then the metrics of the record."""
        from mlflow.entities import Metric

        run_id, artifact_folder = mlflow_run.info.run_id, _get_artifact_folder(record)
        artifact_sizes = self._list_artifact_sizes(run_id)
        for name in record["files"]:
            self._check_cancellation()
            if artifact_sizes.get(f"{artifact_folder}/{name}") != (folder / name).stat().st_size:
                self.client.log_artifact(run_id, str(folder / name), str(Path(artifact_folder, name).parent))
        if self._read_record(run_id, f"{mlflow_run.info.artifact_uri}/{artifact_folder}") != record:
            self.client.log_dict(run_id, record, f"{artifact_folder}/{RECORD_FILE}")
        logged_metrics, start_time = mlflow_run.data.metrics, mlflow_run.info.start_time
        metrics = {sanitize_metric_name(name): value for name, value in record["metrics"].items()}
        if new_metrics := [Metric(k, v, start_time, 0) for k, v in metrics.items() if k not in logged_metrics]:
            self.client.log_batch(run_id, metrics=new_metrics)
        self.client.set_terminated(run_id)

    def _find_damaged_file(self, model_version: Any, folder: Path, record: dict[str, Any]) -> str:
        stored_record = self._read_record(model_version.run_id, model_version.source) or {"files": {}}
        artifact_sizes = self._list_artifact_sizes(model_version.run_id)
        for name, digest in record["files"].items():
            artifact_size = artifact_sizes.get(f"{_get_artifact_folder(stored_record)}/{name}")
            if stored_record["files"].get(name) != digest or artifact_size != (folder / name).stat().st_size:
                return f"{name} is missing or altered"
        return ""

    def _move_alias(self, model_version: Any, history: list[str], *, is_rollback: bool = False) -> None:
        """Move the alias `published`, then save the history of published versions. A rollback saves the history first:
        if only the alias were moved before an interruption, the rollback would look like a publication, and a second
        rollback would undo the first."""
        alias_steps = [
            partial(self.client.set_registered_model_alias, self.name, PUBLISHED_ALIAS, model_version.version),
            partial(self.client.set_registered_model_tag, self.name, _PUBLISHED_VERSIONS_TAG, json.dumps(history)),
        ]
        for step in reversed(alias_steps) if is_rollback else alias_steps:
            step()

    def _read_record(self, run_id: str, artifact_uri: str) -> dict[str, Any] | None:
        """Return the record of a published version from the folder `artifact_uri` of an MLflow run; None if the record
        is missing or damaged. Raise the error of MLflow if it cannot be read."""
        from mlflow.artifacts import load_dict
        from mlflow.exceptions import MlflowException

        try:
            record = load_dict(f"{artifact_uri}/{RECORD_FILE}")
        except (MlflowException, OSError) as error:
            is_invalid_json = isinstance(error.__cause__, ValueError) and not isinstance(error.__cause__, OSError)
            folder = artifact_uri.rpartition("/")[2]
            if is_invalid_json or f"{folder}/{RECORD_FILE}" not in self._list_artifact_sizes(run_id, folder):
                return None
            raise
        return record if is_publication_record(record) else None

    def _list_artifact_sizes(self, run_id: str, artifact_path: str | None = None) -> dict[str, int]:
        artifact_size_by_path: dict[str, int] = {}
        # Replace a size of None by 0, because MLflow reports the size of an empty file as None.
        for each in self.client.list_artifacts(run_id, artifact_path):
            file_sizes = (
                self._list_artifact_sizes(run_id, each.path) if each.is_dir else {each.path: each.file_size or 0}
            )
            artifact_size_by_path |= file_sizes
        return artifact_size_by_path

    def _find_registered_model(self) -> Any:
        return next(iter(self.client.search_registered_models(f"name = '{self.name}'")), None)

    def _find_versions(self, tag_name: str = "", tag_value: str = "") -> list[Any]:
        """Return the versions of the model with this value of a tag, or all if `tag_name` is empty; oldest first."""
        search_filter, model_versions, page_token = f"name = '{self.name}'", [], None
        search_filter += f" and tags.`{tag_name}` = '{tag_value}'" if tag_name else ""
        while page_token != "":
            versions_of_page = self.client.search_model_versions(search_filter, max_results=200, page_token=page_token)
            model_versions += versions_of_page
            page_token = versions_of_page.token or ""
        return sorted(model_versions, key=lambda model_version: int(model_version.version))

    def _find_current_version(self) -> Any:
        """Return the version of the model that has the alias `published`; None if there is none."""
        registered_model = self._find_registered_model()
        version_number = registered_model.aliases.get(PUBLISHED_ALIAS) if registered_model else None
        return self.client.get_model_version(self.name, version_number) if version_number else None

    def _find_version(self, version: str) -> Any:
        """Return the version of the registered model that was published as `version`; of several, the one with the
        alias `published`, else the newest. None if there is none."""
        current_version = self._find_current_version()
        if current_version is not None and current_version.tags.get(VERSION_TAG) == version:
            return current_version
        return next(reversed(self._find_versions(VERSION_TAG, version)), None)

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Convert errors of the MLflow client in the `with` block into errors of one line: ConfigError if the server
        refuses the credentials, otherwise UploadError."""
        assert self.client is not None  # the property raises ConfigError if MLflow is not installed
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, OSError, Boto3Error, BotoCoreError, ClientError) as error:  # MLflow may store in S3
            is_access_refused = getattr(error, "get_http_status_code", lambda: 0)() in {401, 403}
            error_message = f"mlflow://{self.name}: {' '.join(str(error).split())}"
            raise (ConfigError if is_access_refused else UploadError)(error_message) from error


def _get_artifact_folder(record: dict[str, Any]) -> str:
    """Return the name of the artifact folder for the files of a record, which depends on the digests of the files."""
    return f"model-{hashlib.sha256(json.dumps(record['files'], sort_keys=True).encode()).hexdigest()[:12]}"
