"""A run directory as people want to see it: every file read once, whatever is missing left empty.

For showing only. What decides about reuse or failure reads the files through `run`, which is strict.
"""

from __future__ import annotations

import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmos_core.run.files import json_objects, read_json, read_object
from cosmos_core.run.progress import read_metrics
from cosmos_core.run.stage import read_kind
from cosmos_core.run.state import FINISHED, read_state
from cosmos_core.run.tail import Tail
from cosmos_core.types import StageKind


@dataclass(frozen=True)
class StageRecord:
    """One stage of a run."""

    path: Path
    name: str
    kind: StageKind
    """As the run recorded it."""
    after: tuple[str, ...]
    depth: int
    """Longest chain of stages before it; 0: it waits for nothing."""
    state: dict[str, Any]
    progress: dict[str, Any]
    result: dict[str, Any]

    @property
    def status(self) -> str:
        """Return `waiting`, `running`, `retrying`, `done`, `reused`, `failed` or `stopped`."""
        return str(self.state["state"])

    @property
    def seconds(self) -> float | None:
        """Return the time from its first attempt to its end, or to now while it runs; None: it did not run here."""
        started, ended = self.state.get("started"), self.state.get("ended")
        if not started or self.status in {"waiting", "reused"}:
            return None
        return max(0.0, float(ended or time.time()) - float(started))

    @property
    def metrics(self) -> dict[str, Any]:
        """Return final metrics of a finished stage, else the newest of a running one."""
        return dict(self.result.get("metrics") or self.progress.get("metrics") or {})

    @property
    def position(self) -> tuple[Any, Any]:
        """Return the step that it has reached and the number of steps; None where it does not say."""
        step, total = (self.progress.get(key, self.state.get(key)) for key in ("step", "total"))
        return step, total

    @property
    def info(self) -> dict[str, Any]:
        """Return what the stage left beside metrics: its model, checks, conditions."""
        return dict(self.result.get("info") or {})

    @cached_property
    def best(self) -> dict[str, Any]:
        """Return the best step by validation so far: `step`, `metric`, `value`; empty: none was validated."""
        found = self.info.get("best") or read_object(self.path / "best.json")
        return found if isinstance(found, dict) and {"step", "metric", "value"} <= found.keys() else {}

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`."""
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """Return the facts that each rank reported where it ran."""
        found = read_json(self.path / "facts.json")
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """Return the lines of `events.jsonl`."""
        return json_objects(Tail(self.path / "events.jsonl").lines())

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """Return the lines of `samples.jsonl`."""
        return [line for line in json_objects(Tail(self.path / "samples.jsonl").lines()) if "prompt" in line]


@dataclass(frozen=True)
class RunRecord:
    """A whole run."""

    path: Path
    name: str
    facts: dict[str, Any]
    """`run.json`."""
    stages: tuple[StageRecord, ...]
    """Each after those that it waits for."""

    @property
    def outcome(self) -> str:
        """Return `failed` or `stopped` when a stage is, `done` when all are finished, else `running`."""
        # The page that shows the outcome is not a part of it.
        states = {stage.status for stage in self.stages if stage.kind.makes != "page"}
        for state in ("failed", "stopped"):
            if state in states:
                return state
        return "done" if states <= FINISHED and self.stages else "running"

    @property
    def ended(self) -> float:
        """Return the unix time of the last thing that happened, or now while something runs or waits to."""
        ends = [float(stage.state["ended"]) for stage in self.stages if stage.state.get("ended")]
        return max(ends) if ends and self.outcome != "running" else time.time()

    @property
    def model(self) -> Path | None:
        """Return the folder of the model that the run ends with: the last export, else the last model of any stage."""
        made = [stage for stage in self.stages if isinstance(stage.info.get("model"), str)]
        exports = [stage for stage in made if stage.kind.makes == "model" and not stage.kind.trains] or made
        return exports[-1].path / exports[-1].info["model"] if exports else None


def read_run(path: Path) -> RunRecord:
    """Read what there is of a run; never fails on missing or damaged files."""
    pipeline = _read_pipeline(path / "pipeline.toml")
    entries = [entry for entry in pipeline.get("stages", []) if isinstance(entry, dict) and "name" in entry]
    if not entries and (path / "stages").is_dir():
        entries = [{"name": folder.name} for folder in sorted((path / "stages").iterdir()) if folder.is_dir()]
    after = {entry["name"]: _names(entry.get("after", ())) for entry in entries}
    facts = read_object(path / "run.json")
    kinds = facts.get("kinds")
    known = kinds if isinstance(kinds, dict) else {}
    stages = [_read_stage(path / "stages" / entry["name"], entry, after, known) for entry in entries]
    name = str(pipeline.get("name") or facts.get("pipeline") or "pipeline")
    return RunRecord(path, name, facts, tuple(sorted(stages, key=lambda stage: stage.depth)))


def busy_seconds(run: RunRecord, since: float) -> float:
    """Return seconds after `since` (unix time) in which a worker ran; parallel stages are not counted twice.

    A stage with several attempts is taken as one block of its worker seconds: when exactly the pauses fell is not kept.
    """
    blocks = []
    for stage in run.stages:
        begin = float(stage.state.get("started") or 0)
        length = float(stage.state.get("worker_seconds") or 0)
        if begin < since:  # of an earlier command: only its last attempt can lie in this one
            begin = float(stage.state.get("attempt_started") or begin)
            length = float(stage.state.get("ended") or begin) - begin
        if begin >= since and length > 0:
            blocks.append((begin, begin + length))
    total, reached = 0.0, since
    for begin, end in sorted(blocks):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def loading_line(model: Path) -> str:
    """Return the Python line that loads the model with the public library."""
    loader = "AutoModelForImageTextToText" if any(model.glob("*processor_config.json")) else "AutoModelForCausalLM"
    return f"from transformers import {loader}; model = {loader}.from_pretrained({str(model)!r})"


def _read_stage(
    path: Path, entry: dict[str, Any], after: dict[str, tuple[str, ...]], kinds: dict[str, Any]
) -> StageRecord:
    name, result = entry["name"], read_object(path / "result.json")
    return StageRecord(
        path=path,
        name=name,
        kind=_kind(str(entry.get("kind") or result.get("kind") or ""), kinds),
        after=after[name],
        depth=_depth(name, after),
        state=read_state(path),
        progress=read_object(path / "progress.json"),
        result=result,
    )


def _kind(name: str, recorded: dict[str, Any]) -> StageKind:
    try:
        return read_kind(recorded[name])
    except (AttributeError, KeyError, TypeError):  # damaged, or of a version with other fields
        return StageKind(name=name, entry="", result_version=0)


def _depth(name: str, after: dict[str, tuple[str, ...]], seen: tuple[str, ...] = ()) -> int:
    before = [other for other in after[name] if other in after and other not in seen]
    return max((1 + _depth(other, after, (*seen, name)) for other in before), default=0)


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _read_pipeline(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("pipeline", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return {}
    return table if isinstance(table, dict) else {}
