"""`cosmos clean`: which runs may go, and their removal.

A run stays while it runs, while something that stays refers to it, and while what it published is published. A run that
is removed is first moved out of the folder in one rename, so that nobody ever sees half a run.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmos_core.config.load import read_toml
from cosmos_core.errors import ConfigError, CosmosError
from cosmos_core.launch.processes import SILENT_SECONDS
from cosmos_core.run.directory import PIPELINE, list_runs, read_facts, runs_in
from cosmos_core.run.files import SHARED, read_object
from cosmos_core.run.lock import Lock
from cosmos_core.run.manifest import RESULT, read_result
from cosmos_core.run.process import is_alive
from cosmos_core.run.remote import FETCHED, PARTIAL
from cosmos_core.run.state import ACTIVE, read_state
from cosmos_core.upload.base import open_target

_REMOVED = "removed"
_READ_BY_PEOPLE = ("run.json", PIPELINE)


@dataclass(frozen=True)
class Verdict:
    """What is to become of a run."""

    path: Path
    pipeline: str
    age_seconds: float
    """Since it last did something."""
    size: int
    """Bytes of its files."""
    kept_because: str
    """Empty: it may go."""


def verdicts(output_dir: Path, *, keep: int, older_than_seconds: float) -> list[Verdict]:
    """Return what is to become of each run in a folder, the oldest first; nothing is touched.

    The newest `keep` runs of each pipeline stay, and those that did something in the last `older_than_seconds`.
    """
    facts = {output_dir / each.run_id: each for each in runs_in(output_dir)}
    reasons: dict[Path, str] = {}
    newest: dict[str, list[Path]] = {}
    for path in facts:
        newest.setdefault(facts[path].pipeline, []).append(path)
    for path in (path for paths in newest.values() for path in (paths[-keep:] if keep else [])):
        reasons[path] = f"one of the newest {keep} of its pipeline" if keep > 1 else "the newest of its pipeline"
    ages = {path: max(0.0, time.time() - _last_sign(path)) for path in facts}
    for path, age in ages.items():
        if age < older_than_seconds:
            reasons.setdefault(path, "not old enough")
        if _may_run(path):
            reasons[path] = "it is running"
    for path, why in _continued_or_published(output_dir, list(facts)):
        reasons.setdefault(path, why)
    _keep_what_is_referred_to(list(facts), reasons)
    return [
        Verdict(path, facts[path].pipeline, ages[path], _size(path), reasons.get(path, ""))
        for path in facts
    ]  # fmt: skip


def remove(output_dir: Path, found: Iterable[Verdict]) -> Iterator[Verdict]:
    """Remove the runs that may go; yield each that is gone. One that was begun to be run meanwhile stays."""
    aside = output_dir / SHARED / _REMOVED
    aside.mkdir(parents=True, exist_ok=True)
    gone = []
    for verdict in found:
        if verdict.kept_because:
            continue
        with Lock(verdict.path / "locks" / ".run") as lock:
            if not lock.try_acquire() or _may_run(verdict.path, is_claimed=True):
                continue
            os.rename(verdict.path, aside / f"{verdict.path.name}.{os.getpid()}")
        gone.append(verdict.path.name)
        yield verdict
    _put_aside_fetched(output_dir, aside)
    for folder in aside.iterdir():  # of earlier calls that were killed too
        shutil.rmtree(folder, ignore_errors=True)
    _forget(output_dir, set(gone))


def _put_aside_fetched(output_dir: Path, aside: Path) -> None:
    """Move away what was fetched from stores and no run that is left names: each retraining may fetch another model."""
    fetched = output_dir / SHARED / FETCHED
    for folder in fetched.iterdir() if fetched.is_dir() else ():
        if not folder.is_dir():
            continue
        digest = folder.name.removesuffix(PARTIAL)
        with Lock(fetched / f"{digest}.lock") as lock:
            if not lock.try_acquire():
                continue  # it is fetched now
            pipelines = output_dir.glob(f"*/{PIPELINE}")  # looked at now: a run that begins later fetches it anew
            if not any(digest in file.read_text(encoding="utf-8", errors="replace") for file in pipelines):
                os.rename(folder, aside / f"{folder.name}.{os.getpid()}")


def _last_sign(path: Path) -> float:
    """When a run was begun, or a stage of it last said something."""
    states = [read_state(stage) for stage in (path / "stages").glob("*")]
    facts = read_facts(path)
    said = [moment for state in states for moment in (state.ended, state.heartbeat) if moment]
    return max([facts.started if facts else 0.0, *said]) or path.stat().st_mtime


def _may_run(path: Path, *, is_claimed: bool = False) -> bool:
    """Whether a process of this machine has the run or one of its stages, or another machine may have."""
    files = [*(path / "locks").glob("*.lock"), *([] if is_claimed else [path / "locks" / ".run"])]
    for file in files:
        if not file.exists():
            continue
        with Lock(file) as lock:
            if not lock.try_acquire():
                return True
    for stage in (path / "stages").glob("*"):
        state = read_state(stage)
        is_recent = time.time() - (state.heartbeat or 0.0) < SILENT_SECONDS
        if state.state in ACTIVE and (is_recent or is_alive(state.launcher_pid, state.launcher_started)):
            return True
    return False


def _continued_or_published(output_dir: Path, paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """Yield runs that the next retraining goes on with, and those whose model is published now."""
    for note in sorted((output_dir / SHARED / "retraining").glob("*.json")):
        seen = read_object(note)
        if not seen.get("outcome"):
            yield output_dir / str(seen.get("run_id")), "the next retraining goes on with it"
    for target, published in _targets(paths).items():
        try:
            current = _versions(target)
        except (CosmosError, OSError) as error:
            yield from ((path, f"{target} cannot be asked what is published: {error}") for path in published)
            continue
        for path in published:
            if any(str(record.get("run_id")) == path.name for record in current):
                yield path, f"its model is published at {target}"


def _targets(paths: list[Path]) -> dict[str, list[Path]]:
    """Return where models were published, with the runs that did."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        for stage in _stages_of(path):
            target = stage.get("target")
            result = read_result(path / "stages" / str(stage.get("name")))
            if isinstance(target, str) and target and result is not None and "published" in result["info"]:
                found.setdefault(target, []).append(path)
    return found


def _versions(target: str) -> list[dict[str, Any]]:
    """Return the records of what is published and of what a rollback would go back to."""
    opened: Any = open_target(target)
    records = [opened.published() or {}]
    history = getattr(opened, "history", None)
    if history is not None and len(names := history()) > 1:
        with suppress(CosmosError):
            records.append(opened.record_of(names[-2]))
    return records


def _stages_of(path: Path) -> list[dict[str, Any]]:
    try:
        stages = read_toml(path / PIPELINE).get("pipeline", {}).get("stages", [])
    except (ConfigError, AttributeError):
        return []
    return [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []


def _keep_what_is_referred_to(paths: list[Path], reasons: dict[Path, str]) -> None:
    """Keep, run after run, what the settings and manifests of those that stay name."""
    waiting = [path for path in paths if path in reasons]
    while waiting:
        keeper = waiting.pop()
        files = [keeper / name for name in _READ_BY_PEOPLE]
        files += [*keeper.glob(f"stages/*/{RESULT}"), *keeper.glob("stages/*/stage.toml")]
        text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
        for path in paths:
            if path not in reasons and path != keeper and any(name in text for name in _spellings(path)):
                reasons[path] = f"run {keeper.name} refers to it"
                waiting.append(path)


def _spellings(path: Path) -> set[str]:
    """Return how a file below a folder may be named in TOML and JSON."""
    plain = {f"{path}/", f"{path.resolve()}/"}
    return plain | {json.dumps(name)[1:-1] for name in plain}


def _forget(output_dir: Path, gone: set[str]) -> None:
    """Remove what is noted of runs that are gone, beside them."""
    shared = output_dir / SHARED
    for entry in shared.glob("fingerprints/*/*.json"):
        if str(read_object(entry).get("stage", "")).partition("/")[0] in gone:
            entry.unlink(missing_ok=True)
    for note in shared.glob("flow_runs/*"):
        if note.is_file() and note.read_text(encoding="utf-8", errors="replace") in gone:
            note.unlink(missing_ok=True)
    for note in shared.glob("retraining/*/*.json"):
        if read_object(note).get("run_id") in gone:
            note.unlink(missing_ok=True)
    list_runs(output_dir)


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
