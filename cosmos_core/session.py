"""Execute one `cosmos run` or `cosmos resume`: start a Prefect server if there is none, run the flow, show progress and
a summary."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from cosmos_core import errors
from cosmos_core.environment import mask_text
from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError, CosmosError, DiskFull, OverBudget, Preempted
from cosmos_core.imports import without_garbage_collection
from cosmos_core.launch.processes import kill_descendants
from cosmos_core.launch.server import prefect_server
from cosmos_core.launch.worker import is_stopping, longest_grace_seconds
from cosmos_core.observe.console import ProgressDisplay, print_summary
from cosmos_core.observe.logs import add_log_silencing_variables, configure_logging
from cosmos_core.observe.record import read_run
from cosmos_core.observe.resuming import make_resume_instructions
from cosmos_core.parent import adopt_orphans
from cosmos_core.registry import find_error_location
from cosmos_core.run.directory import Run
from cosmos_core.run.files import SHARED_FOLDER, find_disk_error, make_disk_full_error
from cosmos_core.run.liveness import record_flow_state, record_stop
from cosmos_core.run.process import identify_process
from cosmos_core.run.progress import read_progress
from cosmos_core.run.state import FINISHED_STATES, StageState, read_state

_DISPLAY_UPDATE_SECONDS = 0.3
_LOG_DRAIN_TIMEOUT_SECONDS = 5.0


def run_session(
    server_stack: ExitStack, wait_for_server: Callable[[], None], run: Run, from_stage: str, verify: bool
) -> int:
    """Run the flow `post-train` for `run` in this process, stop the Prefect server by closing `server_stack`, and
    return the exit code. `from_stage` and `verify` are parameters of the flow."""
    _configure_logging_and_signals()
    stage_names = [stage.name for stage in run.pipeline.stages]
    is_run_interrupted, failure_reason = False, ""
    with ProgressDisplay(stage_names) as progress_display, _keep_display_updated(lambda: run, progress_display):
        progress_display.print_message(f"run {run.id} in {run.path}")
        try:
            with server_stack:
                with without_garbage_collection():
                    post_train = import_module("flows.post_train").post_train
                wait_for_server()
                flow_parameters = {"config": str(run.path), "from_stage": from_stage, "verify": verify}
                failure_reason = _run_until_ended(partial(post_train, **flow_parameters, return_state=True), run.path)
        except (KeyboardInterrupt, Preempted):
            is_run_interrupted = True
            record_stop(run.path, stage_names)
    kill_descendants()
    print_summary(run.path)
    exit_code = errors.EXIT_PREEMPTED if is_run_interrupted else derive_exit_code(run)
    stage_states = [read_state(run.stage_path(stage.name)) for stage in run.pipeline.stages]
    over_budget_message = next((state.error for state in stage_states if state.is_over_budget), "")
    if exit_code == errors.EXIT_PREEMPTED and over_budget_message:
        _print_message(over_budget_message)
        return exit_code
    if exit_code == errors.EXIT_PREEMPTED and failure_reason and not is_run_interrupted:
        # Report a crash instead of a preemption, because the flow itself failed, although no stage did.
        exit_code = errors.EXIT_CRASH
        _print_message(failure_reason)
    _print_failures(run, exit_code)
    return exit_code


def run_python_flow(
    server_stack: ExitStack, wait_for_server: Callable[[], None], entrypoint: str, parameters: Mapping[str, Any]
) -> int:
    """Run the flow `entrypoint` (`FILE.py:FLOW`) in this process, stop the Prefect server by closing `server_stack`,
    and return the exit code. Raises `ConfigError` if there is no such flow or parameter, and any `CosmosError` of the
    flow."""
    _configure_logging_and_signals()
    raised_error: CosmosError | None = None
    is_run_interrupted, failure_reason = False, ""
    with server_stack:
        wait_for_server()
        flow, get_current_flow = import_python_flow(entrypoint)
        if flow.should_validate_parameters:
            import_module("tasks.flow_identity").derive_name_and_parameters(flow, parameters)

        def get_current_run() -> Run | None:
            return current_state.run if (current_state := get_current_flow()) else None

        def run_flow() -> Any:
            flow_state = flow(**parameters, return_state=True)
            return asyncio.run(flow_state) if flow.isasync else flow_state

        with ProgressDisplay([]) as progress_display, _keep_display_updated(get_current_run, progress_display):
            try:
                failure_reason = _run_until_ended(run_flow, Path.cwd(), flow.fn)
                failure_reason = failure_reason or import_module("tasks.flow_run").describe_unfinished_stage()
            except OverBudget as over_budget:
                raised_error = over_budget
            except (KeyboardInterrupt, Preempted):
                is_run_interrupted = True
                if (interrupted_run := get_current_run()) is not None:
                    record_flow_state(interrupted_run.path, "stopped")
            except CosmosError as cosmos_error:
                raised_error = cosmos_error
    kill_descendants()
    import_module("tasks.cancellation").confirm_cancellations()
    run = get_current_run()
    if run is not None:
        print_summary(run.path)
    if is_run_interrupted:
        _print_message(f"stopped; the same command continues {f'run {run.id}' if run else 'it'}")
        return errors.EXIT_PREEMPTED
    if raised_error is not None:
        raise raised_error
    if failure_reason:
        _print_message(failure_reason)
    return errors.EXIT_CRASH if failure_reason else errors.EXIT_OK


def import_python_flow(entrypoint: str) -> tuple[Any, Callable[[], Any]]:
    """Return the flow at an entrypoint, and a function that returns the `PythonFlowState` of its newest execution in
    this process. Raises `ConfigError` if there is no such flow, or its module raises an error."""
    with without_garbage_collection():
        from prefect.exceptions import MissingFlowError, ScriptError
        from prefect.flows import load_flow_from_entrypoint

        from tasks.flow_run import find_newest_flow

        def make_config_error(flow_error: Exception) -> ConfigError:
            original_error = (
                flow_error.__cause__ if isinstance(flow_error, ScriptError) and flow_error.__cause__ else flow_error
            )
            error_location = f" ({find_error_location(original_error)})" if original_error is not flow_error else ""
            class_prefix = "" if isinstance(original_error, MissingFlowError) else f"{type(original_error).__name__}: "
            return ConfigError(f"{entrypoint}: {class_prefix}{original_error}{error_location}")

        with convert_errors(make_config_error, ()):
            # `False`: Prefect raises an error in the file instead of executing as much of the file as it can.
            return load_flow_from_entrypoint(_make_module_entrypoint(entrypoint), False), find_newest_flow


def _make_module_entrypoint(entrypoint: str) -> str:
    """Return `PACKAGE.MODULE:FLOW` for an entrypoint in a file of a package, since relative imports need the package,
    and make the package importable; return any other entrypoint unchanged."""
    flow_file, _, flow_name = entrypoint.rpartition(":")
    package_parent, module_name_parts = Path(flow_file).absolute().parent, [Path(flow_file).stem]
    while (package_parent / "__init__.py").is_file():
        package_parent, module_name_parts = package_parent.parent, [package_parent.name, *module_name_parts]
    if len(module_name_parts) == 1:
        return entrypoint
    sys.path.insert(0, str(package_parent))
    return f"{'.'.join(module_name_parts)}:{flow_name}"


def _configure_logging_and_signals() -> None:
    configure_logging("WARNING")
    for handler in logging.getLogger().handlers:
        # The end of each stage is displayed separately, so records of Prefect's flow and task runs are hidden.
        handler.addFilter(lambda log_record: not log_record.name.startswith(("prefect.task_runs", "prefect.flow_runs")))
    # Raise KeyboardInterrupt, as Ctrl-C does: a library that is being imported might catch another error.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def derive_exit_code(run: Run) -> int:
    """Return the exit code of a run, from the states of all its stages."""
    stage_states = [read_state(run.stage_path(stage.name)) for stage in run.pipeline.stages]
    failed_exit_codes = {stage_state.exit_code for stage_state in stage_states if stage_state.state == "failed"}
    for exit_code in (errors.EXIT_USAGE, errors.EXIT_CRASH, errors.EXIT_REFUSED):
        if exit_code in failed_exit_codes:
            return exit_code
    is_run_finished = all(stage_state.state in FINISHED_STATES for stage_state in stage_states)
    return errors.EXIT_OK if is_run_finished else errors.EXIT_PREEMPTED


def _print_failures(run: Run, exit_code: int) -> None:
    """Write to standard error which stages failed, and the command that resumes the run if a resume with the same
    settings can help."""
    for stage in run.pipeline.stages:
        stage_state = read_state(run.stage_path(stage.name))
        if stage_state.state == "failed":
            _print_message(f"{stage.name}: {stage_state.error or 'failed'}")
    if exit_code == errors.EXIT_REFUSED:
        remedy = "change the training or `require`, then cosmos run; what stays the same is reused"
        _print_message(f"run {run.id} ends here, and resuming it would end the same way: {remedy}")
    elif exit_code not in {errors.EXIT_OK, errors.EXIT_USAGE}:
        resume_instructions = make_resume_instructions(read_run(run.path))
        _print_message(f"run {run.id} is not complete; continue it with: {resume_instructions}")


def _print_message(message: str) -> None:
    sys.stderr.write(f"cosmos: {mask_text(' '.join(message.split()))}\n")  # a user's errors may contain secrets


def _run_until_ended(run_flow: Callable[[], Any], run_folder: Path, flow_fn: Any = None) -> str:
    """Call `run_flow`, which returns the state of a flow. Return the reason why the flow did not complete, or an empty
    string; the reason has the location of an error that the user's flow function `flow_fn` raised. Raises `Preempted`
    if the flow was stopped or cancelled, and any `CosmosError` of the flow."""
    from prefect.events.worker import EventsWorker
    from prefect.exceptions import TerminationSignal, UnfinishedRun
    from prefect.logging.handlers import APILogWorker

    try:
        flow_state: Any = run_flow()
    except TerminationSignal as error:
        raise Preempted("asked to stop") from error
    except Exception as error:  # noqa: BLE001 - the Prefect server does not respond, or its disk is full too
        failure_cause = make_disk_full_error(error, run_folder) or find_disk_error(run_folder) or error
        return f"{'' if isinstance(failure_cause, DiskFull) else 'Prefect: '}{failure_cause}"
    finally:
        # Send all records now: at exit Prefect would wait a minute for the server, which has stopped by then.
        APILogWorker.drain_all(timeout=_LOG_DRAIN_TIMEOUT_SECONDS)
        EventsWorker.drain_all(timeout=_LOG_DRAIN_TIMEOUT_SECONDS)
    if flow_state.is_cancelled():
        raise Preempted("its flow run was cancelled")
    flow_result = getattr(flow_state.data, "result", flow_state.data)
    if isinstance(flow_result, CosmosError):
        raise flow_result
    if isinstance(flow_result, UnfinishedRun):
        return "a stage was called with the future of a stage that failed"
    if flow_state.is_completed():
        return ""
    has_error_traceback = isinstance(flow_result, Exception) and flow_result.__traceback__ is not None
    has_error_location = flow_fn is not None and has_error_traceback and flow_state.name != "TimedOut"
    error_location = f" ({find_error_location(flow_result, flow_fn)})" if has_error_location else ""
    return f"{flow_state.message}{error_location}"


@contextmanager
def open_session(output_dir: Path, session_body: Callable[..., int] = run_session) -> Iterator[Callable[..., int]]:
    """Start a Prefect server with its data below `output_dir`; yield `session_body` with its first two arguments bound:
    the `ExitStack` that stops the server, and a function that waits until the server responds, which takes seconds."""
    os.environ.update(add_log_silencing_variables(os.environ))
    # Send Prefect's own log lines only to the Prefect server, because the display already shows the progress.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    if not os.access(os.path.expanduser("~"), os.W_OK):
        # Without a writable home folder, matplotlib would leave a temporary folder in /tmp at each run.
        os.environ.setdefault("MPLCONFIGDIR", str(output_dir.absolute() / SHARED_FOLDER / "matplotlib"))
    # Adopt workers whose supervisor was killed, so that `kill_descendants` can end them.
    adopt_orphans()
    with ExitStack() as server_stack:
        wait_for_server = server_stack.enter_context(prefect_server(output_dir / SHARED_FOLDER))
        yield partial(session_body, server_stack, wait_for_server)


@contextmanager
def _keep_display_updated(get_current_run: Callable[[], Run | None], display: ProgressDisplay) -> Iterator[None]:
    """Update the progress display during the `with` block from the files of the run, which the processes that run
    stages write."""
    finished_event, launcher, shown_failures = threading.Event(), identify_process(), set[tuple[str, int]]()

    def has_failed_attempt(run: Run, name: str, state: StageState) -> bool:
        """Return True if a stage of this process has failed, and is about to be retried."""
        if state.state != "failed" or finished_event.is_set() or state.model_dump(include={*launcher}) != launcher:
            return False
        error = errors.ERRORS_BY_NAME.get(state.error_type, errors.StageFailed)(state.error)
        return bool(import_module("tasks.stage").should_retry(run, name, error))

    def update_display() -> None:
        if (run := get_current_run()) is None:
            return
        try:
            for stage in run.pipeline.stages:
                path = run.stage_path(stage.name)
                state = read_state(path)
                status = "retrying" if has_failed_attempt(run, stage.name, state) else state.status
                if status == "retrying" and (failed_attempt := (stage.name, state.attempt)) not in shown_failures:
                    shown_failures.add(failed_attempt)
                    display.print_message(f"{stage.name}  attempt {state.attempt} failed: {state.error}")
                display.update(stage.name, status, read_progress(path))
        except BrokenPipeError:  # the reader of the output has ended, as in `cosmos run | head`; let the run go on
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def update_periodically() -> None:
        has_announced_stop = False
        while not finished_event.wait(_DISPLAY_UPDATE_SECONDS):
            update_display()
            if is_stopping() and not has_announced_stop:
                has_announced_stop = True
                run = get_current_run()
                grace_seconds = longest_grace_seconds() or (run.pipeline.config.grace_seconds if run else 0.0)
                display.print_message(f"stopping, saving a checkpoint: at most {grace_seconds:.0f} s")

    update_thread = threading.Thread(target=update_periodically, name="watch", daemon=True)
    update_thread.start()
    try:
        yield
    finally:
        finished_event.set()
        update_thread.join()
        update_display()
