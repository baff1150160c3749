"""`result.json`: the commit mark of a stage. It names every output with size and sha256, and is written last."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import tomli_w

from cosmos_core.config.load import without_none
from cosmos_core.errors import ConfigError, StageFailed
from cosmos_core.run.files import files_below, read_json, sha256, write_json
from cosmos_core.types import Outcome

RESULT = "result.json"
Result = dict[str, Any]
_KEYS = {"name", "kind", "fingerprint", "metrics", "info", "inputs", "outputs", "digest", "reused_from"}
_RECORD_KEYS = {"path", "size", "sha256", "mtime_ns", "inode"}


def commit(
    stage_path: Path, outcome: Outcome, *, name: str, kind: str, fingerprint: str, inputs: dict[str, Result]
) -> Result:
    """Write the manifest of a finished stage.

    Raises:
        StageFailed: an output that the program named is not there.
        ConfigError: a metric is no number, or `info` holds what TOML cannot say: other stages read both.
    """
    _check_outcome(outcome, name)
    files = []
    for output in outcome.outputs:
        path = stage_path / output
        if not path.exists():
            raise StageFailed(f"stage {name!r} named the output {output!r} but did not write it")
        files += [_describe(stage_path, file) for file in files_below(path)]
    result = {
        "name": name,
        "kind": kind,
        "fingerprint": fingerprint,
        "created": time.time(),
        "metrics": outcome.metrics,
        "info": outcome.info,
        "inputs": {
            key: {"fingerprint": value["fingerprint"], "digest": value["digest"]} for key, value in inputs.items()
        },
        "outputs": files,
        "reused_from": None,
    }
    result["digest"] = digest_of(result)
    write_json(stage_path / RESULT, result)
    return result


def digest_of(result: Result) -> str:
    """Return one digest over all that later stages may read: files, metrics (but not how long things took) and info."""
    files = sorted(f"{file['path']}\0{file['sha256']}" for file in result["outputs"])
    metrics = {key: value for key, value in result["metrics"].items() if not key.startswith(("time/", "throughput/"))}
    text = json.dumps([files, metrics, result["info"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_outcome(outcome: Outcome, name: str) -> None:
    for key, value in outcome.metrics.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"stage {name!r} returned the metric {key} = {value!r}; a metric is a number")
    try:
        tomli_w.dumps(without_none(dict(outcome.info)))
    except TypeError as error:
        raise ConfigError(f"stage {name!r} returned info that cannot be kept: {error}; use TOML types") from error


def read_result(stage_path: Path) -> Result | None:
    """Return the manifest of a stage; None when it has not finished, or its manifest was damaged."""
    result = read_json(stage_path / RESULT)
    return result if isinstance(result, dict) and result.keys() >= _KEYS and _has_records(result["outputs"]) else None


def problem(stage_path: Path, result: Result, *, thorough: bool = False) -> str | None:
    """Return what is wrong with the outputs of a finished stage; None when they are what was committed.

    Size, modification time and inode as recorded are trusted (the last change of the inode is not recorded: each run
    that links to the file is one); when one differs, or when `thorough`, the content is hashed again. A file that was
    only touched or copied has its record renewed.
    """
    renewed = False
    for record in result["outputs"]:
        file = stage_path / record["path"]
        try:
            status = file.stat()
        except (FileNotFoundError, NotADirectoryError):
            return f"{record['path']} is gone"
        if status.st_size != record["size"]:
            return f"{record['path']} has {status.st_size} bytes instead of {record['size']}"
        is_as_recorded = status.st_mtime_ns == record["mtime_ns"] and status.st_ino == record["inode"]
        if is_as_recorded and not thorough:
            continue
        if sha256(file) != record["sha256"]:
            return f"{record['path']} was altered"
        if not is_as_recorded:
            record.update(mtime_ns=status.st_mtime_ns, inode=status.st_ino)
            renewed = True
    if digest_of(result) != result["digest"]:
        return "result.json itself was altered"
    if renewed:
        write_json(stage_path / RESULT, result)
    return None


def adopt(source: Path, target: Path, result: Result) -> Result:
    """Make `target` hold the outputs of the finished stage `source`: hard links, or copies across file systems.

    Deleting either run afterwards leaves the other whole.
    """
    for record in result["outputs"]:
        link = target / record["path"]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        try:
            os.link(source / record["path"], link)
        except OSError:
            shutil.copy2(source / record["path"], link)
        status = link.stat()
        record.update(mtime_ns=status.st_mtime_ns, inode=status.st_ino)
    adopted = {**result, "reused_from": str(source)}
    write_json(target / RESULT, adopted)
    return adopted


def _describe(stage_path: Path, file: Path) -> dict[str, Any]:
    digest = sha256(file, durable=True)
    status = file.stat()
    return {
        "path": str(file.relative_to(stage_path)),
        "size": status.st_size,
        "sha256": digest,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
    }


def _has_records(outputs: Any) -> bool:
    return isinstance(outputs, list) and all(isinstance(r, dict) and r.keys() >= _RECORD_KEYS for r in outputs)
