"""Plan of a run: for each stage, whether to reuse it, adopt it from another run, or run it, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.run.digests import shared_digests
from cosmos_core.run.directory import RUNS
from cosmos_core.run.files import SHARED, read_json, write_json
from cosmos_core.run.fingerprint import Fingerprint, fingerprint
from cosmos_core.run.manifest import STORED, Result, problem, read_result
from cosmos_core.types import StageKind

FINGERPRINT = "fingerprint.json"
_MOST_COMPARED = 50  # maximum number of earlier runs to compare with
_FACTS = frozenset({"device", "versions", "kernels"})
"""Fingerprint ingredients that are properties of the machine that runs the stage."""


@dataclass(frozen=True)
class Decision:
    """What to do with a stage. `reuse`: finished in this run. `adopt`: finished in another run. `run`: to be run.
    `depends`: decided after earlier stages have run."""

    action: Literal["reuse", "adopt", "run", "depends"]
    reason: str
    source: Path | None = None
    """Stage directory to reuse or adopt."""
    result: Result | None = None


def fingerprint_folder(output_dir: Path, value: str) -> Path:
    """Return the folder that lists the finished stages with a fingerprint, and that is locked while one is made."""
    return output_dir / SHARED / "fingerprints" / value


def register(output_dir: Path, stage_path: Path, value: str) -> None:
    """List a finished stage under its fingerprint so that other runs find it; losing an entry costs time only."""
    folder = fingerprint_folder(output_dir, value)
    folder.mkdir(parents=True, exist_ok=True)
    relative = stage_path.relative_to(output_dir)
    write_json(folder / f"{relative.parts[0]}.{stage_path.name}.json", {"stage": str(relative)}, durable=False)


def decide(
    output_dir: Path, stage_path: Path | None, expected: Fingerprint, *, thorough: bool = False
) -> Decision | None:
    """Return what to do with a stage, from the finished stages with its fingerprint; None if there are none.

    `stage_path` is the directory of the stage in its run; None: the run does not exist yet.
    """
    damage = ""
    if stage_path is not None:
        result = read_result(stage_path)
        if result is not None and result["fingerprint"] == expected.value:
            damage = problem(stage_path, result, thorough=thorough) or ""
            if not damage:
                return Decision("reuse", "done in this run", stage_path, result)
    for other in _finished(output_dir, expected.value):
        result = read_result(other)
        if other != stage_path and result is not None and result["fingerprint"] == expected.value:
            damage_of_other = problem(other, result, thorough=thorough)
            if not damage_of_other:
                return Decision("adopt", f"same fingerprint as {_run_of(other)}", other, result)
            damage = damage or f"{_run_of(other)}: {damage_of_other}"
    return Decision("run", f"made before, but {damage}") if damage else None


def plan(
    pipeline: Pipeline,
    kinds: Mapping[str, StageKind],
    output_dir: Path,
    *,
    thorough: bool = False,
    stored: Callable[[str], Result | None] = lambda fingerprint: None,
) -> dict[str, Decision]:
    """Return a decision for every stage, in topological order, without changing anything; `stored` returns the result
    with a fingerprint from an artifact store.

    Raises:
        ConfigError, ModelError, DataError: an input of a stage is missing.
    """
    digests = shared_digests(output_dir, thorough=thorough)
    decisions: dict[str, Decision] = {}
    for stage in pipeline.stages:
        kind = kinds[stage.kind]
        unknown = [name for name in stage.after if decisions[name].result is None]
        if unknown:
            action: Literal["run", "depends"] = "depends" if kind.is_reusable else "run"
            decisions[stage.name] = Decision(action, f"after {', '.join(unknown)}")
            continue
        upstream = {name: result["digest"] for name in stage.after if (result := decisions[name].result)}
        if not kind.is_reusable:
            decisions[stage.name] = Decision("run", "looks at the outside world, so it runs each time")
            continue
        current = fingerprint(pipeline, stage, kind, upstream, digests)
        decision: Decision | None = None
        for candidate in [*(made_on_pool(output_dir, pipeline, stage, current) if stage.work_pool else []), current]:
            if decision is None or decision.action == "run":
                decision = decide(output_dir, None, candidate, thorough=thorough)
            if (decision is None or decision.action == "run") and (result := stored(candidate.value)):
                decision = Decision("adopt", f"same fingerprint in {result[STORED]}", result=result)
        decisions[stage.name] = decision or Decision(
            "run", _why_new(output_dir, pipeline.config.name, stage.name, current)
        )
    return decisions


def save_fingerprint(stage_path: Path, value: Fingerprint, work_pool: str = "") -> None:
    """Save the ingredients of a fingerprint, so that a later run can report what changed, and the work pool of the
    stage."""
    content = {"value": value.value, "of_training": value.of_training, "ingredients": value.ingredients}
    write_json(stage_path / FINGERPRINT, content | ({"work_pool": work_pool} if work_pool else {}))


def made_on_pool(output_dir: Path, pipeline: Pipeline, stage: StageConfig, here: Fingerprint) -> list[Fingerprint]:
    """Return the fingerprints, newest first, that machines of the stage's work pool computed in runs of this pipeline
    and that differ from the fingerprint on this machine, `here`, only in properties of the machine."""

    def without_facts(ingredients: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in ingredients.items() if name not in _FACTS}

    fingerprints = [
        Fingerprint(str(saved["value"]), saved["ingredients"])
        for saved in map(dict, _saved(output_dir, pipeline.config.name, stage.name).values())
        if saved.get("work_pool") == stage.work_pool
        and without_facts(saved["ingredients"]) == without_facts(here.ingredients)
    ]
    return list({each.value: each for each in fingerprints}.values())


def _saved(output_dir: Path, pipeline: str, stage: str) -> dict[str, dict[str, Any]]:
    """Return the fingerprints of a stage that the newest runs of a pipeline saved, by run id, newest first."""
    runs = read_json(output_dir / RUNS)
    fingerprints: dict[str, dict[str, Any]] = {}
    for run in reversed(runs if isinstance(runs, list) else []):
        if not isinstance(run, dict) or run.get("pipeline") != pipeline or len(fingerprints) == _MOST_COMPARED:
            continue
        saved = read_json(output_dir / str(run.get("run_id")) / "stages" / stage / FINGERPRINT)
        if isinstance(saved, dict) and isinstance(saved.get("ingredients"), dict):
            fingerprints[str(run["run_id"])] = saved
    return fingerprints


def _finished(output_dir: Path, value: str) -> list[Path]:
    entries = sorted(fingerprint_folder(output_dir, value).glob("*.json"), reverse=True)
    documents = [read_json(entry) for entry in entries]
    return [
        output_dir / entry["stage"]
        for entry in documents
        if isinstance(entry, dict) and isinstance(entry.get("stage"), str)
    ]


def _run_of(stage_path: Path) -> str:
    return f"run {stage_path.parent.parent.name}"


def _why_new(output_dir: Path, pipeline: str, stage: str, current: Fingerprint) -> str:
    """Return the difference to the most similar earlier run of the stage, or that there is none."""
    saved = _saved(output_dir, pipeline, stage)
    changes = {run: current.difference(each["ingredients"]) for run, each in saved.items()}
    if not changes:
        return "never made before"
    run_id, difference = min(changes.items(), key=lambda item: len(item[1]))
    more = f" and {len(difference) - 2} more" if len(difference) > 2 else ""
    since = f"changed since run {run_id}: {'; '.join(difference[:2])}{more}"
    return since if difference else f"unfinished in run {run_id}"
