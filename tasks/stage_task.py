"""Stage kinds as Prefect tasks that a Python flow calls: `model = sft("sft.toml", data=rows)`.

A call adds a stage to the run of the flow and runs it, as the flow `post-train` does with a stage of a TOML file: with
fingerprint and reuse, lock, retries, work pool, artifact store, report and lineage.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from prefect import Task, tags
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext, TaskRunContext
from prefect.futures import PrefectConcurrentFuture, PrefectFutureList
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.callables import expand_mapping_parameters, get_call_parameters

from cosmos_core.config.compose import Pipeline
from cosmos_core.config.files import read_config
from cosmos_core.config.inputs import STAGE_PREFIX, referenced_stage
from cosmos_core.config.load import TomlTable, merge_tables, nest_value
from cosmos_core.config.override import split_key
from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.error_handling import cleanup_on_error
from cosmos_core.errors import Cancelled, ConfigError
from cosmos_core.launch import worker
from cosmos_core.run.directory import Run
from cosmos_core.run.manifest import read_result
from cosmos_core.types import StageKind
from tasks.cancellation import is_cancelled, raise_if_suspended, wait_unless_cancelled
from tasks.final_states import make_failed_state
from tasks.flow_identity import to_json_values
from tasks.flow_run import PythonFlowState, StageCall, StageNotAdded, current_flow
from tasks.kinds import all_kinds
from tasks.stage import MAX_RETRIES, make_stage_task, produce_result, should_retry


@dataclass(frozen=True)
class StageHandle:
    """Handle of a finished stage in the run of a Python flow, returned by the task of the stage; a flow passes it to
    later calls and uses its metrics in conditions."""

    name: str
    path: Path
    """Folder of the stage in the run directory."""
    metrics: dict[str, float]
    outputs: dict[str, str]
    """Folder or URL of the model and of the data that the stage made, with the keys `model` and `data`."""


class StageTask(Task[Any, StageHandle]):
    """Task that adds one stage of a kind to the run of the flow, and runs the stage.

    Call it with these arguments, all optional; `.submit()` takes the same and runs the stage in parallel:

        recipe: TOML file, relative to the file of the flow or to the working directory, or a dict of recipe tables;
            left out: the recipe of the stage that made `model`
        model: handle of the stage whose model to start from, or a folder or a name on the Hub
        data: handle of the stage that made the rows, or a folder
        name: name of the stage; left out: the kind, with a number after its first use
        overrides: recipe settings that take precedence, by dotted key or as nested tables
        after: handles of further stages that the stage reads, such as those whose metrics a gate compares
        any key of `[[pipeline.stages]]`, such as `target`, `require`, `entry`, `arguments`, `work_pool`, `retries`
        any key of the recipe table of the kind, such as `keep` of `[sample]`

    The first argument can be positional: it is the `entry` of a custom stage, the `recipe` of a stage that reads rows,
    the `model` of an export or an upload, and `after` for any other kind. Returns a `StageHandle`.

    Raises:
        CosmosError: the stage is refused, or failed after its retries.
    """

    def __init__(self, kind: StageKind) -> None:
        super().__init__(
            fn=_make_stage_function(kind), name=kind.name, task_run_name="{name}", retries=MAX_RETRIES,
            retry_condition_fn=_should_retry_task, cache_policy=NO_CACHE, persist_result=False
        )  # fmt: skip
        self.kind = kind

    def submit(self, *arguments: Any, name: str = "", return_state: bool = False, **settings: Any) -> Any:
        """Run the stage in parallel to the flow, and return a Prefect future of its `StageHandle` or, if `return_state`
        is true, wait and return its final state. A cancelled flow run stops the stage within seconds."""
        stage_future = self._submit(*arguments, name=name, **settings)
        current_flow().watch_for_cancellation()
        if return_state:
            stage_future.wait()
            return stage_future.state
        return stage_future

    def _submit(self, *arguments: Any, name: str = "", **settings: Any) -> Any:
        flow_state, flow_context = current_flow(), FlowRunContext.get()
        if flow_context and not isinstance(flow_context.task_runner, ThreadPoolTaskRunner):
            raise ConfigError(
                f"flow {flow_state.name!r} has a {type(flow_context.task_runner).__name__}, but a stage is submitted "
                "to a thread, which starts its process; leave task_runner out, or take ThreadPoolTaskRunner"
            )
        name = flow_state.reserve_stage_name(self.kind.name, name)
        with ExitStack() as stack, tags(*flow_state.tags):
            # Register an active run until the stage has ended, so that a stop request before its start is not lost.
            stack.enter_context(worker.register_active_run())
            stage_future = super().submit(*arguments, name=name, **settings)
            run_registration = stack.pop_all()
            stage_future.wrapped_future.add_done_callback(lambda _: run_registration.close())
        flow_state.futures[name] = stage_future
        return stage_future

    def map(self, *arguments: Any, wait_for: Any = None, return_state: bool = False, **settings: Any) -> Any:
        """Submit one stage for each element of the arguments that are lists, which must have equal lengths; other
        arguments are the same for all stages. Return the futures in the order of the lists or, if `return_state` is
        true, wait and return the final states."""
        parameters = get_call_parameters(self.fn, arguments, settings, apply_defaults=False)
        stage_futures = []
        for call in expand_mapping_parameters(self.fn, parameters):
            stage_settings = {"name": call["name"], "overrides": call["overrides"], **call.get("settings", {})}
            stage_futures.append(self.submit(call["first"], wait_for=wait_for, **stage_settings))
        if not return_state:
            return PrefectFutureList(stage_futures)  # type: ignore[abstract]
        for stage_future in stage_futures:
            stage_future.wait()
        return [stage_future.state for stage_future in stage_futures]

    def with_options(self, **prefect_options: Any) -> Any:
        """Return a task of the same stage kind with other options of Prefect, such as `tags` and `on_failure`."""
        task_copy = object.__new__(StageTask)
        task_copy.__dict__ |= super().with_options(**prefect_options).__dict__ | {"kind": self.kind}
        return task_copy

    def __call__(self, *arguments: Any, return_state: bool = False, **settings: Any) -> Any:
        """Run the stage until it ends; return its `StageHandle` or, if `return_state` is true, its final state."""
        current_flow()  # raises an error if no flow is running
        flow_context: Any = FlowRunContext.get()
        # Use a thread of its own: tasks of the user that call stages may occupy all threads of the flow's task runner.
        with ThreadPoolTaskRunner[Any](1) as task_runner, flow_context.model_copy(update={"task_runner": task_runner}):
            stage_future: PrefectConcurrentFuture[StageHandle] = self._submit(*arguments, **settings)
            # If an error such as a timeout ends the wait, stop the workers, and wait until the stage has ended.
            with cleanup_on_error(stage_future.wait), cleanup_on_error(worker.stop_all):
                if wait_unless_cancelled([stage_future.wrapped_future]):
                    raise_if_suspended()
                    raise Cancelled("the flow run was cancelled")
            stage_future.wait()
        return stage_future.state if return_state else stage_future.result()


@cache
def get_stage_task(kind: str) -> StageTask:
    """Return the Prefect task of a stage kind."""
    return StageTask(all_kinds()[kind])


def _should_retry_task(_prefect_task: object, _task_run: object, state: State[Any]) -> bool:
    run, error = current_flow().run, getattr(state.data, "result", state.data)
    task_run_context = TaskRunContext.get()
    if run is None or task_run_context is None or isinstance(error, StageNotAdded):
        return False
    return should_retry(run, task_run_context.parameters["name"], error)


def _make_stage_function(kind: StageKind) -> Callable[..., Any]:
    def call_stage(first: Any = None, *, name: str = "", overrides: Mapping[str, Any] = {}, **settings: Any) -> Any:
        try:
            if first is not None:
                key = _find_stage_key_of_first_argument(kind)
                if key in settings:
                    raise ConfigError(f"stage {name!r}: the first argument is its {key}, which is given twice")
                settings[key] = first
            flow = current_flow()
            if name not in flow.calls:
                # Read the recipe only once, so that a retry of the task uses the recipe that the first attempt read.
                flow.calls[name] = _make_call(flow, kind, name, settings, overrides or {})
            call, source_file = flow.calls[name]
            with flow.add_stage(call, source_file) as (run, stages):
                return _run_tasks_of_call(run, name, stages)
        except (ConfigError, StageNotAdded) as error:
            return make_failed_state(error)

    call_stage.__name__ = kind.name
    return call_stage


def _find_stage_key_of_first_argument(kind: StageKind) -> str:
    """Return the key of a stage that the first positional argument of its task sets, which depends on the kind."""
    for key in ("entry", "after"):
        if key in kind.required_keys:
            return key
    if kind.reads_data or kind.makes == "metrics":
        return "recipe"
    return "model" if kind.makes in {"model", "publication"} and not kind.selects_branch else "after"


def _run_tasks_of_call(run: Run, name: str, stage_names: Sequence[str]) -> State[Any] | StageHandle:
    """Run `stage_names` in topological order: the stage `name`, and stages that its call added implicitly, such as
    `NAME-data`, each as a task. Return the handle of the stage `name`, or the final state of the first stage without a
    result. Raises `CosmosError` if an attempt of the stage `name` failed and is to be retried."""
    if is_cancelled():
        raise Cancelled("the flow run was cancelled")
    outcome_by_stage: dict[str, Any] = {}
    for stage_name in stage_names:
        is_called_stage = stage_name == name
        outcome = (
            produce_result(run, name) if is_called_stage else make_stage_task(run, stage_name, {})(return_state=True)
        )
        if isinstance(outcome, State) and not outcome.is_completed():
            return outcome
        outcome_by_stage[stage_name] = outcome
    stage_path, state = run.stage_path(name), outcome_by_stage.get(name)
    result = read_result(stage_path)
    assert result is not None
    output_paths = {key: str(result["info"][key]) for key in ("model", "data") if result["info"].get(key)}
    outputs = {key: value if "://" in value else str(stage_path / value) for key, value in output_paths.items()}
    handle = StageHandle(name, stage_path, dict(result["metrics"]), outputs)
    return Completed(name=state.name, message=state.message, data=handle) if isinstance(state, State) else handle


def _make_call(
    flow: PythonFlowState, kind: StageKind, name: str, settings: dict[str, Any], overrides: Mapping[str, Any]
) -> tuple[StageCall, Path]:
    """Return the `StageCall` for the arguments of a task, and the file to which relative paths in its recipe refer."""
    recipe, after = settings.pop("recipe", None), settings.pop("after", ())
    for key, remedy in (("sweep", "a sweep is a loop of the flow"), ("kind", "call the task of that kind")):
        if key in settings:
            raise ConfigError(f"stage {name!r}: {key} is no argument of a task; {remedy}")
    if isinstance(recipe, StageHandle):
        raise ConfigError(f"stage {name!r}: recipe is the handle of {recipe.name!r}; pass it as model, data or after")
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"stage {name!r}: overrides = {overrides!r} is no dict such as {{'train.optm_lr': 1e-5}}")
    predecessor_handles = [after] if isinstance(after, StageHandle | str) else after or ()
    predecessors = [_get_stage_name(flow, name, "after", stage_handle) for stage_handle in predecessor_handles]
    if recipe in (None, "") and flow.run is not None:
        pipeline = flow.run.pipeline
        if isinstance(settings.get("model"), StageHandle):
            model_stage_name = _get_stage_name(flow, name, "model", settings["model"])
            recipe = pipeline.recipes[model_stage_name].model_dump(mode="json", exclude_none=True)
        elif kind.merges_models and predecessors and "model" not in settings:
            # By default, the base model and the recipe of a merge are those of the stage that began the first model.
            source_stage = _find_merge_source(pipeline, predecessors)
            settings["model"] = source_stage.model
            predecessors += filter(None, [referenced_stage(source_stage.model)])
            recipe = pipeline.recipes[source_stage.name].model_dump(mode="json", exclude_none=True)
            if source_stage.kind == kind.name:  # an earlier merge: its table `[merge]` is about other models
                recipe.pop(kind.table, None)
    recipe_tables, source_file = _read_recipe(flow, name, recipe)
    for key, value in overrides.items():
        recipe_tables = merge_tables(recipe_tables, nest_value(split_key(key), value))
    stage_table: TomlTable = {"name": name, "kind": kind.name, "after": predecessors}
    recipe_table_keys = Recipe.model_fields[kind.table].annotation.model_fields if kind.table else {}  # type: ignore[union-attr]
    for key, value in settings.items():
        if key in recipe_table_keys:
            recipe_tables = merge_tables(recipe_tables, {kind.table: {key: value}})
        elif isinstance(value, StageHandle):
            stage_table[key] = f"{STAGE_PREFIX}{_get_stage_name(flow, name, key, value)}"
            predecessors.append(value.name)
        elif key == "entry" and callable(value):
            stage_table[key] = _make_import_path(name, value)
        elif value not in ("", None):
            stage_table[key] = value
    stage_table["after"] = list(dict.fromkeys(predecessors))
    for key, value in {**stage_table, **recipe_tables}.items():
        if stage_handle := _find_stage_handle(value):
            raise ConfigError(
                f"stage {name!r}: {key} contains the handle of {stage_handle.name!r}; pass one of its values, such as "
                f"handle.outputs['model'] or handle.metrics"
            )
    return StageCall(**to_json_values({"stage": stage_table, "tables": recipe_tables})), source_file


def _find_merge_source(pipeline: Pipeline, merged_stages: Sequence[str]) -> StageConfig:
    """Return the stage whose initial model is the base model of a merge: the stage with which the trainings of the
    first merged model began. The search goes back from the first merged stage, over exports and over stages that start
    from another merged model."""
    stage = pipeline.stage(merged_stages[0])
    while name := referenced_stage(pipeline.initial_model(stage)):
        if name not in merged_stages and stage.model and not pipeline.stage_kind(stage).reads_key("export.formats"):
            break
        stage = pipeline.stage(name)
    return stage


def _find_stage_handle(value: Any) -> StageHandle | None:
    if isinstance(value, StageHandle):
        return value
    container_items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(_find_stage_handle, container_items)), None)


def _read_recipe(flow: PythonFlowState, name: str, recipe: Any) -> tuple[TomlTable, Path]:
    """Return the recipe tables that the argument `recipe` of a task contains, and the file to which relative paths in
    the tables refer. `recipe` is a TOML file, a dict of tables, or None for no tables."""
    flow_file = Path(flow.entrypoint.rpartition(":")[0])
    if not recipe or isinstance(recipe, Mapping):
        return dict(recipe or {}), flow_file
    source_file = next(filter(Path.is_file, (flow_file.parent / recipe, Path.cwd() / recipe)), None)
    if source_file is None:
        problem_text = f"no such file, neither beside {flow_file.parent.name} nor in {Path.cwd()}"
        raise ConfigError(f"stage {name!r}: recipe = {str(recipe)!r}: {problem_text}")
    recipe_tables, _ = read_config(source_file, [])
    if "pipeline" in recipe_tables:
        raise ConfigError(f"{source_file}: a recipe used by a stage cannot have a [pipeline] of its own")
    return recipe_tables, source_file


def _make_import_path(name: str, function: Callable[..., Any]) -> str:
    """Return the import path `FILE.py:FUNCTION` of the function that is the `entry` of the stage `name`."""
    unwrapped_function = inspect.unwrap(function)
    if unwrapped_function is not function and unwrapped_function.__globals__.get(function.__qualname__) is not function:
        raise ConfigError(f"stage {name!r}: {function.__qualname__} was decorated elsewhere; do it where it is defined")
    return f"{inspect.getsourcefile(unwrapped_function)}:{function.__qualname__}"


def _get_stage_name(flow_state: PythonFlowState, name: str, argument_name: str, stage_handle: StageHandle | str) -> str:
    """Return the name of the stage to which a handle, a name or a reference `stage:NAME` refers. Raises `ConfigError`
    if the handle belongs to a stage of another run."""
    if isinstance(stage_handle, str):
        return stage_handle.removeprefix(STAGE_PREFIX)
    run = flow_state.run
    if run is None or stage_handle.path.parents[1] != run.path:
        raise ConfigError(
            f"stage {name!r}: {argument_name} is the handle of {stage_handle.name!r}, a stage of another run "
            f"({stage_handle.path.parents[1].name}); pass what it made, such as handle.outputs['model']"
        )
    return stage_handle.name
