"""Run stages as Prefect tasks: reuse a verified result, or launch a worker, verify its output and publish the result.

This module decides about reuse instead of Prefect, whose cache returns a result without verifying its files. The number
of retries in Prefect is practically unlimited: only `should_retry`, which reads `state.json`, decides about retries.
"""

import logging
import os
import threading
import time
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from prefect import tags, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.states import Completed
from prefect.utilities.annotations import allow_failure

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.environment import environment_for_user_code
from cosmos_core.error_handling import cleanup_on_error, convert_errors
from cosmos_core.errors import (
    EXIT_REFUSED,
    EXIT_USAGE,
    Cancelled,
    CosmosError,
    DiskFull,
    GateFailed,
    OverBudget,
    Preempted,
    StageFailed,
)
from cosmos_core.launch import gpus, worker
from cosmos_core.launch.processes import remove_orphans
from cosmos_core.launch.slots import hold_semaphore, make_branch_semaphores
from cosmos_core.registry import import_object
from cosmos_core.run import manifest
from cosmos_core.run.directory import Run, record_flow_run
from cosmos_core.run.files import make_disk_full_error, warn_if_disk_full
from cosmos_core.run.fingerprint import Fingerprint, count_worker_threads
from cosmos_core.run.gpu_time import add_gpu_time_to_result, record_gpu_time
from cosmos_core.run.lock import FileLock, open_stage_lock
from cosmos_core.run.manifest import Result, read_result
from cosmos_core.run.plan import get_reuse_folder, register_result
from cosmos_core.run.process import identify_process
from cosmos_core.run.progress import ProgressRecord
from cosmos_core.run.state import FINISHED_STATES, read_state, record_event, record_failure, update_state
from cosmos_core.upload.checkpoint_upload import checkpoint_url, upload_checkpoints_in_background
from tasks import events
from tasks.artifacts import StageArtifacts, log_ui_errors, publish_run_report
from tasks.budget import BudgetCheck
from tasks.cancellation import is_cancelled, stop_stages, terminate_on_signals, wait_unless_cancelled
from tasks.credentials import set_credentials
from tasks.final_states import derive_flow_state, has_result, make_failed_state, make_skipped_state
from tasks.layout import prepare_stage_folder
from tasks.naming import label_flow_run
from tasks.publication import check_models_approved
from tasks.remote_stage import compute_backoff_seconds, count_lost_child_run, run_remote_stage
from tasks.reuse import compute_local_fingerprint, find_result
from tasks.reward_service import reward_service
from tasks.store_sync import StageSync

logger = logging.getLogger(__name__)

_MAX_NAMED_STAGES = 3  # maximum number of stages that the name of a flow run lists
MAX_RETRIES = 100_000  # practically unlimited: `should_retry` decides about retries


@worker.register_active_run()
def run_stages(run: Run, stage_names: Sequence[str], *, is_local: bool = False) -> State[Any]:
    """Run the stages `stage_names`, in topological order, until each has its result, independent stages in parallel.
    Return the final state of the flow run. If the flow run is cancelled or terminated, the workers save a checkpoint
    and the flow waits for them. With `is_local`, this process runs on the work pool of the stages; otherwise each stage
    runs on its work pool."""
    remove_orphans()
    set_credentials(run.pipeline)
    task_tags: list[str] = []
    with log_ui_errors():
        flow_run_name_suffixes = stage_names if len(stage_names) < len(run.pipeline.stages) else ()
        if len(flow_run_name_suffixes) > _MAX_NAMED_STAGES:
            flow_run_name_suffixes = stage_names[0], "to", stage_names[-1]
        run_tags = label_flow_run(run.pipeline.config.name, run.id, *flow_run_name_suffixes)
        # The task of the parent flow run has the same tags: a concurrency limit on one would never let this task begin.
        task_tags = [] if is_local and flow_run.parent_flow_run_id else run_tags
    if flow_run.id and not is_local:
        record_flow_run(run, flow_run.id)
    futures: dict[str, PrefectConcurrentFuture[Any]] = {}
    semaphores = make_branch_semaphores(run.pipeline)
    # Stop the stages in the main thread, because only it receives signals, while the tasks wait in other threads.
    with cleanup_on_error(lambda: stop_stages(run, list(futures.values()))), tags(*task_tags):
        terminate_on_signals(run)
        for name in stage_names:
            upstream_futures = {other: futures[other] for other in run.pipeline.stage(name).after if other in futures}
            stage_task = make_stage_task(run, name, upstream_futures, is_local=is_local, semaphore=semaphores.get(name))
            futures[name] = stage_task.submit(wait_for=[allow_failure(future) for future in upstream_futures.values()])
        was_flow_run_cancelled = wait_unless_cancelled([future.wrapped_future for future in futures.values()])
        if was_flow_run_cancelled:
            get_run_logger().warning("the flow run was cancelled or suspended: its stages are asked to stop")
            stop_stages(run, list(futures.values()))
    # Ask the server again: a stage can have stopped for a cancellation before this flow noticed it, and the server
    # accepts no other final state than Cancelled from a cancelled flow run.
    was_flow_run_cancelled = was_flow_run_cancelled or bool(is_cancelled(repeats_requests=True))
    final_state = derive_flow_state(run, futures, is_cancelled=was_flow_run_cancelled)
    if not is_local:
        publish_run_report(run.path)
        events.emit_run_over_budget(run)
        events.emit_run_ended(run, has_run_failed=not final_state.is_completed())
    return final_state


def make_stage_task(
    run: Run,
    name: str,
    upstream_futures: Mapping[str, PrefectFuture[Any]],
    *,
    is_local: bool = False,
    semaphore: threading.Semaphore | None = None,
) -> Any:
    """Return a Prefect task that runs the stage `name` until it has its result. A call of `.submit()` first waits for
    `upstream_futures`, whether they succeed or fail. The run is no parameter of the task, because opening it in each
    task takes time quadratic in the number of stages. The stage holds `semaphore` while it runs; `is_local`: as for
    `run_stages`."""

    def retry_condition(_prefect_task: object, _task_run: object, state: State[Any]) -> bool:
        return should_retry(run, name, getattr(state.data, "result", state.data))

    @task(
        name=name, task_run_name=name, retries=MAX_RETRIES, retry_condition_fn=retry_condition, cache_policy=NO_CACHE,
        persist_result=False,
    )  # fmt: skip
    def hold_semaphore_and_run() -> State[Any] | Result:
        if missing_stages := [other for other, future in upstream_futures.items() if not has_result(future)]:
            return make_skipped_state(f"it starts from {', '.join(missing_stages)}")
        with hold_semaphore(semaphore):
            if is_cancelled():
                return make_skipped_state("the flow run was cancelled")
            return produce_result(run, name, is_local=is_local)

    return hold_semaphore_and_run


def should_retry(run: Run, stage_name: str, error: object) -> bool:
    """Return True if a failed stage is to be retried: a preempted stage always, a crashed one until `retries` attempts
    in a row made no progress. User errors, cancellations, spent budgets and repeated errors are not retried."""
    if worker.is_stopping() or not isinstance(error, CosmosError) or error.exit_code in {EXIT_USAGE, EXIT_REFUSED}:
        return False
    if isinstance(error, (Cancelled, OverBudget, DiskFull)):
        # Do not retry on a full disk, because the number of failures cannot be saved there.
        return False
    if isinstance(error, Preempted):
        return True
    stage_state = read_state(run.stage_path(stage_name))
    return not stage_state.is_repeated and stage_state.failures <= run.pipeline.stage(stage_name).retries


def produce_result(run: Run, name: str, *, is_local: bool = False) -> State[Any] | Result:
    """Run a stage until it has its result: on its work pool or, if it has none or `is_local` is set, on this machine.
    Return the result, or the final state of the task run. Raises `CosmosError` if the stage is to be retried."""
    try:
        return (_run_on_work_pool if run.pipeline.stage(name).work_pool and not is_local else _run_locally)(run, name)
    except CancelledError:  # Prefect raises this error in the thread of a task that exceeds `timeout_seconds`
        if read_state(run.stage_path(name)).state not in FINISHED_STATES:
            record_failure(run.stage_path(name), StageFailed(f"stage {name!r}: its task exceeded timeout_seconds"))
        raise


def _run_locally(run: Run, stage_name: str) -> State[Any] | Result:
    run_logger, earlier_result = get_run_logger(), read_result(run.stage_path(stage_name))
    artifacts = StageArtifacts(run.pipeline.config, run.stage_path(stage_name))
    try:
        result, was_reused = run_stage(run, stage_name, on_progress=artifacts.update, report_line=run_logger.info)
    except CosmosError as error:
        if should_retry(run, stage_name, error):
            raise
        events.emit_stage_failed(run, stage_name, error)
        if isinstance(error, GateFailed):
            artifacts.show_refusal()
        return make_failed_state(error)
    events.emit_stage_completed(run, stage_name, result, was_reused=was_reused, earlier_result=earlier_result)
    if was_reused:  # publish no artifacts: the run that made the result has published them
        return Completed(name="Reused", data=result, message=result["reused_from"] or "done in this run")
    artifacts.finish(result)
    return result


def _run_on_work_pool(run: Run, stage_name: str) -> State[Any] | Result:
    """Run a stage on its work pool, and return its result or the final state of its task run. If the child flow run
    ended without recording an error, count a failed attempt."""
    stage, stage_path = run.pipeline.stage(stage_name), run.stage_path(stage_name)
    earlier_end_time = read_state(stage_path).ended
    try:
        with convert_errors(partial(_make_stage_error, stage_path)):
            if run.pipeline.stage_kind(stage).makes == "publication":
                # Check the approval on this machine, because a machine of the pool may lack the approval file.
                check_models_approved(run)
            result, was_reused = run_remote_stage(run, stage, lambda line: get_run_logger().info(line))
    except CosmosError as error:
        # No event is emitted for an error that the child flow run recorded, because the child has emitted it.
        stage_state = read_state(stage_path)
        is_same_error_recorded = stage_state.state == "failed" and stage_state.error == str(error)
        is_failure_recorded = is_same_error_recorded and stage_state.ended != earlier_end_time
        is_stop_recorded = stage_state.state == "stopped" and isinstance(error, Preempted)
        must_record_error = isinstance(error, OverBudget) or not (is_failure_recorded or is_stop_recorded)
        if must_record_error:
            record_failure(stage_path, error)
            if not isinstance(error, (Preempted, DiskFull)):
                # Count no failure for a preemption, which is always retried, and for a full disk, which never is.
                update_state(stage_path, failures=count_lost_child_run(stage_path))
        if should_retry(run, stage_name, error):
            raise
        if must_record_error:
            events.emit_stage_failed(run, stage_name, error)
        return make_failed_state(error)
    return Completed(name="Reused", data=result) if was_reused else result


def run_stage(
    run: Run,
    name: str,
    *,
    on_progress: Callable[[ProgressRecord], None] = lambda _: None,
    report_line: Callable[[str], None] = lambda _: None,
) -> tuple[Result, bool]:
    """Run one stage whose inputs are complete; return its result and whether the result already existed. Raises
    `CosmosError` if an input is missing or the attempt failed. `on_progress` is called with the progress of the worker,
    `report_line` with messages for the log of the task run."""
    stage, stage_path, start_time = run.pipeline.stage(name), run.stage_path(name), time.monotonic()
    stage_sync = StageSync(run, stage)

    def kill_orphaned_worker() -> None:
        """Kill the worker of an earlier attempt if it still holds the lock of the stage after the grace period, unless
        its launcher is alive."""
        worker.sleep_unless_stopping(0)
        if time.monotonic() - start_time > run.pipeline.config.grace_seconds:
            worker.reap_attempt(stage_path)

    with open_stage_lock(run.path, name) as stage_lock:
        stage_lock.acquire(on_poll=kill_orphaned_worker)
        try:
            with convert_errors(partial(_make_stage_error, stage_path)):
                is_stage_finished = read_state(stage_path).state in FINISHED_STATES
                if not is_stage_finished:
                    worker.reap_attempt(stage_path)
                    worker.mask_log_of_killed_launcher(stage_path, run.pipeline.secret_env_names(stage))
                    _record_launcher(stage_path)
                stage_sync.receive_inputs()
                expected_fingerprint = compute_local_fingerprint(run, stage)
                local_result = read_result(stage_path) if read_state(stage_path).holds else None
                if local_result and not (local_result["reused_from"] or "attempts" in local_result):
                    # Add the GPU time that an earlier launcher did not add because it was killed.
                    add_gpu_time_to_result(stage_path)
                if result := find_result(run, stage, expected_fingerprint):
                    return stage_sync.send_result(result), True
                if is_stage_finished:
                    _record_launcher(stage_path)
                if not run.pipeline.stage_kind(stage).in_worker:
                    return stage_sync.send_result(_run_in_process(run, stage, expected_fingerprint, report_line)), False
                return _make_result_under_lock(run, stage, expected_fingerprint, stage_lock, on_progress, report_line)
        except CosmosError as error:
            record_failure(stage_path, error)
            stage_sync.send_stage_state()
            raise


def _make_stage_error(stage_path: Path, error: Exception) -> CosmosError:
    """Return the error with which an attempt of a stage fails after an unexpected exception in this process, such as a
    bug or a full disk."""
    if (disk_error := make_disk_full_error(error, stage_path)) is not None:
        return disk_error
    logger.exception("stage %r", stage_path.name)
    return StageFailed(f"stage {stage_path.name!r}: {type(error).__name__}: {' '.join(str(error).split())}")


def _make_result_under_lock(
    run: Run,
    stage: StageConfig,
    expected_fingerprint: Fingerprint,
    stage_lock: FileLock,
    on_progress: Callable[[ProgressRecord], None],
    report_line: Callable[[str], None],
) -> tuple[Result, bool]:
    """Make the result of a stage in a worker. If another run is making the same result, wait for it and reuse it."""
    path, stage_sync, budget_check = run.stage_path(stage.name), StageSync(run, stage), BudgetCheck(run, stage)
    with FileLock(get_reuse_folder(run.output_dir, expected_fingerprint.value) / "lock") as fingerprint_lock:
        has_waited_for_lock = not fingerprint_lock.try_acquire()
        if has_waited_for_lock:
            update_state(path, state="waiting", error="another run is making the same result")
            fingerprint_lock.acquire(on_poll=lambda: worker.sleep_unless_stopping(0))
        with stage_sync.hold_result_lease(expected_fingerprint) as has_waited_for_lease:
            has_waited_for_other_run = has_waited_for_lock or has_waited_for_lease
            if has_waited_for_other_run and (reused_result := find_result(run, stage, expected_fingerprint)):
                return stage_sync.send_result(reused_result), True
            prepare_stage_folder(run, stage, expected_fingerprint, report_line)
            config, kind, recipe = run.pipeline.config, run.pipeline.stage_kind(stage), run.pipeline.recipes[stage.name]
            with ExitStack() as device_stack, ExitStack() as service_stack:
                gpu_environment, gpu_locks = device_stack.enter_context(gpus.hold_stage_gpus(kind, recipe, path))
                budget_check.raise_if_spent()
                num_gpus = len(gpu_locks) or gpus.count_reserved_gpus(kind, recipe)
                device_stack.enter_context(record_gpu_time(path, num_gpus))
                update_state(path, error="its reward service starts" if stage.reward_service else "")
                # With an artifact store, the stage that publishes may run on a machine without the checkpoints.
                check_stop = (lambda: worker.sleep_unless_stopping(0)) if config.artifact_store else None
                upload_url = _make_checkpoint_url(run, stage)
                service_stack.enter_context(upload_checkpoints_in_background(path, upload_url, check_stop))
                service_stack.enter_context(stage_sync.sync_checkpoints(expected_fingerprint))
                service_variables = service_stack.enter_context(reward_service(run, stage))
                # Add this callback last, so that it is called first: GPUs are free before the last checkpoint is sent.
                service_stack.callback(device_stack.close)
                attempt_settings = worker.AttemptSettings(
                    stage_path=path, python_path=config.python, num_threads=count_worker_threads(run.pipeline),
                    grace_seconds=config.grace_seconds, timeout_seconds=stage.timeout_seconds,
                    lock_descriptors=(stage_lock.descriptor, fingerprint_lock.descriptor, *gpu_locks),
                    on_progress=on_progress, report_line=report_line,
                    get_kill_reason=stage_sync.get_lease_loss_reason, get_stop_error=budget_check.find_budget_error,
                    environment={**gpu_environment, **service_variables},
                    inherited_environment=environment_for_user_code(stage.env) if stage.entry else os.environ,
                    secret_vars=(*run.pipeline.secret_env_names(stage), *service_variables),
                )  # fmt: skip
                worker.run_attempt(attempt_settings)
            return stage_sync.send_result(_finish_stage(run, stage, expected_fingerprint)), False


def _make_checkpoint_url(run: Run, stage: StageConfig) -> str:
    """Return the URL to which checkpoints are sent during a training; empty if the recipe does not send them."""
    checkpoint_config = run.pipeline.recipes[stage.name].train.ckpt
    if checkpoint_config.upload_s3 != "all" or not run.pipeline.stage_kind(stage).trains_model:
        return ""
    return checkpoint_url(checkpoint_config.s3_url(run.pipeline.config.name), stage.name, run.id)


def _run_in_process(
    run: Run, stage: StageConfig, expected_fingerprint: Fingerprint, report_line: Callable[[str], None]
) -> Result:
    """Run a stage in the process of the flow, as it needs neither a worker process nor torch; return its manifest."""
    path = run.stage_path(stage.name)
    if run.pipeline.stage_kind(stage).makes == "publication":
        check_models_approved(run)
    prepared_stage = prepare_stage_folder(run, stage, expected_fingerprint, report_line)
    stage_state, start_time = read_state(path), time.time()
    # An earlier attempt that was killed together with its flow has no recorded end, and counts as zero seconds.
    earlier_attempts, attempt_number = stage_state.list_attempt_times(0.0), stage_state.attempt + 1
    attempt_times = [*earlier_attempts, (start_time, None)]
    update_state(path, state="running", attempt=attempt_number, spans=attempt_times, renewed=None, ended=None, error="")
    record_event(path, "started", f"attempt {attempt_number}")
    try:
        program_outcome = import_object(prepared_stage.entry)(prepared_stage)
    finally:
        update_state(path, spans=[*earlier_attempts, (start_time, time.time())])
    manifest.commit_manifest(
        path, program_outcome, kind=stage.kind, fingerprint=expected_fingerprint.value, inputs=prepared_stage.inputs,
        sources=prepared_stage.sources,
    )  # fmt: skip
    return _finish_stage(run, stage, expected_fingerprint)


def _finish_stage(run: Run, stage: StageConfig, expected_fingerprint: Fingerprint) -> Result:
    stage_path = run.stage_path(stage.name)
    with warn_if_disk_full(f"the end of stage {stage.name}"):
        register_result(run.output_dir, stage_path, expected_fingerprint.value)
        update_state(stage_path, state="done", ended=time.time(), error="", failures=0, forced=False)
        record_event(stage_path, "done")
    return add_gpu_time_to_result(stage_path)


def _record_launcher(stage_path: Path) -> None:
    """Record this process as the launcher of the stage. After a failed attempt of the same process, first wait 1, 2, 4
    ... 60 s; a new process, such as one that resumes the run, has the full number of retries and does not wait."""
    stage_state, launcher = read_state(stage_path), identify_process()
    if stage_state.model_dump(include={*launcher}) != launcher:
        # Another process has the full number of retries; all fields are compared, because containers often reuse a pid.
        update_state(stage_path, **launcher, failures=0, failed_with="", is_repeated=False)
    elif stage_state.state == "failed":
        update_state(stage_path, state="retrying")
        worker.sleep_unless_stopping(compute_backoff_seconds(stage_state.failures))
