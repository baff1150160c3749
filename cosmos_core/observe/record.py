"""Parse a run directory for display: every file is read once, and missing or damaged files give empty values.

Decisions about reuse or failure use the modules in `run` instead, which are strict.
"""

import time
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from cosmos_core.config.load import read_toml
from cosmos_core.errors import ConfigError
from cosmos_core.launch.service_health import HEALTH_FILE as HEALTH
from cosmos_core.run import liveness
from cosmos_core.run.directory import PIPELINE_FILE, RunStartInfo, read_start_info
from cosmos_core.run.files import (
    JsonDocument,
    UnixSeconds,
    parse_documents,
    parse_json_objects,
    read_document,
    read_json,
    read_json_object,
)
from cosmos_core.run.loading import render_extra_packages, render_pipeline_arguments
from cosmos_core.run.manifest import STORE_URL_KEY, Result, read_result
from cosmos_core.run.progress import ProgressRecord, read_metrics, read_progress
from cosmos_core.run.stage import CONDITIONS_FILE, parse_stage_kind
from cosmos_core.run.state import ACTIVE_STATES, FINISHED_STATES, RERUN_EVENT, StageState, read_state
from cosmos_core.run.tail import FileTail
from cosmos_core.types import StageKind


class BestStep(JsonDocument):
    """Best step of a training so far according to validation, with the metric that decides."""

    step: int
    metric: str
    value: float


class GateCondition(JsonDocument):
    """Condition of a gate stage on a metric, with the measured value of the metric and the bound that decides."""

    condition: str
    value: float
    bound: float | None = None
    """Bound with which the measured value was compared; None if no model was published yet."""
    passed: bool
    metric: str = ""  # set only if the condition has the pattern `*`: name of the metric that matches it
    paired: dict[str, Any] | None = None
    """Output of `PairedDifferences.summarize` for the items of a benchmark; None: items were not compared."""

    @property
    def title(self) -> str:
        """Return the condition as text, with the metric that a `*` stands for and the statistics of paired items."""
        condition_text, statistics = self.condition + (f" ({self.metric})" if self.metric else ""), self.paired or {}
        title_template = "{}: {difference:+.3g} ({low:+.3g} .. {high:+.3g}) on {items:,} items"
        title_template += ", {needed:,} needed" if statistics.get("needed") else ""
        title_template += ", p = {p_holm:.2g} with Holm's correction" if "p_holm" in statistics else ""
        return title_template.format(condition_text, **statistics) if statistics else condition_text


class RankHardware(JsonDocument):
    """Hardware of one rank of a stage, as the rank has reported it."""

    host: str
    gpus: list[str]
    threads: int


class StageEvent(JsonDocument):
    """Event of a stage, such as a rerun; one line of `events.jsonl`."""

    time: UnixSeconds
    event: str
    detail: str = ""


class ServiceHealth(JsonDocument):
    """State of a reward service at the end of the stage that used it."""

    url: str
    status: str
    rewards: dict[str, dict[str, float]] = {}
    """Metrics of the reward service by reward function, such as the numbers of scored items, errors and restarts."""
    refused: dict[str, float] = {}
    """Number of requests that the service refused, by HTTP status."""


class SweepBranch(JsonDocument):
    """Branch of a sweep: the names of its stages, and the settings that distinguish it."""

    stages: list[str]
    settings: dict[str, Any] = {}


class BranchChoice(JsonDocument):
    """Branches of a sweep from which a `select` stage chooses, and the metric that decides."""

    metric: str
    mode: str = "max"
    branches: list[SweepBranch] = []


class LoggedSample(JsonDocument):
    """Logged completion of a prompt, one line of `samples.jsonl`."""

    prompt: str
    step: float = 0
    reference: str = ""
    completion: str = ""
    reward: float | None = None
    media: list[str] = []
    """Paths of the generated images or videos of a diffusion model, relative to the stage."""
    rewards: list[float | None] = []
    """Reward of each file in `media`; None: no valid reward."""
    folder: str = ""
    """Directory of the stage that logged the completion; not in `samples.jsonl`, set when that file is read."""


@dataclass(frozen=True)
class StageRecord:
    """Content of the files of one stage of a run, parsed for display."""

    path: Path
    name: str
    kind: StageKind
    """Stage kind as recorded in `run.json`, perhaps by an earlier version."""
    after: tuple[str, ...]
    depth: int
    """Length of the longest chain of stages on which the stage depends; 0: it depends on no stage."""
    state: StageState
    progress: ProgressRecord | None
    result: Result | None
    sweep: BranchChoice | None = None
    """Branches of a sweep from which the stage chooses; None: the stage does not choose."""

    @property
    def status(self) -> str:
        """Return the displayed status of the stage: `died` if it was killed, otherwise `StageState.status`."""
        return "died" if self.died_at is not None else self.state.status

    @cached_property
    def died_at(self) -> float | None:
        """Return the unix time of the last heartbeat of a stage that was killed with its flow; otherwise None."""
        if not liveness.is_stage_dead(self.state, time.time()):
            return None
        last_heartbeat_time = self.progress.heartbeat if self.progress else 0.0
        return max(self.state.last_activity_time, last_heartbeat_time, *(begin for begin, _ in self.state.spans))

    @property
    def resumable_step(self) -> int:
        """Return the train step of the newest local checkpoint, from which the stage resumes; 0: no checkpoint."""
        checkpoint_steps = (self.state.checkpoint_step, self.progress and self.progress.checkpoint_step)
        return max((step for step in checkpoint_steps if step), default=0)

    @property
    def seconds(self) -> float | None:
        """Return the total time of all attempts in seconds; None if the stage waits, was reused or has no attempt."""
        has_attempt = self.state.spans and self.status not in {"waiting", "reused"}
        return self.state.total_seconds(time.time() if self.died_at is None else self.died_at) if has_attempt else None

    @property
    def warnings(self) -> list[str]:
        """Return the first warnings that the stage's newest attempt logged."""
        return self.progress.warnings if self.progress else []

    @property
    def metrics(self) -> dict[str, Any]:
        """Return the final metrics of a finished stage, or the newest metrics of any other stage."""
        newest_metrics = self.progress.metrics if self.progress else {}
        return dict(self.result["metrics"] or newest_metrics if self.result else newest_metrics)

    @property
    def step_and_total(self) -> tuple[int | None, int | None]:
        """Return the current train step and the total number of steps of the stage; None for an unknown number."""
        latest_progress = self.progress or self.state
        return latest_progress.step, latest_progress.total

    @property
    def info(self) -> dict[str, Any]:
        """Return the results of a finished stage other than metrics, such as its model, checks and conditions."""
        return dict(self.result["info"]) if self.result else {}

    @cached_property
    def conditions(self) -> list[GateCondition]:
        """Return the conditions of the stage, if it is a gate that has passed or refused; otherwise an empty list."""
        entries = read_json(self.path / CONDITIONS_FILE) if self.status == "refused" else self.info.get("conditions")
        return parse_documents(entries, GateCondition)

    @cached_property
    def best_step(self) -> BestStep | None:
        """Return the best step so far according to validation; None if no step was validated."""
        if (best_entry := self.info.get("best")) is None:
            return read_document(self.path / "best.json", BestStep)
        return next(iter(parse_documents([best_entry], BestStep)), None)

    @cached_property
    def metric_lines(self) -> list[dict[str, Any]]:
        """Return the parsed lines of the stage's `metrics.jsonl`."""
        return read_metrics(self.path / "metrics.jsonl")

    @cached_property
    def ranks(self) -> list[RankHardware]:
        """Return the hardware that each rank of the stage has reported."""
        return parse_documents(read_json(self.path / "facts.json"), RankHardware)

    @cached_property
    def services(self) -> list[ServiceHealth]:
        """Return the states of the reward services that the stage used."""
        return parse_documents(read_json_object(self.path / HEALTH).get("services"), ServiceHealth)

    @cached_property
    def service_restarts(self) -> int:
        """Return the number of restarts of the reward service that was started for the stage."""
        num_restarts = read_json_object(self.path / HEALTH).get("restarts")
        return num_restarts if isinstance(num_restarts, int) else 0

    @cached_property
    def events(self) -> list[StageEvent]:
        """Return the parsed lines of the stage's `events.jsonl`."""
        return parse_documents(parse_json_objects(FileTail(self.path / "events.jsonl").read_lines()), StageEvent)

    @property
    def reason_for_rerun(self) -> str:
        """Return the reason why the stage last ran again although it had a result; empty if it did not run again."""
        return next((each.detail for each in reversed(self.events) if each.event == RERUN_EVENT), "")

    @cached_property
    def samples(self) -> list[LoggedSample]:
        """Return the parsed lines of the stage's `samples.jsonl`."""
        sample_lines = parse_json_objects(FileTail(self.path / "samples.jsonl").read_lines())
        return parse_documents([line | {"folder": str(self.path)} for line in sample_lines], LoggedSample)


@dataclass(frozen=True)
class RunRecord:
    """Content of the files of a run, parsed for display."""

    path: Path
    name: str
    start_info: RunStartInfo
    """Content of `run.json`, which records how the run was started."""
    stages: tuple[StageRecord, ...]
    """Stages of the run in topological order."""

    @property
    def outcome(self) -> str:
        """Return the displayed outcome of the run: if all stages are finished or a Python flow has completed, the value
        of `derive_flow_outcome`. Otherwise return the first that applies: `failed`, `refused`, `stopped` or `died` if a
        stage has this status, `running`, `waiting`, `declined`, or the value of `derive_inactive_run_outcome`."""
        # A report stage shows the outcome, so its own status must not affect the outcome.
        stage_statuses = {stage.status for stage in self.stages if stage.kind.makes != "page"}
        has_flow_completed = liveness.has_flow_completed(self.path) and not stage_statuses & ACTIVE_STATES
        if (has_flow_completed or stage_statuses <= FINISHED_STATES) and self.stages:
            return liveness.derive_flow_outcome(self.path)
        if failures := [each for each in ("failed", "refused", "stopped", "died") if each in stage_statuses]:
            return failures[0]
        if not stage_statuses & ACTIVE_STATES and (approval := liveness.read_open_approval(self.path)):
            return "declined" if approval.is_declined else "waiting"
        return "running" if stage_statuses & ACTIVE_STATES else liveness.derive_inactive_run_outcome(self.path)

    @property
    def start_time(self) -> float:
        """Return the unix time at which the last command for the run started, or the run was created; 0: unknown."""
        run_lock_holder = liveness.read_holder(self.path)
        return run_lock_holder.since if run_lock_holder is not None else self.start_info.started

    @property
    def end_time(self) -> float:
        """Return the unix time at which the last stage ended, or the current time while the run is active."""
        stage_end_times = [end for stage in self.stages if (end := stage.died_at or stage.state.ended)]
        return time.time() if self.outcome == "running" else max(stage_end_times, default=self.start_time)

    @property
    def refused_stage_names(self) -> set[str]:
        """Return the names of all direct and indirect predecessors of the gates that refused."""
        refused_stage_names: set[str] = set()
        for stage in reversed(self.stages):  # visit successors first: a refusal also applies to all predecessors
            if stage.status == "refused" or stage.name in refused_stage_names:
                refused_stage_names.update(stage.after)
        return refused_stage_names

    @property
    def model(self) -> Path | None:
        """Return the folder of the run's final model: the last export, or else the last model of any stage. Return None
        if there is no model, if a gate refused the model, or if the model exists only in an artifact store."""
        names = self.refused_stage_names
        stages = [stage for stage in self.stages if stage.kind.makes != "publication" and stage.name not in names]
        stages = [stage for stage in stages if "://" not in str(stage.info.get("model") or "://")]
        export_stages = [stage for stage in stages if stage.kind.makes == "model" and not stage.kind.trains_model]
        if not (export_stages or stages):
            return None
        stage = (export_stages or stages)[-1]
        model: Path = stage.path / stage.info["model"]
        return None if not model.exists() and STORE_URL_KEY in (stage.result or {}) else model

    @property
    def trained_models(self) -> list[StageRecord]:
        """Return the stages whose model is on this machine, except stages whose model a gate refused."""
        passing_stages = {stage.name for stage in self.stages if stage.kind.makes == "model"} - self.refused_stage_names
        model_stages = [stage for stage in self.stages if stage.name in passing_stages and stage.info.get("model")]
        return [stage for stage in model_stages if (stage.path / str(stage.info["model"])).exists()]

    @property
    def published_locations(self) -> list[str]:
        """Return the folders and URLs at which the run has published models."""
        recorded_locations = [stage.info.get("published") for stage in self.stages if stage.kind.makes == "publication"]
        return [location for location in dict.fromkeys(recorded_locations) if isinstance(location, str)]


def read_run(path: Path) -> RunRecord:
    """Return the content of the files in a run directory; missing or damaged files raise no error."""
    stage_dicts = list(read_stage_entries(path).values())
    if not stage_dicts and (path / "stages").is_dir():
        stage_dicts = [{"name": folder.name} for folder in sorted((path / "stages").iterdir()) if folder.is_dir()]
    predecessors = {entry["name"]: entry.get("after", ()) for entry in stage_dicts}
    predecessors = {key: (names,) if isinstance(names, str) else tuple(names) for key, names in predecessors.items()}
    start_info, depth_by_stage = read_start_info(path) or RunStartInfo(), _compute_stage_depths(predecessors)
    stages = [_read_stage(path, e, predecessors[e["name"]], depth_by_stage[e["name"]], start_info) for e in stage_dicts]
    name = str(read_pipeline(path).get("name") or start_info.pipeline or "pipeline")
    return RunRecord(path, name, start_info, tuple(sorted(stages, key=lambda stage: stage.depth)))


def read_pipeline(path: Path) -> dict[str, Any]:
    """Return the cached, read-only table `pipeline` of a run's `pipeline.toml`; empty if it is missing or damaged."""
    try:
        pipeline_table = read_toml(path / PIPELINE_FILE).get("pipeline", {})
    except ConfigError:
        return {}
    return pipeline_table if isinstance(pipeline_table, dict) else {}


def read_stage_entries(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entries `[[pipeline.stages]]` in a run's `pipeline.toml` by stage name, without damaged entries."""
    stage_entries = read_pipeline(path).get("stages")
    stage_entries = stage_entries if isinstance(stage_entries, list) else []
    return {e["name"]: e for e in stage_entries if isinstance(e, dict) and isinstance(e.get("name"), str)}


def compute_time_breakdown(run: RunRecord) -> dict[str, float]:
    """Return the seconds of a run's last command: `wall` in total, `inside` with a worker and `overhead` without one.
    Return an empty dict if the start time of the command is unknown."""
    if not run.start_time:
        return {}
    wall_seconds, busy_seconds = max(0.0, run.end_time - run.start_time), compute_busy_seconds(run, run.start_time)
    return {"wall": wall_seconds, "inside": busy_seconds, "overhead": max(0.0, wall_seconds - busy_seconds)}


def compute_busy_seconds(run: RunRecord, start_time: float) -> float:
    """Return the number of seconds since the unix time `start_time` in which at least one worker ran."""
    current_time, busy_seconds, last_end_time = time.time(), 0.0, start_time
    stage_states = [stage.state for stage in run.stages if stage.kind.in_worker]
    for begin, end in sorted(span for state in stage_states for span in state.list_attempt_times(current_time)):
        busy_seconds += max(0.0, end - max(begin, last_end_time))
        last_end_time = max(last_end_time, end)
    return busy_seconds


def render_loading_code(model: Path) -> str:
    """Return the line of Python code that loads the model in the folder `model` with transformers or diffusers."""
    if (model / "model_index.json").is_file():
        model_index = read_json_object(model / "model_index.json")
        loading_call = f"DiffusionPipeline.from_pretrained({str(model)!r}{render_pipeline_arguments(model_index)})"
        return f"from diffusers import DiffusionPipeline; pipe = {loading_call}{render_extra_packages(model_index)}"
    auto_class = "AutoModelForImageTextToText" if any(model.glob("*processor_config.json")) else "AutoModelForCausalLM"
    return f"from transformers import {auto_class}; model = {auto_class}.from_pretrained({str(model)!r})"


def _read_stage(
    run_path: Path, entry: dict[str, Any], predecessors: tuple[str, ...], depth: int, start_info: RunStartInfo
) -> StageRecord:
    name, path = entry["name"], run_path / "stages" / entry["name"]
    result = read_result(path)
    kind_name = str(entry.get("kind") or (result["kind"] if result else ""))
    try:
        stage_kind = parse_stage_kind(start_info.kinds[kind_name])
    except (KeyError, TypeError):  # the recorded kind is damaged or was written by another version
        stage_kind = StageKind(name=kind_name, entry="", result_version=0)
    return StageRecord(
        path=path, name=name, kind=stage_kind, after=predecessors, depth=depth, state=read_state(path),
        progress=read_progress(path), result=result,
        sweep=next(iter(parse_documents([entry["sweep"]], BranchChoice)), None) if entry.get("sweep") else None,
    )  # fmt: skip


def _compute_stage_depths(predecessors: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """Return `StageRecord.depth` by stage name, without recursion, because a chain may have a thousand stages."""
    try:
        sorted_stage_names = [*TopologicalSorter(predecessors).static_order()]
    except CycleError:  # only a damaged `pipeline.toml` has a cycle
        sorted_stage_names = [*predecessors]
    depth_by_stage: dict[str, int] = {}
    for name in (name for name in sorted_stage_names if name in predecessors):
        predecessor_depths = [1 + depth_by_stage[each] for each in predecessors[name] if each in depth_by_stage]
        depth_by_stage[name] = max(predecessor_depths, default=0)
    return depth_by_stage
