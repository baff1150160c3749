"""Read models and rows from an S3 store, `s3://BUCKET/KEY`: a run pins their content when it begins, and the stage that
reads them downloads them into a shared folder named after the content.

A pinned URL ends in `#DIGEST`, a digest over the names, sizes and ETags of the objects. `.../latest` of a model that
the stage kind `upload` has published is resolved to the version that its pointer names.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.inputs import is_s3_url
from cosmos_core.config.schema.field_metadata import ReferenceKind
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.config.schema.table import convert_references
from cosmos_core.errors import DataError
from cosmos_core.run.bucket import Bucket, StoredObject, split_s3_url, thread_map, translate_errors
from cosmos_core.run.content import is_outside_folder
from cosmos_core.run.files import SHARED_FOLDER, parse_json_objects
from cosmos_core.run.lock import FileLock

DOWNLOADS_FOLDER = "fetched"
"""Name of the folder, shared by all runs, with the downloads from S3 stores."""
PARTIAL_DOWNLOAD_SUFFIX = ".partial"
_MAX_PARALLEL_FILES = 8
_LATEST_FOLDER = "latest"
_URL_PIN_PATTERN = re.compile("#[0-9a-f]{64}$")


def pin_urls(pipeline: Pipeline) -> Pipeline:
    """Return the pipeline with the digest of the present content appended to every S3 URL. Raises `DataError` if there
    is no object at a URL or the S3 store is not reachable, and `ConfigError` if the store refuses the credentials."""
    pinned_urls: dict[str, str] = {}

    def pin_url(reference_kind: ReferenceKind, reference: str) -> str:
        if reference_kind is not ReferenceKind.PATH or not is_s3_url(reference) or _URL_PIN_PATTERN.search(reference):
            return reference
        if reference not in pinned_urls:
            pinned_urls[reference] = append_content_digest(reference)
        return pinned_urls[reference]

    stages = [convert_references(stage, pin_url) for stage in pipeline.stages]
    recipes = {name: convert_references(recipe, pin_url) for name, recipe in pipeline.recipes.items()}
    return pipeline.with_stages(stages, recipes) if pinned_urls else pipeline


def append_content_digest(url: str) -> str:
    """Return the URL of an object or prefix in a store with a digest of its present content appended, `URL#DIGEST`."""
    with translate_errors(url, DataError):
        url = _resolve_latest_pointer(url)
        return f"{url}#{_compute_content_digest(url, _list_objects(url))}"


def download_inputs(
    pipeline: Pipeline, stage: StageConfig, output_dir: Path, on_file_start: Callable[[], None]
) -> tuple[StageConfig, Recipe]:
    """Download the inputs of a stage from S3 stores to the shared folder of the runs in `output_dir`, and return the
    stage and its recipe with local paths in place of URLs. `on_file_start` is called before each file and can raise an
    error. Raises `DataError` if the content has changed since it was pinned or the store is not reachable, and
    `ConfigError` if the store refuses the credentials."""
    recipe = pipeline.recipes[stage.name]
    input_urls = {
        stage_input.location for stage_input in pipeline.inputs(stage) if stage_input.location_type == "store"
    }
    if not input_urls:
        return stage, recipe
    downloads_folder = output_dir.expanduser().absolute() / SHARED_FOLDER / DOWNLOADS_FOLDER
    local_path_by_url = {
        url: str(download_pinned_url(url, downloads_folder, on_file_start)) for url in sorted(input_urls)
    }

    def to_local_path(reference_kind: ReferenceKind, reference: str) -> str:
        return local_path_by_url.get(reference, reference)

    return convert_references(stage, to_local_path), convert_references(recipe, to_local_path)


def download_url(location: str, output_dir: Path) -> str:
    """Download the present content of an S3 URL to the shared folder of the runs in `output_dir`, and return its local
    path; return any other name unchanged. For errors see `download_inputs`."""
    downloads_folder = output_dir.expanduser().absolute() / SHARED_FOLDER / DOWNLOADS_FOLDER
    return str(download_pinned_url(location, downloads_folder)) if is_s3_url(location) else location


def download_pinned_url(url: str, downloads_folder: Path, on_file_start: Callable[[], None] = lambda: None) -> Path:
    """Return the file or folder below `downloads_folder` with the content of an S3 URL, after downloading the missing
    objects. Without a digest in the URL, its present content is used. For errors see `download_inputs`."""
    pinned_url = url if _URL_PIN_PATTERN.search(url) else append_content_digest(url)
    unpinned_url, _, digest = pinned_url.rpartition("#")
    download_folder = downloads_folder / digest
    object_name = split_s3_url(unpinned_url)[1].rpartition("/")[2]
    partial_folder = download_folder.with_name(download_folder.name + PARTIAL_DOWNLOAD_SUFFIX)
    with FileLock(downloads_folder / f"{download_folder.name}.lock") as lock:
        lock.acquire(on_poll=on_file_start)
        if not download_folder.is_dir():
            with translate_errors(unpinned_url, DataError):
                stored_objects = _list_objects(unpinned_url)
                if _compute_content_digest(unpinned_url, stored_objects) != download_folder.name:
                    raise DataError(f"{unpinned_url} was changed since the run began; start a new run")
                _download_objects(unpinned_url, stored_objects, partial_folder, on_file_start)
            os.rename(partial_folder, download_folder)
    downloaded_file = download_folder / object_name
    downloaded_names = [path.name for path in download_folder.iterdir() if not path.match(".*.tmp")]
    return downloaded_file if downloaded_names == [object_name] and downloaded_file.is_file() else download_folder


def _resolve_latest_pointer(url: str) -> str:
    """Return the URL of the version that a `latest` pointer names; return any other URL unchanged."""
    parent_url, _, last_url_part = url.rstrip("/").rpartition("/")
    if last_url_part != _LATEST_FOLDER:
        return url.rstrip("/")
    bucket_name, key_prefix = split_s3_url(parent_url)
    latest_pointer_bytes = Bucket(bucket_name).read(f"{key_prefix}/{_LATEST_FOLDER}.json".lstrip("/"))
    if latest_pointer_bytes is None:
        return url.rstrip("/")
    [latest_pointer] = parse_json_objects([latest_pointer_bytes.decode(errors="replace")]) or [{}]
    latest_version_name = latest_pointer.get("version")
    if not latest_version_name or not isinstance(latest_version_name, str):
        raise DataError(f"{parent_url}/{_LATEST_FOLDER}.json is damaged; publish again, or name a version")
    return f"{parent_url}/{latest_version_name}"


def _list_objects(url: str) -> list[StoredObject]:
    bucket_name, prefix = split_s3_url(url)
    folder_prefix = f"{prefix}/".lstrip("/")  # an empty prefix remains empty, so that it selects the whole bucket
    # Ignore the empty objects that some tools create for folders, with keys that end with a slash.
    objects_with_prefix = [each for each in Bucket(bucket_name).list_objects(prefix) if not each.key.endswith("/")]
    stored_objects = [each for each in objects_with_prefix if each.key == prefix or each.key.startswith(folder_prefix)]
    if not stored_objects:
        raise DataError(f"{url}: nothing lies there; give an object, or what several begin with up to a '/'")
    return stored_objects


def _compute_content_digest(url: str, stored_objects: list[StoredObject]) -> str:
    object_lines = sorted(f"{_get_relative_path(url, each)}\0{each.size}\0{each.etag}" for each in stored_objects)
    return hashlib.sha256(json.dumps(object_lines).encode()).hexdigest()


def _get_relative_path(url: str, stored_object: StoredObject) -> str:
    key_prefix = split_s3_url(url)[1]
    return stored_object.key.removeprefix(key_prefix).lstrip("/") or key_prefix.rpartition("/")[2]


def _download_objects(url: str, objects: list[StoredObject], folder: Path, on_file_start: Callable[[], None]) -> None:
    if outside_key := next((each.key for each in objects if is_outside_folder(_get_relative_path(url, each))), None):
        raise DataError(f"{url}: the object {outside_key!r} would lie outside of its folder; name it otherwise there")
    bucket = Bucket(split_s3_url(url)[0])
    folder.mkdir(parents=True, exist_ok=True)
    for temporary_file in folder.rglob(".*.tmp"):  # remove files of killed processes, as the caller holds the lock
        temporary_file.unlink()
    files = [(each, folder / _get_relative_path(url, each)) for each in objects]
    missing_objects = [(each, path) for each, path in files if not path.is_file() or path.stat().st_size != each.size]
    total_bytes = sum(each.size for each, _ in missing_objects)
    if total_bytes > shutil.disk_usage(folder).free:
        raise DataError(f"{url} has {total_bytes} bytes, more than are free in {folder.parent}; make room")

    def download(stored_object: StoredObject, path: Path) -> None:
        on_file_start()
        bucket.download(stored_object.key, path, stored_object.etag)

    thread_map(download, missing_objects, _MAX_PARALLEL_FILES, "fetch")
