"""What a run would do with each stage: reuse it, take it from another run, or run it, and why."""

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
_MOST_COMPARED = 50  # runs, the newest ones
_FACTS = frozenset({"device", "versions", "kernels"})
"""Ingredients that are facts of the machine which runs the stage."""


@dataclass(frozen=True)
class Decision:
    """`reuse`: done in this run. `adopt`: done in another. `run`: to be made. `depends`: on what runs before it."""

    action: Literal["reuse", "adopt", "run", "depends"]
    reason: str
    source: Path | None = None
    """Stage directory that is reused or adopted."""
    result: Result | None = None


def fingerprint_folder(output_dir: Path, value: str) -> Path:
    """Return where finished stages with this fingerprint are listed, and locked while one is being made."""
    return output_dir / SHARED / "fingerprints" / value


def register(output_dir: Path, stage_path: Path, value: str) -> None:
    """List a finished stage under its fingerprint, for other runs to find; an entry that is lost costs time only."""
    folder = fingerprint_folder(output_dir, value)
    folder.mkdir(parents=True, exist_ok=True)
    relative = stage_path.relative_to(output_dir)
    write_json(folder / f"{relative.parts[0]}.{stage_path.name}.json", {"stage": str(relative)}, durable=False)


def decide(
    output_dir: Path, stage_path: Path | None, expected: Fingerprint, *, thorough: bool = False
) -> Decision | None:
    """Return what to do with a stage that was made with this fingerprint; None: it never was.

    `stage_path` is where its run keeps it; None: the run does not exist yet.
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
            found = problem(other, result, thorough=thorough)
            if not found:
                return Decision("adopt", f"same fingerprint as {_run_of(other)}", other, result)
            damage = damage or f"{_run_of(other)}: {found}"
    return Decision("run", f"made before, but {damage}") if damage else None


def plan(
    pipeline: Pipeline,
    kinds: Mapping[str, StageKind],
    output_dir: Path,
    *,
    thorough: bool = False,
    stored: Callable[[str], Result | None] = lambda fingerprint: None,
) -> dict[str, Decision]:
    """Decide for every stage, in topological order, without touching anything. `stored` returns what an artifact store
    has that was made with a fingerprint.

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
        found = fingerprint(pipeline, stage, kind, upstream, digests)
        decision: Decision | None = None
        for made in [*(made_on_pool(output_dir, pipeline, stage, found) if stage.work_pool else []), found]:
            if decision is None or decision.action == "run":
                decision = decide(output_dir, None, made, thorough=thorough)
            if (decision is None or decision.action == "run") and (result := stored(made.value)):
                decision = Decision("adopt", f"same fingerprint in {result[STORED]}", result=result)
        decisions[stage.name] = decision or Decision(
            "run", _why_new(output_dir, pipeline.config.name, stage.name, found)
        )
    return decisions


def save_fingerprint(stage_path: Path, value: Fingerprint, work_pool: str = "") -> None:
    """Keep what went into the fingerprint, so that a later run can say what changed, and which pool made it."""
    content = {"value": value.value, "of_training": value.of_training, "ingredients": value.ingredients}
    write_json(stage_path / FINGERPRINT, content | ({"work_pool": work_pool} if work_pool else {}))


def made_on_pool(output_dir: Path, pipeline: Pipeline, stage: StageConfig, here: Fingerprint) -> list[Fingerprint]:
    """Return the fingerprints, the newest first, that machines of the stage's work pool gave it in runs of this
    pipeline, where they differ from that of this machine, `here`, in facts of the machine alone."""

    def without_facts(ingredients: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in ingredients.items() if name not in _FACTS}

    found = [
        Fingerprint(str(saved["value"]), saved["ingredients"])
        for saved in map(dict, _saved(output_dir, pipeline.config.name, stage.name).values())
        if saved.get("work_pool") == stage.work_pool
        and without_facts(saved["ingredients"]) == without_facts(here.ingredients)
    ]
    return list({each.value: each for each in found}.values())


def _saved(output_dir: Path, pipeline: str, stage: str) -> dict[str, dict[str, Any]]:
    """Return what the newest runs of a pipeline noted of the fingerprint of a stage, by run, the newest first."""
    runs = read_json(output_dir / RUNS)
    found: dict[str, dict[str, Any]] = {}
    for run in reversed(runs if isinstance(runs, list) else []):
        if not isinstance(run, dict) or run.get("pipeline") != pipeline or len(found) == _MOST_COMPARED:
            continue
        saved = read_json(output_dir / str(run.get("run_id")) / "stages" / stage / FINGERPRINT)
        if isinstance(saved, dict) and isinstance(saved.get("ingredients"), dict):
            found[str(run["run_id"])] = saved
    return found


def _finished(output_dir: Path, value: str) -> list[Path]:
    entries = sorted(fingerprint_folder(output_dir, value).glob("*.json"), reverse=True)
    found = [read_json(entry) for entry in entries]
    return [
        output_dir / entry["stage"]
        for entry in found
        if isinstance(entry, dict) and isinstance(entry.get("stage"), str)
    ]


def _run_of(stage_path: Path) -> str:
    return f"run {stage_path.parent.parent.name}"


def _why_new(output_dir: Path, pipeline: str, stage: str, current: Fingerprint) -> str:
    """The difference to the stage of that name in the run of the pipeline that comes nearest, of several such runs the
    newest; or that none began it."""
    saved = _saved(output_dir, pipeline, stage)
    found = {run: current.difference(each["ingredients"]) for run, each in saved.items()}
    if not found:
        return "never made before"
    run_id, difference = min(found.items(), key=lambda item: len(item[1]))
    more = f" and {len(difference) - 2} more" if len(difference) > 2 else ""
    since = f"changed since run {run_id}: {'; '.join(difference[:2])}{more}"
    return since if difference else f"unfinished in run {run_id}"
