"""A run directory as people want to see it: every file read once, whatever is missing left empty.

For showing only. What decides about reuse or failure reads the files through `run`, which is strict.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmos_core.config.load import read_toml
from cosmos_core.errors import EXIT_REFUSED, ConfigError
from cosmos_core.launch.service_health import FILE as HEALTH
from cosmos_core.run.directory import PIPELINE, Facts, read_facts
from cosmos_core.run.files import Document, Seconds, json_objects, parsed, read_document, read_json, read_object
from cosmos_core.run.liveness import holder_died, is_dead, read_holder
from cosmos_core.run.loading import pipeline_arguments, pipeline_needs
from cosmos_core.run.manifest import STORED, Result, read_result
from cosmos_core.run.progress import Position, read_metrics, read_progress
from cosmos_core.run.stage import CONDITIONS, read_kind
from cosmos_core.run.state import ACTIVE, FINISHED, State, read_state
from cosmos_core.run.tail import Tail
from cosmos_core.types import StageKind


class Best(Document):
    """The best step by validation so far."""

    step: int
    metric: str
    value: float


class Condition(Document):
    """A condition of a gate, with what was measured."""

    condition: str
    value: float
    bound: float | None = None
    """What the value was compared with; None: nothing, for nothing was published."""
    passed: bool


class Rank(Document):
    """What a rank reported of where it ran."""

    host: str
    gpus: list[str]
    threads: int


class Event(Document):
    """A line of `events.jsonl`."""

    time: Seconds
    event: str
    detail: str = ""


class Service(Document):
    """A reward service, as it was when the stage was done with it."""

    url: str
    status: str
    rewards: dict[str, dict[str, float]] = {}
    """Of each its metrics: items, errors, ready, restarts, retried, seconds ..."""
    refused: dict[str, float] = {}
    """Responses by status, but for those that say scores or that they are not there yet."""


class Branch(Document):
    """A branch of a sweep."""

    stages: list[str]
    settings: dict[str, Any] = {}


class Choice(Document):
    """What a stage chooses among, and by what."""

    metric: str
    mode: str = "max"
    branches: list[Branch] = []


class Sample(Document):
    """A line of `samples.jsonl`: a completion."""

    prompt: str
    step: float = 0
    reference: str = ""
    completion: str = ""
    reward: float | None = None
    media: list[str] = []
    """Of a diffusion model: files of what it drew, relative to the stage."""
    rewards: list[float | None] = []
    """Of each of them."""
    folder: str = ""
    """Of the stage, which is not in the line."""


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
    state: State
    progress: Position | None
    result: Result | None
    sweep: Choice | None = None
    """What it chooses among; None: it is no choice."""

    @property
    def status(self) -> str:
        """Return `waiting`, `running`, `retrying`, `done`, `reused`, `failed`, `stopped` or `died`."""
        return "died" if self.died is not None else self.state.state

    @cached_property
    def died(self) -> float | None:
        """Return the unix time of the last sign of life of a stage that was killed with its flow; None: it was not."""
        if not is_dead(self.state, time.time()):
            return None
        begins = [begin for begin, _ in self.state.spans]
        signs = (self.state.heartbeat, self.state.renewed, self.progress and self.progress.heartbeat, *begins)
        return max((sign for sign in signs if sign), default=0.0)

    @property
    def resumes_after(self) -> int:
        """Return the step whose checkpoint a resume goes on from, as far as the files here say; 0: the beginning."""
        known = (self.state.checkpoint_step, self.progress and self.progress.checkpoint_step)
        return max((step for step in known if step), default=0)

    @property
    def seconds(self) -> float | None:
        """Return the time of all attempts, without the pauses between them; None: it did not run here."""
        is_here = self.state.spans and self.status not in {"waiting", "reused"}
        return self.state.seconds(time.time()) if is_here else None

    @property
    def metrics(self) -> dict[str, Any]:
        """Return final metrics of a finished stage, else the newest of a running one."""
        newest = self.progress.metrics if self.progress else {}
        return dict(self.result["metrics"] or newest if self.result else newest)

    @property
    def position(self) -> tuple[int | None, int | None]:
        """Return the step that it has reached and the number of steps; None where it does not say."""
        where = self.progress or self.state
        return where.step, where.total

    @property
    def info(self) -> dict[str, Any]:
        """Return what the stage left beside metrics: its model, checks, conditions."""
        return dict(self.result["info"]) if self.result else {}

    @cached_property
    def conditions(self) -> list[Condition]:
        """Return the conditions of a gate that passed or refused."""
        found = self.info.get("conditions")
        if self.is_refusal:
            found = read_json(self.path / CONDITIONS)
        return parsed(found, Condition) if isinstance(found, list) else []

    @property
    def is_refusal(self) -> bool:
        """Return whether this is a gate that refused."""
        return self.state.state == "failed" and self.state.exit_code == EXIT_REFUSED

    @cached_property
    def best(self) -> Best | None:
        """Return the best step by validation so far; None: none was validated."""
        if (found := self.info.get("best")) is None:
            return read_document(self.path / "best.json", Best)
        return parsed([found], Best)[0] if parsed([found], Best) else None

    @cached_property
    def curves(self) -> list[dict[str, Any]]:
        """Return the lines of `metrics.jsonl`."""
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def ranks(self) -> list[Rank]:
        """Return the facts that each rank reported where it ran."""
        found = read_json(self.path / "facts.json")
        return parsed(found, Rank) if isinstance(found, list) else []

    @cached_property
    def services(self) -> list[Service]:
        """Return the reward services that the stage asked."""
        found = read_json(self.path / HEALTH)
        return parsed(found["services"], Service) if isinstance(found, dict) and "services" in found else []

    @cached_property
    def service_restarts(self) -> int:
        """Return how often the service that was started beside the stage had to be started again."""
        found = read_json(self.path / HEALTH)
        return int(found.get("restarts", 0)) if isinstance(found, dict) else 0

    @cached_property
    def events(self) -> list[Event]:
        """Return the lines of `events.jsonl`."""
        return parsed(json_objects(Tail(self.path / "events.jsonl").lines()), Event)

    @cached_property
    def samples(self) -> list[Sample]:
        """Return the lines of `samples.jsonl`."""
        lines = json_objects(Tail(self.path / "samples.jsonl").lines())
        return parsed([line | {"folder": str(self.path)} for line in lines], Sample)


@dataclass(frozen=True)
class RunRecord:
    """A whole run."""

    path: Path
    name: str
    facts: Facts
    """`run.json`."""
    stages: tuple[StageRecord, ...]
    """Each after those that it waits for."""

    @property
    def outcome(self) -> str:
        """Return `failed`, `stopped` or `died` when a stage is, `done` when all are finished, else `running`; `died`
        also when the process that brought one stage after the other to its end is gone."""
        # The page that shows the outcome is not a part of it.
        states = {stage.status for stage in self.stages if stage.kind.makes != "page"}
        for state in ("failed", "stopped", "died"):
            if state in states:
                return state
        if states <= FINISHED and self.stages:
            return "done"
        return "running" if states & ACTIVE or holder_died(self.path) is None else "died"

    @property
    def began(self) -> float:
        """Return the unix time at which the command began that ran it last, otherwise the run itself; 0: unknown."""
        holder = read_holder(self.path)
        return holder.since if holder is not None else self.facts.started

    @property
    def ended(self) -> float:
        """Return the unix time of the last thing that happened, or now while something runs or waits to."""
        ends = [end for stage in self.stages if (end := stage.died or stage.state.ended)]
        return max(ends) if ends and self.outcome != "running" else time.time()

    @property
    def model(self) -> Path | None:
        """Return the folder of the model that the run ends with: the last export, else the last model of any stage.
        None: there is none, a gate refused it, or it lies in an artifact store alone."""
        after = {stage.name: stage.after for stage in self.stages}
        refused: set[str] = set()
        reached = [name for stage in self.stages if stage.is_refusal for name in stage.after]
        while reached:
            refused.add(name := reached.pop())
            reached += [other for other in after.get(name, ()) if other not in refused]
        made = [stage for stage in self.stages if stage.kind.makes != "publication" and stage.name not in refused]
        made = [stage for stage in made if "://" not in str(stage.info.get("model") or "://")]
        exports = [stage for stage in made if stage.kind.makes == "model" and not stage.kind.trains] or made
        found = exports[-1].path / exports[-1].info["model"] if exports else None
        is_elsewhere = found is not None and not found.exists() and exports[-1].result and STORED in exports[-1].result
        return None if is_elsewhere else found

    @property
    def trained(self) -> list[StageRecord]:
        """Return the stages that made a model, and whose files are here."""
        made = [stage for stage in self.stages if stage.kind.makes == "model" and stage.info.get("model")]
        return [stage for stage in made if (stage.path / str(stage.info["model"])).exists()]

    @property
    def published(self) -> list[str]:
        """Return where the run has published models: folders, URLs."""
        found = [stage.info.get("published") for stage in self.stages if stage.kind.makes == "publication"]
        return [where for where in dict.fromkeys(found) if isinstance(where, str)]


def read_run(path: Path) -> RunRecord:
    """Read what there is of a run; never fails on missing or damaged files."""
    pipeline = read_pipeline(path)
    entries = [entry for entry in pipeline.get("stages", []) if isinstance(entry, dict) and "name" in entry]
    if not entries and (path / "stages").is_dir():
        entries = [{"name": folder.name} for folder in sorted((path / "stages").iterdir()) if folder.is_dir()]
    after = {entry["name"]: _names(entry.get("after", ())) for entry in entries}
    facts = read_facts(path) or Facts()
    stages = [_read_stage(path / "stages" / entry["name"], entry, after, facts) for entry in entries]
    name = str(pipeline.get("name") or facts.pipeline or "pipeline")
    return RunRecord(path, name, facts, tuple(sorted(stages, key=lambda stage: stage.depth)))


def read_pipeline(path: Path) -> dict[str, Any]:
    """Return the table `pipeline` of a run, with all settings of its stages; it is kept, so do not change it.

    Empty: the file is missing or damaged.
    """
    try:
        table = read_toml(path / PIPELINE).get("pipeline", {})
    except ConfigError:
        return {}
    return table if isinstance(table, dict) else {}


def overhead(run: RunRecord) -> dict[str, float]:
    """Return where the time of the command that ran it last went, in seconds; empty: it is not known when it began."""
    if not run.began:
        return {}
    wall, inside = max(0.0, run.ended - run.began), busy_seconds(run, run.began)
    return {"wall": wall, "inside": inside, "overhead": max(0.0, wall - inside)}


def busy_seconds(run: RunRecord, since: float) -> float:
    """Return seconds after `since` (unix time) in which a worker ran; parallel stages are not counted twice."""
    now = time.time()
    total, reached = 0.0, since
    for begin, end in sorted(
        span for stage in run.stages if stage.kind.in_worker for span in stage.state.closed_spans(now)
    ):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def loading_line(model: Path) -> str:
    """Return the Python line that loads the model with the public library."""
    if (model / "model_index.json").is_file():
        index = read_object(model / "model_index.json")
        call = f"DiffusionPipeline.from_pretrained({str(model)!r}{pipeline_arguments(index)})"
        return f"from diffusers import DiffusionPipeline; pipe = {call}{pipeline_needs(index)}"
    loader = "AutoModelForImageTextToText" if any(model.glob("*processor_config.json")) else "AutoModelForCausalLM"
    return f"from transformers import {loader}; model = {loader}.from_pretrained({str(model)!r})"


def _read_stage(path: Path, entry: dict[str, Any], after: dict[str, tuple[str, ...]], facts: Facts) -> StageRecord:
    name, result = entry["name"], read_result(path)
    kind = str(entry.get("kind") or (result["kind"] if result else ""))
    return StageRecord(
        path=path,
        name=name,
        kind=_kind(kind, facts.kinds),
        after=after[name],
        depth=_depth(name, after),
        state=read_state(path),
        progress=read_progress(path),
        result=result,
        sweep=next(iter(parsed([entry["sweep"]], Choice)), None) if entry.get("sweep") else None,
    )


def _kind(name: str, recorded: dict[str, dict[str, Any]]) -> StageKind:
    try:
        return read_kind(recorded[name])
    except (KeyError, TypeError):  # damaged, or of a version with other fields
        return StageKind(name=name, entry="", result_version=0)


def _depth(name: str, after: dict[str, tuple[str, ...]], seen: tuple[str, ...] = ()) -> int:
    before = [other for other in after[name] if other in after and other not in seen]
    return max((1 + _depth(other, after, (*seen, name)) for other in before), default=0)


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
