"""`result.json`: manifest of a finished stage with size and SHA-256 of each output, written last to mark it as done."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import JsonValue

from cosmos_core.config.load import without_none
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.run.files import (
    JsonDocument,
    apply_umask,
    copy_file,
    list_files_below,
    read_document,
    read_json_object,
    sha256,
    write_json,
)
from cosmos_core.types import Outcome

RESULT_FILE, METRICS_FILE = "result.json", "metrics.jsonl"
STORE_URL_KEY = "stored"
"""Key of a manifest with the URL of the artifact store that holds the outputs; local copies may be missing."""
Result = dict[str, Any]


class _OutputFile(JsonDocument):
    path: str
    size: int
    sha256: str
    mtime_ns: int
    inode: int


class _InputRecord(JsonDocument):
    fingerprint: str
    digest: str


class ExternalSource(JsonDocument):
    """External model or data set that a stage read."""

    kind: Literal["model", "data"]
    name: str
    """Path of the model or data set, or its id on the Hub."""
    digest: str
    """Digest of the content that the stage read, or the commit on the Hub."""


class _ManifestSchema(JsonDocument):
    """Schema of the required keys of `result.json`, the manifest of a stage."""

    name: str
    kind: str
    fingerprint: str
    metrics: dict[str, float]
    info: dict[str, JsonValue]
    inputs: dict[str, _InputRecord]
    outputs: list[_OutputFile]
    digest: str
    reused_from: str | None
    sources: list[ExternalSource] = []


def commit_manifest(
    stage_path: Path,
    stage_outcome: Outcome,
    *,
    kind: str,
    fingerprint: str,
    inputs: dict[str, Result],
    sources: Sequence[ExternalSource] = (),
) -> Result:
    """Write the manifest of a finished stage. Raise StageFailed if an output is missing, and ConfigError if an output
    is not below the folder of the stage, a metric is no number, or `stage_outcome.info` holds a value that JSON or TOML
    lacks."""
    name, outputs, metrics = stage_path.name, stage_outcome.outputs, dict(stage_outcome.metrics)
    outputs = (outputs,) if isinstance(outputs, str | Path) else tuple(outputs)  # user code may return a single path
    for key, value in metrics.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ConfigError(f"stage {name!r} returned the metric {key} = {value!r}; a metric is a number")
        metrics[key] = value if isinstance(value, int) else float(value)  # json cannot encode numbers of NumPy
    # Make the paths of model and data relative, so that they stay valid when another run adopts the outputs.
    info = stage_outcome.info
    absolute_paths = {key: str(info[key]) for key in ("model", "data") if os.path.isabs(str(info.get(key)))}
    info = info | {key: _find_relative_path(stage_path, path) or path for key, path in absolute_paths.items()}
    try:
        tomli_w.dumps(without_none(dict(info)))
        json.dumps(info)
    except TypeError as error:
        raise ConfigError(f"stage {name!r} returned info that cannot be kept: {error}; use TOML types") from error
    output_subpaths = [_find_relative_path(stage_path, output) for output in outputs]
    for output, relative_path in zip(outputs, output_subpaths, strict=True):
        if not relative_path:  # raise the error now, before links below any of the outputs are replaced
            raise ConfigError(f"stage {name!r} named the output {str(output)!r}, which is not below {stage_path}")
    for path_text in (text for key in ("model", "data") if isinstance(text := info.get(key), str) and text):
        # Other stages read this path with `stage:NAME`, so list it as an output even if the user's code does not.
        relative_path = _find_relative_path(stage_path, path_text)
        is_in_output = any(Path(relative_path).is_relative_to(each) for each in output_subpaths)
        if relative_path and not is_in_output and os.path.exists(stage_path / relative_path):
            output_subpaths = [each for each in output_subpaths if not Path(each).is_relative_to(relative_path)]
            output_subpaths.append(relative_path)
    output_records = []
    for relative_path in output_subpaths:
        output_path = stage_path / relative_path
        if not output_path.exists():
            raise StageFailed(f"stage {name!r} named the output {relative_path!r} but did not write it")
        _replace_folder_links(stage_path, output_path)
        output_records += [_make_file_record(stage_path, file) for file in list_files_below(output_path)]
    result = {
        "name": name,
        "kind": kind,
        "fingerprint": fingerprint,
        "created": time.time(),
        "metrics": metrics,
        "info": info,
        "inputs": {key: {"fingerprint": each["fingerprint"], "digest": each["digest"]} for key, each in inputs.items()},
        "sources": [source.model_dump() for source in sources],
        "outputs": output_records,
        "reused_from": None,
    }
    result["digest"] = compute_result_digest(result)
    write_json(stage_path / RESULT_FILE, result)
    return result


def compute_result_digest(result: Result) -> str:
    """Return one digest over everything in a result that later stages may read: files, info, and metrics except time
    and memory."""
    output_digest_lines = sorted(f"{file_record['path']}\0{file_record['sha256']}" for file_record in result["outputs"])
    ignored_metric_prefixes = ("time/", "throughput/", "memory/")
    metrics = {key: value for key, value in result["metrics"].items() if not key.startswith(ignored_metric_prefixes)}
    canonical_json = json.dumps([output_digest_lines, metrics, result["info"]], sort_keys=True)
    return hashlib.sha256(canonical_json.encode()).hexdigest()


def read_result(stage_path: Path) -> Result | None:
    """Return the manifest of a stage; None if the stage has not finished or its manifest is damaged."""
    file = stage_path / RESULT_FILE
    return read_json_object(file) if read_document(file, _ManifestSchema) else None


def find_output_damage(stage_path: Path, result: Result, *, ignores_cache: bool = False) -> str | None:
    """Return a description of the first damaged output of a finished stage, or None; outputs in an artifact store may
    be missing on this machine. A file of the recorded size is hashed again if its modification time or inode is not as
    recorded, or with `ignores_cache`; if its content is unchanged, its record is updated."""
    has_changed_records = False
    for file_record in result["outputs"]:
        file = stage_path / file_record["path"]
        try:
            file_stat = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            if result.get(STORE_URL_KEY):
                continue
            return f"{file_record['path']} is gone"
        if file_stat.st_size != file_record["size"]:
            return f"{file_record['path']} has {file_stat.st_size} bytes instead of {file_record['size']}"
        is_file_intact = file_stat.st_mtime_ns == file_record["mtime_ns"] and file_stat.st_ino == file_record["inode"]
        if is_file_intact and not ignores_cache:
            continue
        if sha256(file) != file_record["sha256"]:
            return f"{file_record['path']} was altered"
        if not is_file_intact:
            file_record.update(mtime_ns=file_stat.st_mtime_ns, inode=file_stat.st_ino)
            has_changed_records = True
    if compute_result_digest(result) != result["digest"]:
        return "result.json itself was altered"
    if has_changed_records:
        with suppress(OSError):  # a run on a read-only disk keeps its old records; its files are intact
            write_json(stage_path / RESULT_FILE, result)
    return None


def adopt_result(source_path: Path, target_path: Path, result: Result) -> Result:
    """Copy the outputs and metrics of the finished stage in `source_path` to `target_path`; write a manifest there."""
    # Remove folder links of an unfinished attempt, because outputs must not be copied through them.
    for folder_link in _list_folder_links(target_path):
        if folder_link != target_path:
            folder_link.unlink()
    for file_record in result["outputs"]:
        target_file = target_path / file_record["path"]
        if result.get(STORE_URL_KEY) and not (source_path / file_record["path"]).is_file():
            continue
        target_file.parent.mkdir(parents=True, exist_ok=True)
        target_file.unlink(missing_ok=True)
        copy_file(source_path / file_record["path"], target_file)
        file_stat = target_file.stat()
        file_record.update(mtime_ns=file_stat.st_mtime_ns, inode=file_stat.st_ino)
    (target_path / METRICS_FILE).unlink(missing_ok=True)  # remove the metrics of an unfinished attempt
    with suppress(FileNotFoundError):
        copy_file(source_path / METRICS_FILE, target_path / METRICS_FILE)
    adopted_result = {**result, "reused_from": str(source_path)}
    write_json(target_path / RESULT_FILE, adopted_result)
    return adopted_result


def _list_folder_links(path: Path) -> list[Path]:
    return [each for each in (path, *path.rglob("*")) if each.is_symlink() and each.is_dir()]


def _find_relative_path(stage_path: Path, output: str | Path) -> str:
    """Return the path of an output relative to the folder of its stage; empty if it is not below the folder."""
    relative_path = os.path.relpath(stage_path / output, stage_path)
    return "" if relative_path.split(os.sep)[0] in {os.curdir, os.pardir} else relative_path


def _replace_folder_links(stage_path: Path, output_path: Path) -> None:
    """Replace each link to a folder outside of the stage, at or below an output, by a folder with a link to each of its
    files: the files are then part of the output, and writes to the output do not change the other folder."""
    real_stage_path = stage_path.resolve()
    for folder_link in _list_folder_links(output_path):
        folder = folder_link.resolve()
        # Keep links into the stage, and links to a folder around the stage, whose listing would not end.
        if folder.is_relative_to(real_stage_path) or real_stage_path.is_relative_to(folder):
            continue
        folder_link.unlink()
        folder_link.mkdir()
        for file in list_files_below(folder):
            linked_file = folder_link / file.relative_to(folder)
            linked_file.parent.mkdir(parents=True, exist_ok=True)
            linked_file.symlink_to(file)


def _make_file_record(stage_path: Path, file: Path) -> dict[str, Any]:
    digest = sha256(file, fsync=True)
    if not file.is_symlink():  # a linked file is not in the stage: keep its permissions
        apply_umask(file)
    file_stat = file.stat()
    file_identity = {"mtime_ns": file_stat.st_mtime_ns, "inode": file_stat.st_ino}
    return {"path": str(file.relative_to(stage_path)), "size": file_stat.st_size, "sha256": digest, **file_identity}
