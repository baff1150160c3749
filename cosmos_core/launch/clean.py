"""Run `cosmos clean`: select runs that can be removed, and remove them.

A run is kept while it is running, while a kept run refers to it, and while its model is published. Any other run is
first moved out of the folder atomically, so that no other process sees an incomplete run.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.errors import CosmosError, UploadError
from cosmos_core.launch.processes import MAX_HEARTBEAT_AGE_SECONDS
from cosmos_core.observe.record import read_pipeline
from cosmos_core.run.directory import PIPELINE_FILE, list_attempt_folders, list_runs, read_start_info, write_run_list
from cosmos_core.run.files import SHARED_FOLDER, read_json_object
from cosmos_core.run.liveness import is_flow_running, read_open_approval
from cosmos_core.run.lock import FileLock
from cosmos_core.run.manifest import RESULT_FILE, read_result
from cosmos_core.run.process import is_alive
from cosmos_core.run.remote import DOWNLOADS_FOLDER, PARTIAL_DOWNLOAD_SUFFIX
from cosmos_core.run.state import ACTIVE_STATES, read_state
from cosmos_core.upload.base import PUBLICATION_FILE, open_target


@dataclass(frozen=True)
class RetentionDecision:
    """Decision whether `cosmos clean` keeps a run, with the age and size of the run."""

    path: Path
    pipeline: str
    age_seconds: float
    """Seconds since the last activity of the run."""
    size: int
    """Total size of the files of the run in bytes."""
    reason_to_keep: str
    """Reason to keep the run; an empty string if the run can be removed."""


def decide_retention(output_dir: Path, *, num_kept_runs: int, older_than_seconds: float) -> list[RetentionDecision]:
    """Return the decision for each run in a folder, the oldest run first, without changing anything. The newest
    `num_kept_runs` runs of each pipeline are kept, and runs with activity in the last `older_than_seconds`."""
    pipeline_by_run = {output_dir / start_info.run_id: start_info.pipeline for start_info in list_runs(output_dir)}
    run_paths_by_pipeline: dict[str, list[Path]] = {}
    for path, pipeline in pipeline_by_run.items():
        run_paths_by_pipeline.setdefault(pipeline, []).append(path)
    newest_runs_reason = f"one of the newest {num_kept_runs}" if num_kept_runs > 1 else "the newest"
    reasons_to_keep: dict[Path, str] = {}
    for paths in run_paths_by_pipeline.values() if num_kept_runs else ():
        reasons_to_keep |= dict.fromkeys(paths[-num_kept_runs:], f"{newest_runs_reason} of its pipeline")
    age_seconds_by_run = {path: max(0.0, time.time() - _find_last_activity_time(path)) for path in pipeline_by_run}
    for path, age_seconds in age_seconds_by_run.items():
        if age_seconds < older_than_seconds:
            reasons_to_keep.setdefault(path, "not old enough")
        if (approval := read_open_approval(path)) is not None and not approval.is_declined:
            reasons_to_keep[path] = "its publication waits for approval"
        try:
            if _may_run_be_active(path):
                reasons_to_keep[path] = "it is running"
        except PermissionError:  # the run belongs to another user
            reasons_to_keep[path] = "no permission to write it"
    for path, reason in _find_needed_runs(output_dir, list(pipeline_by_run)):
        reasons_to_keep.setdefault(path, reason)
    _keep_referenced_runs(list(pipeline_by_run), reasons_to_keep)
    return [
        RetentionDecision(
            path, pipeline, age_seconds_by_run[path], _compute_total_bytes(path), reasons_to_keep.get(path, "")
        )
        for path, pipeline in pipeline_by_run.items()
    ]


def remove_runs(output_dir: Path, decisions: Iterable[RetentionDecision]) -> Iterator[RetentionDecision]:
    """Remove the run of each decision without a reason to keep it, unless the run has started again meanwhile. Yield
    the decisions about the removed runs."""
    trash_folder = output_dir / SHARED_FOLDER / "removed"
    trash_folder.mkdir(parents=True, exist_ok=True)
    removed_run_ids = []
    for decision in decisions:
        if decision.reason_to_keep:
            continue
        with FileLock(decision.path / "locks" / ".run") as lock:
            if not lock.try_acquire() or _may_run_be_active(decision.path, is_run_lock_held=True):
                continue
            os.rename(decision.path, trash_folder / f"{decision.path.name}.{os.getpid()}")
        removed_run_ids.append(decision.path.name)
        yield decision
    _move_unused_downloads(output_dir, trash_folder)
    for folder in trash_folder.iterdir():  # also remove runs that an earlier, killed call left in the trash folder
        shutil.rmtree(folder, ignore_errors=True)
    _remove_run_records(output_dir, set(removed_run_ids))


def _move_unused_downloads(output_dir: Path, trash_folder: Path) -> None:
    """Move the downloads that no run uses to the trash folder; each retraining can have downloaded a model."""
    downloads_folder = output_dir / SHARED_FOLDER / DOWNLOADS_FOLDER
    for download_folder in filter(Path.is_dir, downloads_folder.glob("*")):
        download_id = download_folder.name.removesuffix(PARTIAL_DOWNLOAD_SUFFIX)
        with FileLock(downloads_folder / f"{download_id}.lock") as lock:
            if not lock.try_acquire():
                continue  # skip a download in progress: another process holds its lock
            # Read the pipelines under the lock: a run that starts later waits for it, and downloads the files again.
            pipeline_files = output_dir.glob(f"*/{PIPELINE_FILE}")
            if not any(download_id in file.read_text(encoding="utf-8", errors="replace") for file in pipeline_files):
                os.rename(download_folder, trash_folder / f"{download_folder.name}.{os.getpid()}")


def _find_last_activity_time(run_path: Path) -> float:
    """Return the time of the last activity of a run: its start, or the last heartbeat or end of a stage."""
    stage_states = [read_state(stage_path) for stage_path in (run_path / "stages").glob("*")]
    start_info = read_start_info(run_path)
    activity_times = [timestamp for state in stage_states for timestamp in (state.ended, state.heartbeat) if timestamp]
    return max([start_info.started if start_info else 0.0, *activity_times]) or run_path.stat().st_mtime


def _may_run_be_active(run_path: Path, *, is_run_lock_held: bool = False) -> bool:
    """Return True if a process on this machine holds the lock of the run or of a stage, if a process on another machine
    may run a stage, or if a Python flow executes the run. `is_run_lock_held`: the caller holds the lock of the run."""
    if is_flow_running(run_path):
        return True
    lock_files = [*(run_path / "locks").glob("*.lock"), *([] if is_run_lock_held else [run_path / "locks" / ".run"])]
    for lock_file in filter(Path.exists, lock_files):
        with FileLock(lock_file) as lock:
            if not lock.try_acquire():
                return True
    for stage_path in (run_path / "stages").glob("*"):
        stage_state = read_state(stage_path)
        has_new_heartbeat = time.time() - stage_state.last_activity_time < MAX_HEARTBEAT_AGE_SECONDS
        if stage_state.state in ACTIVE_STATES and (
            has_new_heartbeat or is_alive(stage_state.launcher_pid, stage_state.launcher_started)
        ):
            return True
    return False


def _find_needed_runs(output_dir: Path, run_paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield each run that the next retraining continues, or whose model is published or may be published because its
    publication target cannot be read; yield also the reason to keep the run."""
    for state_file in sorted((output_dir / SHARED_FOLDER / "retraining").glob("*.json")):
        retrain_state = read_json_object(state_file)
        if not retrain_state.get("outcome"):
            yield output_dir / str(retrain_state.get("run_id")), "the next retraining goes on with it"
    for target, published_runs in find_publication_targets(run_paths).items():
        try:
            published_records = _read_published_records(target)
        except (CosmosError, OSError) as error:
            yield from ((path, f"{target} cannot be asked what is published: {error}") for path in published_runs)
            continue
        for path in published_runs:
            if any(str(record.get("run_id")) == path.name for record in published_records):
                yield path, f"its model is published at {target}"


def find_publication_targets(run_paths: list[Path]) -> dict[str, list[Path]]:
    """Return the publication targets to which models were published, each with the runs that published there. A new
    attempt of an upload stage removes the result of the stage, so the record of the publication counts as well."""
    runs_by_target: dict[str, list[Path]] = {}
    for path in run_paths:
        for stage_table in (each for each in read_pipeline(path).get("stages", ()) if isinstance(each, dict)):
            target_url, stage_name = stage_table.get("target"), str(stage_table.get("name"))
            result, stage_folders = read_result(path / "stages" / stage_name), list_attempt_folders(path, stage_name)
            has_published_model = result is not None and "published" in result["info"]
            has_published_model |= any((folder / PUBLICATION_FILE).is_file() for folder in stage_folders)
            if isinstance(target_url, str) and target_url and has_published_model:
                runs_by_target.setdefault(target_url, []).append(path)
    return runs_by_target


def _read_published_records(target_url: str) -> list[dict[str, Any]]:
    """Return the records of the published version of a target and of the version to which a rollback would return.
    Raise UploadError if the target has no published version although runs have published to it: its disk may not be
    mounted, or this shell may lack the credentials."""
    publication_target: Any = open_target(target_url)
    if (current_record := publication_target.published()) is None:
        raise UploadError("it has no published version; mount its disk, or set its credentials")
    published_records = [current_record]
    has_version_history = hasattr(publication_target, "history") and hasattr(publication_target, "record_of")
    if has_version_history and len(version_names := publication_target.history()) > 1:
        with suppress(CosmosError):
            published_records.append(publication_target.record_of(version_names[-2]))
    return published_records


def _keep_referenced_runs(run_paths: list[Path], reasons_to_keep: dict[Path, str]) -> None:
    """Add to `reasons_to_keep` the runs to which settings and manifests of kept runs refer, directly or indirectly."""
    unvisited_run_paths = [path for path in run_paths if path in reasons_to_keep]
    while unvisited_run_paths:
        kept_run_path = unvisited_run_paths.pop()
        file_patterns = ("run.json", PIPELINE_FILE, f"stages/*/{RESULT_FILE}", "stages/*/stage.toml")
        settings_files = [file for pattern in file_patterns for file in kept_run_path.glob(pattern) if file.is_file()]
        run_settings_text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in settings_files)
        for path in [path for path in run_paths if path not in reasons_to_keep]:
            path_prefixes = {f"{path}/", f"{path.resolve()}/"}
            # Search also for the path with JSON's escape sequences, because manifests are JSON files.
            searched_path_prefixes = path_prefixes | {json.dumps(prefix)[1:-1] for prefix in path_prefixes}
            if any(escaped_prefix in run_settings_text for escaped_prefix in searched_path_prefixes):
                reasons_to_keep[path] = f"run {kept_run_path.name} refers to it"
                unvisited_run_paths.append(path)


def _remove_run_records(output_dir: Path, removed_run_ids: set[str]) -> None:
    run_id_reader_by_pattern: dict[str, Callable[[Path], Any]] = {
        "fingerprints/*/*.json": lambda file: str(read_json_object(file).get("stage", "")).partition("/")[0],
        "flow_runs/*": lambda file: file.read_text(encoding="utf-8", errors="replace"),
        "retraining/*/*.json": lambda file: read_json_object(file).get("run_id"),
    }
    for pattern, read_run_id in run_id_reader_by_pattern.items():
        for file in filter(Path.is_file, (output_dir / SHARED_FOLDER).glob(pattern)):
            if read_run_id(file) in removed_run_ids:
                file.unlink(missing_ok=True)
    write_run_list(output_dir)


def _compute_total_bytes(run_path: Path) -> int:
    total_bytes = 0
    for file in (Path(folder, name) for folder, _, names in os.walk(run_path) for name in names):
        with suppress(OSError):
            total_bytes += file.lstat().st_size
    return total_bytes
