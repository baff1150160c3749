"""What a run would do with each stage: reuse it, take it from another run, or run it, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.run.digests import Digests
from cosmos_core.run.files import read_json, write_json
from cosmos_core.run.fingerprint import Fingerprint, fingerprint
from cosmos_core.run.manifest import Result, problem, read_result
from cosmos_core.types import StageKind

SHARED = ".cosmos"
FINGERPRINT = "fingerprint.json"


@dataclass(frozen=True)
class Decision:
    """`reuse`: done in this run. `adopt`: done in another. `run`: to be made. `depends`: on what runs before it."""

    action: Literal["reuse", "adopt", "run", "depends"]
    reason: str
    source: Path | None = None
    """Stage directory that is reused or adopted."""
    result: Result | None = None


def fingerprint_folder(output_dir: Path, value: str) -> Path:
    """Where finished stages with this fingerprint are listed, and locked while one is being made."""
    return output_dir / SHARED / "fingerprints" / value


def register(output_dir: Path, stage_path: Path, value: str) -> None:
    """List a finished stage under its fingerprint, for other runs to find."""
    folder = fingerprint_folder(output_dir, value)
    folder.mkdir(parents=True, exist_ok=True)
    place = stage_path.relative_to(output_dir)
    write_json(folder / f"{place.parts[0]}.{stage_path.name}.json", {"stage": str(place)})


def decide(
    output_dir: Path, stage_path: Path | None, print_: Fingerprint, *, is_reusable: bool = True, thorough: bool = False
) -> Decision:
    """What to do with a stage whose fingerprint is known; `stage_path` is None when the run does not exist yet."""
    if not is_reusable:
        return Decision("run", "looks at the outside world, so it runs each time")
    damage = ""
    if stage_path is not None:
        result = read_result(stage_path)
        if result is not None and result["fingerprint"] == print_.value:
            damage = problem(stage_path, result, thorough=thorough) or ""
            if not damage:
                return Decision("reuse", "done in this run", stage_path, result)
    for other in _finished(output_dir, print_.value):
        result = read_result(other)
        if other != stage_path and result is not None and result["fingerprint"] == print_.value:
            found = problem(other, result, thorough=thorough)
            if not found:
                return Decision("adopt", f"same fingerprint as {_run_of(other)}", other, result)
            damage = damage or f"{_run_of(other)}: {found}"
    if damage:
        return Decision("run", f"made before, but {damage}")
    return Decision("run", _why_new(output_dir, stage_path, print_))


def plan(
    pipeline: Pipeline,
    kinds: Mapping[str, StageKind],
    output_dir: Path,
    run_path: Path | None = None,
    *,
    thorough: bool = False,
) -> dict[str, Decision]:
    """A decision for every stage, in topological order, without touching anything.

    Raises:
        ConfigError, ModelError, DataError: an input of a stage is missing.
    """
    digests = Digests(output_dir / SHARED / "digests.json")
    decisions: dict[str, Decision] = {}
    for stage in pipeline.stages:
        kind = kinds[stage.kind]
        unknown = [name for name in stage.after if decisions[name].result is None]
        if unknown:
            action: Literal["run", "depends"] = "depends" if kind.is_reusable else "run"
            decisions[stage.name] = Decision(action, f"after {', '.join(unknown)}")
            continue
        upstream = {name: result["digest"] for name in stage.after if (result := decisions[name].result)}
        print_ = fingerprint(pipeline, stage, kind, upstream, digests)
        path = run_path / "stages" / stage.name if run_path else None
        decisions[stage.name] = decide(output_dir, path, print_, is_reusable=kind.is_reusable, thorough=thorough)
    return decisions


def save_fingerprint(stage_path: Path, print_: Fingerprint) -> None:
    """Keep what went into the fingerprint, so that a later run can say what changed."""
    write_json(stage_path / FINGERPRINT, {"value": print_.value, "ingredients": print_.ingredients})


def saved_fingerprint(stage_path: Path) -> str | None:
    """The fingerprint that the content of a stage directory belongs to."""
    found = read_json(stage_path / FINGERPRINT)
    return found.get("value") if isinstance(found, dict) else None


def _finished(output_dir: Path, value: str) -> list[Path]:
    entries = sorted(fingerprint_folder(output_dir, value).glob("*.json"), reverse=True)
    found = [read_json(entry) for entry in entries]
    return [output_dir / entry["stage"] for entry in found if isinstance(entry, dict) and "stage" in entry]


def _run_of(stage_path: Path) -> str:
    return f"run {stage_path.parent.parent.name}"


def _why_new(output_dir: Path, stage_path: Path | None, print_: Fingerprint) -> str:
    """The difference to the newest stage of the same kind and name, or that there is none."""
    name = stage_path.name if stage_path else None
    newest: tuple[str, dict[str, object]] | None = None
    for file in sorted(output_dir.glob(f"*/stages/{name or '*'}/{FINGERPRINT}")):
        saved = read_json(file)
        if not isinstance(saved, dict) or not isinstance(saved.get("ingredients"), dict):
            continue
        same_kind = saved["ingredients"].get("kind") == print_.ingredients["kind"]
        if same_kind and saved.get("value") != print_.value:
            newest = (_run_of(file.parent), saved["ingredients"])
        elif same_kind and file.parent == stage_path:
            return "unfinished in this run"
    if newest is None:
        return "never made before"
    difference = print_.difference(newest[1])
    more = f" and {len(difference) - 2} more" if len(difference) > 2 else ""
    return f"changed since {newest[0]}: {'; '.join(difference[:2])}{more}"
