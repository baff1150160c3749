"""Run of a Python flow. The pipeline of the run grows by a stage at each call of a task of `tasks`.

The run is named after the flow and its parameters, so executing the flow again continues the run. A call with the
settings of an earlier call uses the stage of that call, and results are reused as in any run.
"""

import atexit
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import FlowRun, State
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger

from cosmos_core.config.capabilities import unique_notices
from cosmos_core.config.compose import Pipeline, append_stage
from cosmos_core.config.load import parse_table
from cosmos_core.config.mesh import resolve_gpu_settings
from cosmos_core.config.schema.pipeline import BUDGET_KEYS, PipelineConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.errors import ConfigError, UploadError
from cosmos_core.launch import worker
from cosmos_core.run.directory import (
    Run,
    claim_run,
    create_run,
    create_writable_folder,
    describe_run_removal,
    extend_run,
    open_run,
    record_flow_run,
    replace_budget,
    try_claim_run,
)
from cosmos_core.run.files import JsonDocument, read_document, write_json
from cosmos_core.run.liveness import record_flow_state
from cosmos_core.run.lock import FileLock
from cosmos_core.run.state import FINISHED_STATES, read_state
from cosmos_core.upload.artifact_store import check_store
from cosmos_core.upload.base import check_targets
from tasks import events
from tasks.artifacts import log_ui_errors, publish_run_report
from tasks.cancellation import confirm_cancellation_at_exit, stop_on_signals, wait_unless_cancelled
from tasks.credentials import set_credentials
from tasks.flow_identity import check_run_of_flow, derive_run_identity, find_flow_source
from tasks.kinds import all_kinds
from tasks.naming import label_flow_run
from tasks.store_sync import OUTPUT_DIR_VARIABLE

_CALLS_FILE = "calls.json"
_POLL_SECONDS = 0.5


class StageCall(JsonDocument):
    """Entry of `calls.json` for one call of a task: the settings of the call, and the stages that it added."""

    stage: dict[str, Any]
    """Keys of `[[pipeline.stages]]` for the stage that the call adds."""
    tables: dict[str, Any]
    """Recipe tables for the stage that the call adds."""
    stages: list[str] = []
    """Names of the stages that the call added, in topological order: the stage itself, and stages added implicitly,
    such as `NAME-data`, which prepares the rows of the stage `NAME`."""


class StageNotAdded(UploadError):
    """Error for a called stage that was not added to the run because a publication target or the artifact store does
    not respond. Its task is not retried; another execution of the flow calls it again."""


class _RecordedCalls(JsonDocument):
    calls: dict[str, StageCall] = {}


@dataclass
class PythonFlowState:
    """State of one execution of a Python flow, and the run to which the execution adds stages."""

    name: str
    flow_run: str
    """Id of the Prefect flow run."""
    run_id: str
    entrypoint: str
    """Import path of the flow, `FILE.py:FLOW`, where FILE is absolute."""
    parameters: dict[str, Any]
    tags: list[str]
    """Tags of the flow run, which its task runs get too."""
    is_subflow: bool = False
    """Whether another flow has called this flow."""
    state: str = "running"
    """State of the flow: `running`, `failed`, `completed`, or empty if it completed without waiting for a stage."""
    run: Run | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the table `[pipeline]` that `configure_run` has set for the run, by key."""
    futures: dict[str, Any] = field(default_factory=dict)
    """Futures of the submitted stages, by the name of the stage."""
    calls: dict[str, tuple[StageCall, Path]] = field(default_factory=dict)
    """Calls of tasks in this execution, each with the file to which relative paths in its recipe refer, by the name of
    the stage."""
    _state_lock: threading.RLock = field(default_factory=threading.RLock)
    _reserved_names: set[str] = field(default_factory=set)
    _num_active_calls: int = 0
    _run_lock: FileLock | None = None
    _watch_thread: threading.Thread | None = None

    def watch_for_cancellation(self) -> None:
        """Start a thread that stops the workers of this process if the flow run is cancelled while stages run."""
        with self._state_lock:
            if self._watch_thread is None:
                context = copy_context()  # a copy, because the thread needs the current flow run of this context
                self._watch_thread = threading.Thread(target=context.run, args=(self._stop_if_cancelled,), daemon=True)
                self._watch_thread.start()

    def _stop_if_cancelled(self) -> None:
        while True:
            with self._state_lock:
                futures = [each.wrapped_future for each in [*self.futures.values()] if not each.wrapped_future.done()]
                if not futures:
                    self._watch_thread = None
                    return
            if wait_unless_cancelled(futures):
                worker.stop_all()
                return

    def reserve_stage_name(self, kind_name: str, name: str) -> str:
        """Reserve and return the name of the stage of a call: `name` or, if it is empty, the kind, with a number from
        the second use on. Raises `ConfigError` if an earlier call of this execution uses the name."""
        with self._state_lock:
            if name in self._reserved_names:
                raise ConfigError(f"stage {name!r}: the name is used twice in flow {self.name!r}; take another one")
            candidate_names = itertools.chain([kind_name], (f"{kind_name}-{number}" for number in itertools.count(2)))
            name = name or next(each for each in candidate_names if each not in self._reserved_names)
            self._reserved_names.add(name)
            return name

    @contextmanager
    def add_stage(self, call: StageCall, source_file: Path) -> Iterator[tuple[Run, list[str]]]:
        """Add the stage of a task call to the run, unless an earlier execution has added it. Yield the run and the
        names of the stages of the call: the stage, and stages that were added implicitly, such as `NAME-data`, which
        prepares its rows. During the `with` block this process claims the run, so that no other process works on it.
        When the last concurrent call ends, write the report and release the run. Raises `ConfigError` if the settings
        are wrong, the run has a finished stage of this name with other settings, or another process works on the run.
        Raises `StageNotAdded` if a publication target or the artifact store does not respond."""
        with worker.register_active_run():
            with self._state_lock:
                self._num_active_calls += 1
            try:
                # Another execution of the flow may work on the run, such as the replacement of a flow run that has lost
                # contact with its server: wait until it has released the run.
                while not self._try_reclaim_run():
                    worker.sleep_unless_stopping(_POLL_SECONDS)
                with self._state_lock:
                    run, stage_names = self._record_call(call, source_file)
                yield run, stage_names
            finally:
                with self._state_lock:
                    self._num_active_calls -= 1
                    if self._num_active_calls == 0 and self._run_lock is not None and self.run is not None:
                        publish_run_report(self.run.path)
                        events.emit_run_over_budget(self.run)
                        self._run_lock.release()
                        self._run_lock = None

    def save_final_state(self, *, is_flow_completed: bool) -> None:
        """Record the final state of the flow, which may have ended long after its last stage."""
        has_waited_for_stages = all(future._final_state is not None for future in self.futures.values())
        with self._state_lock:
            self.state = ("completed" if has_waited_for_stages else "") if is_flow_completed else "failed"
            if self.run is not None:
                record_flow_state(self.run.path, self.state)
                publish_run_report(self.run.path)

    def _try_reclaim_run(self) -> bool:
        with self._state_lock:
            return self.run is None or self._claim_run(self.run, try_claim_run)

    def _record_call(self, call: StageCall, source_file: Path) -> tuple[Run, list[str]]:
        name = call.stage["name"]
        run = self.run or self._find_earlier_run(call, source_file)
        if run is not None:
            self._claim_run(run)
            run = self.run
        calls = ((read_document(run.path / _CALLS_FILE, _RecordedCalls) if run else None) or _RecordedCalls()).calls
        if run is not None:
            if earlier_call := calls.get(name):
                if (earlier_call.stage, earlier_call.tables) == (call.stage, call.tables):
                    return run, earlier_call.stages
                if read_state(run.stage_path(name)).state in FINISHED_STATES:
                    old_settings, new_settings = ({**each.stage, **each.tables} for each in (earlier_call, call))
                    changed_keys = [
                        key
                        for key in {**old_settings, **new_settings}
                        if old_settings.get(key) != new_settings.get(key)
                    ]
                    raise ConfigError(
                        f"stage {name!r} of run {run.id} is done with other settings ({', '.join(changed_keys[:3])}); "
                        "give the call another name, or the flow another run_id"
                    )
                # Remove also the calls whose stages depend on this call: the flow repeats them.
                dependent_names = set[str]().union(*map(run.pipeline.stage_and_dependents, earlier_call.stages))
                calls = {each: other for each, other in calls.items() if dependent_names.isdisjoint(other.stages)}
                # Save the flow's task calls before the pipeline. After a kill in between, no recorded call then has
                # stages in the pipeline whose settings are not those of the call.
                write_json(run.path / _CALLS_FILE, _RecordedCalls(calls=calls).model_dump())
            # Remove stages that no recorded task call of the flow made: the process was killed while it added them.
            recorded_stage_names = {each for other in calls.values() for each in other.stages}
            remaining_stages = [stage for stage in run.pipeline.stages if stage.name in recorded_stage_names]
            remaining_recipes = {stage.name: run.pipeline.recipes[stage.name] for stage in remaining_stages}
            run = replace(run, pipeline=run.pipeline.with_stages(remaining_stages, remaining_recipes))
        run = self._create_or_extend_run(run, call, source_file)
        self._claim_run(run)
        self.run = run
        stages_of_other_calls = {stage_name for other_call in calls.values() for stage_name in other_call.stages}
        call.stages = [stage.name for stage in run.pipeline.stages if stage.name not in stages_of_other_calls]
        write_json(run.path / _CALLS_FILE, _RecordedCalls(calls={**calls, name: call}).model_dump())
        return run, call.stages

    def _claim_run(self, run: Run, acquire_run_lock: Callable[[Run], FileLock | None] = claim_run) -> bool:
        """Claim the run for this process, unless it has claimed it already, and read the stages that another process
        may have added; return False if `acquire_run_lock` returned no lock."""
        if self._run_lock is None:
            self._run_lock, self.run = acquire_run_lock(run), run
            if self._run_lock is None:
                return False
            self.run = open_run(run.path, run.pipeline.stage_kinds)
            record_flow_state(run.path, self.state)
            record_flow_run(run, self.flow_run)
        return True

    def _find_earlier_run(self, call: StageCall, source_file: Path) -> Run | None:
        """Return the run that an earlier execution of this flow created in the same output folder; None: no run. Raise
        `ConfigError` if this run has other settings, or was made from a TOML file."""
        pipeline = self._compose_pipeline(None, call, source_file)
        run_path = create_writable_folder(pipeline.output_dir) / self.run_id
        if not (run_path / "pipeline.toml").is_file():
            return None
        check_run_of_flow(run_path, self.entrypoint)
        run = open_run(run_path, all_kinds())
        saved_config, new_config = run.pipeline.config, pipeline.config
        compared_keys = self.settings.keys() - BUDGET_KEYS - {"output_dir"}
        if changed := [key for key in sorted(compared_keys) if getattr(saved_config, key) != getattr(new_config, key)]:
            raise ConfigError(f"run {run.id} has other settings ({', '.join(changed)}); give the flow another run_id")
        return replace_budget(run, new_config)

    def config(self) -> PipelineConfig:
        """Return the `[pipeline]` settings of the run; raise `ConfigError` for an unknown key or a wrong value."""
        output_dir = os.environ.get(OUTPUT_DIR_VARIABLE) or self.settings.get("output_dir", "")
        pipeline_table = {**self.settings, "name": self.name, "output_dir": output_dir}
        return parse_table(
            PipelineConfig, pipeline_table, error_prefix=f"{self.entrypoint}: configure_run", key_prefix="pipeline"
        )

    def _compose_pipeline(self, run: Run | None, call: StageCall, source_file: Path) -> Pipeline:
        pipeline = run.pipeline if run else Pipeline(source_file, self.config(), {}, all_kinds())
        return resolve_gpu_settings(append_stage(pipeline, call.stage, call.tables, source_file))

    def _create_or_extend_run(self, run: Run | None, call: StageCall, source_file: Path) -> Run:
        pipeline = self._compose_pipeline(run, call, source_file)
        earlier_notices = set(unique_notices(run.pipeline)) if run else set()
        for notice in dict.fromkeys(unique_notices(pipeline)):
            if notice not in earlier_notices:
                get_run_logger().info("note: %s", notice)
        set_credentials(pipeline)
        existing_stage_names = {stage.name for stage in run.pipeline.stages} if run else set()
        try:
            check_targets(
                pipeline.with_stages(stage for stage in pipeline.stages if stage.name not in existing_stage_names)
            )
            check_store(pipeline)
        except UploadError as error:
            raise StageNotAdded(str(error)) from error
        if run is not None:
            return extend_run(run, pipeline)
        new_run = create_run(
            pipeline, run_id=self.run_id, requires_exact_id=True, entrypoint=self.entrypoint, parameters=self.parameters
        )
        if removal_warning := describe_run_removal(new_run):
            get_run_logger().warning(removal_warning)
        return new_run


def current_flow() -> PythonFlowState:
    """Return the state of the Python flow that is being executed. Raises `ConfigError` if no flow is being executed."""
    flow_run_context = FlowRunContext.get()
    if flow_run_context is None or flow_run_context.flow_run is None or flow_run_context.flow is None:
        raise ConfigError("a stage is called in a Prefect flow: decorate the function that calls it with @flow")
    flow_run_attempt_key = f"{flow_run_context.flow_run.id}-{flow_run_context.flow_run.run_count}"
    with _flows_lock:
        if flow_run_attempt_key not in _flows_by_attempt:
            _flows_by_attempt[flow_run_attempt_key] = _create_flow_state(flow_run_context)
        return _flows_by_attempt[flow_run_attempt_key]


def configure_run(**pipeline_settings: Any) -> None:
    """Set keys of `[pipeline]`, such as `artifact_store`, `threads` and `private`, for the run of the current flow.
    Call this before the first stage of the flow. Raises `ConfigError` after a stage call, or for a wrong setting."""
    flow_state = current_flow()
    if flow_state.run is not None:
        raise ConfigError(f"configure_run is called in flow {flow_state.name!r} after its first stage; call it before")
    if bad_keys := sorted({"name", "stages"} & pipeline_settings.keys()):
        raise ConfigError(f"configure_run: {bad_keys[0]} follows from the flow; see `run_id` and the calls of tasks")
    flow_state.settings = {key: value for key, value in pipeline_settings.items() if value is not None}
    flow_state.config()


def find_newest_flow() -> PythonFlowState | None:
    """Return the state of the newest flow of this process that has called a stage, preferably of a flow that no other
    flow has called; None if no flow has called a stage."""
    flow_states = [flow for flow in _flows_by_attempt.values() if flow.run is not None]
    return max(reversed(flow_states), key=lambda flow: not flow.is_subflow, default=None)


def describe_unfinished_stage() -> str:
    """Return a line about a submitted stage that is not done and that no flow waited for; empty if there is none."""
    flows_by_id = {flow.flow_run: flow for flow in _flows_by_attempt.values()}  # keep the last attempt of each flow run
    for stage_name, stage_result_future in (item for flow in flows_by_id.values() for item in flow.futures.items()):
        if stage_result_future._final_state is not None:
            continue
        stage_future = stage_result_future.wrapped_future
        if stage_future.cancelled() or stage_future.exception() or not stage_future.result().is_completed():
            return f"stage {stage_name!r} is not done, and the flow did not wait for it: call .result() of its future"
    return ""


def _create_flow_state(context: FlowRunContext) -> PythonFlowState:
    assert context.flow is not None and context.flow_run is not None
    is_subflow = context.flow_run.parent_task_run_id is not None
    run_id, parameters = derive_run_identity(context.flow, context.parameters or {}, is_subflow=is_subflow)
    flow_name, flow_run_id = context.flow.name, str(context.flow_run.id)
    stop_on_signals(_read_signal_names, _record_flow_stops)
    confirm_cancellation_at_exit()
    tags: list[str] = []
    with log_ui_errors():
        tags = label_flow_run(flow_name, run_id)
    for hooks in (context.flow.on_completion_hooks, context.flow.on_failure_hooks):
        if _record_flow_end not in hooks:
            hooks.append(_record_flow_end)
    flow_file, function_name = find_flow_source(context.flow)
    return PythonFlowState(flow_name, flow_run_id, run_id, f"{flow_file}:{function_name}", parameters, tags, is_subflow)


def _read_signal_names() -> set[str]:
    """Return the names in `train.signal_to_handle` of all stages of the executed flows; without stages, the default."""
    started_runs = [flow.run for flow in [*_flows_by_attempt.values()] if flow.run is not None]
    recipes = [recipe for run in started_runs for recipe in run.pipeline.recipes.values()] or [Recipe()]
    return {name for recipe in recipes for name in recipe.train.signal_to_handle}


def _record_flow_stops() -> None:
    """Record that the unfinished flows of this process were stopped; Prefect calls no hook of such a flow."""
    for flow_state in [*_flows_by_attempt.values()]:
        if flow_state.run is not None and flow_state.state == "running":
            record_flow_state(flow_state.run.path, "stopped")


def _record_flow_end(flow: object, flow_run: FlowRun, state: State[Any]) -> None:
    flow_states = [attempt for attempt in [*_flows_by_attempt.values()] if attempt.flow_run == str(flow_run.id)]
    for attempt in flow_states:
        attempt.save_final_state(is_flow_completed=state.is_completed())
    if started_runs := [attempt.run for attempt in flow_states if attempt.run is not None]:
        events.emit_run_ended(started_runs[-1], has_run_failed=not state.is_completed())


# Record the state at exit, because Prefect calls no hook of a flow that is suspended or has crashed.
atexit.register(_record_flow_stops)
_flows_by_attempt: dict[str, PythonFlowState] = {}
_flows_lock = threading.Lock()
