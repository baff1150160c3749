"""Run a stage on another work pool: the deployment `stage/POOL` executes the stage as a child flow run, which the task
in this flow polls. The stage is complete when the child has written its manifest.

The id of the child flow run is saved in the folder of the stage, so that a parent that is resumed after a crash polls
the same child flow run. The child decides about reuse and retries, since fingerprints depend on its hardware.
"""

import logging
import time
from asyncio import CancelledError
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import TERMINAL_STATES, FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run, task_run
from prefect.states import Cancelling

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ERRORS_BY_NAME, Cancelled, ConfigError, CosmosError, OverBudget, Preempted, StageFailed
from cosmos_core.launch.worker import compute_grace_seconds, sleep_unless_stopping
from cosmos_core.launch.worker_report import is_worker_online
from cosmos_core.run.directory import Run
from cosmos_core.run.files import JsonDocument, read_document, write_json
from cosmos_core.run.manifest import Result, find_output_damage
from cosmos_core.run.state import FINISHED_STATES, read_state, record_event, update_state
from tasks.budget import BudgetCheck
from tasks.cancellation import request_once
from tasks.reuse import find_result_of_work_pool
from tasks.store_sync import StageSync

logger = logging.getLogger(__name__)

CHILD_RUN_FILE = "pool.json"
_POLL_SECONDS = 1.0
_PROGRESS_PERIOD_SECONDS = 5.0
_WORKER_REPORT_PERIOD_SECONDS = 10.0
_MAX_UNREACHABLE_SECONDS = 600.0
_NOT_STARTED_STATES = {StateType.SCHEDULED, StateType.PENDING}  # states before a worker starts the flow run


class ChildFlowRun(JsonDocument):
    """Child flow run that executes a stage on another work pool."""

    flow_run: str
    """Id of the child flow run; empty if the parent died after requesting it and before the server responded."""
    attempt: int
    token: str = ""
    """Random part of the idempotency key. The number of attempts restarts at 1 if the folder of the stage or the run
    was removed; without the random part the server would then return a flow run that has ended."""
    failures: int = 0
    """Number of consecutive child flow runs that died without a recorded error and without a new checkpoint."""
    failed_at: int = 0
    """Step of the newest checkpoint when the last child flow run died without a recorded error."""


def run_remote_stage(
    run: Run, stage: StageConfig, report_line: Callable[[str], None] = logger.info
) -> tuple[Result, bool]:
    """Run a stage on its work pool unless its result exists; return the result and whether it already existed. The
    reason why the stage waits is passed to `report_line`. Raises the error with which the child flow run ended, or
    `ConfigError` if the deployment does not exist."""
    stage_path, stage_sync = run.stage_path(stage.name), StageSync(run, stage)
    if reused_result := find_result_of_work_pool(run, stage):
        return reused_result, True
    try:
        ended_flow_run = _wait_for_child(run, stage, stage_sync, report_line)
    except httpx.HTTPError as error:
        error_text = " ".join(str(error).split()) or type(error).__name__
        raise StageFailed(f"{_describe_stage(stage)}: the Prefect server does not respond: {error_text}") from error
    result = stage_sync.receive_result()
    if ended_flow_run.state_type == StateType.COMPLETED and result is not None:
        if damage_text := find_output_damage(stage_path, result):
            raise StageFailed(f"{_describe_stage(stage)}: {damage_text}: do both machines share {stage_path}?")
        return result, read_state(stage_path).state == "reused"
    raise _make_child_error(stage, stage_path, ended_flow_run)


def _describe_stage(stage: StageConfig) -> str:
    return f"stage {stage.name!r} on {stage.work_pool!r}"


def _wait_for_child(run: Run, stage: StageConfig, stage_sync: StageSync, report_line: Callable[[str], None]) -> FlowRun:
    """Poll the running child flow run, or a new one if there is none, and return it when it has ended."""
    stage_path, budget_check = run.stage_path(stage.name), BudgetCheck(run, stage)
    earlier_child, stage_state = read_document(stage_path / CHILD_RUN_FILE, ChildFlowRun), read_state(stage_path)
    num_failures = earlier_child.failures if earlier_child and earlier_child.flow_run else stage_state.failures
    if task_run.run_count == 1:
        # A new flow run, such as one that resumes the run, has all retries and starts the stage without a delay.
        if earlier_child:
            write_json(stage_path / CHILD_RUN_FILE, earlier_child.model_copy(update={"failures": 0}).model_dump())
        if stage_state.state == "failed":
            update_state(stage_path, failures=0)
    elif stage_state.state == "failed" and num_failures:
        sleep_unless_stopping(compute_backoff_seconds(num_failures))
    mirror_progress = stage_sync.make_progress_mirror()
    with get_client(sync_client=True) as prefect_client:
        grace_seconds = run.pipeline.config.grace_seconds
        if (child := _find_running_child(prefect_client, stage_path, grace_seconds, report_line)) is None:
            budget_check.raise_if_spent()
            require_second_slot(prefect_client, stage, str(flow_run.id or ""))
            child = _start_child(run, stage, stage_sync)
        try:
            report_wait = partial(report_worker_wait, prefect_client, stage_path, report_line)
            return _poll_child(prefect_client, stage, UUID(child.flow_run), mirror_progress, report_wait, budget_check)
        except (Preempted, CancelledError):
            _cancel_child(prefect_client, child, compute_grace_seconds(stage_path, grace_seconds))
            stage_sync.make_progress_mirror()()
            raise


def require_second_slot(
    prefect_client: SyncPrefectClient, stage: StageConfig, flow_run_id: str, pool_field: str = "work_pool"
) -> None:
    """Raise ConfigError if this flow run itself occupies the only slot of the work pool, or of its queue, on which a
    child flow run for `stage` is to run. `pool_field` is the key of the stage that names the pool: `work_pool` or
    `reward_service_pool`."""
    pool_name, deployment_flow = getattr(stage, pool_field), "stage" if pool_field == "work_pool" else "reward-service"
    if not flow_run_id:
        return
    with suppress(ObjectNotFound):
        # Skip the check if the server lost its database or a deployment is missing: starting the child reports that.
        this_flow_run = prefect_client.read_flow_run(UUID(flow_run_id))
        if not (pool := this_flow_run.work_pool_name):
            return
        deployment = prefect_client.read_deployment_by_name(f"{deployment_flow}/{pool_name}")
        if deployment.work_pool_name != pool:
            return
        limit, pool_or_queue = prefect_client.read_work_pool(pool).concurrency_limit, f"pool {pool!r}"
        set_limit_command = f"cosmos bootstrap --pool {pool} --limit 2"
        if limit != 1 and this_flow_run.work_queue_id and this_flow_run.work_queue_id == deployment.work_queue_id:
            work_queue = prefect_client.read_work_queue(this_flow_run.work_queue_id)
            limit, pool_or_queue = work_queue.concurrency_limit, f"queue {work_queue.name!r} of pool {pool!r}"
            set_limit_command = f"prefect work-queue set-concurrency-limit {work_queue.name} 2 --pool {pool}"
        if limit == 1:
            raise ConfigError(
                f"stage {stage.name!r}: {pool_field} = {pool_name!r}: {pool_or_queue} runs one flow run at a time, "
                f"which is the one that waits for it; leave {pool_field} out, or raise the limit: {set_limit_command}"
            )


def count_lost_child_run(path: Path) -> int:
    """Count one more child flow run that ended without recording an error, since its machine or process was lost.
    Return the number of consecutive child flow runs that were lost without a new checkpoint, which is kept in
    `pool.json`. If no child flow run began, return the number of failures in `state.json`, which `record_failure` has
    increased."""
    child, stage_state = read_document(path / CHILD_RUN_FILE, ChildFlowRun), read_state(path)
    if child is None or not child.flow_run:
        return stage_state.failures
    checkpoint_step = stage_state.checkpoint_step or 0
    num_lost_children = 1 if checkpoint_step > child.failed_at else child.failures + 1
    updated_child = child.model_copy(update={"failures": num_lost_children, "failed_at": checkpoint_step})
    write_json(path / CHILD_RUN_FILE, updated_child.model_dump())
    return updated_child.failures


def require_ended_child(stage_path: Path, grace_seconds: float) -> None:
    """Raise ConfigError if the child flow run of a stage still runs: a second one would write to the same files. Wait
    for a child flow run that is being cancelled, which may take `grace_seconds`."""
    if (stage_path / CHILD_RUN_FILE).is_file():
        with get_client(sync_client=True) as prefect_client:
            if child := _find_running_child(prefect_client, stage_path, grace_seconds):
                raise ConfigError(
                    f"from_stage: stage {stage_path.name!r} still runs on its work pool; wait for its end, or stop it: "
                    f"prefect flow-run cancel {child.flow_run}"
                )


def _find_running_child(
    prefect_client: SyncPrefectClient,
    path: Path,
    grace_seconds: float,
    report_line: Callable[[str], None] = logger.info,
) -> ChildFlowRun | None:
    """Return the child flow run that an earlier attempt of the stage started; None if it has ended or is unknown. If it
    is being cancelled, wait for its end, as it still saves a checkpoint; raise StageFailed if it does not end."""
    child = read_document(path / CHILD_RUN_FILE, ChildFlowRun)
    if child is None or not child.flow_run:
        return None
    deadline, message = time.monotonic() + compute_grace_seconds(path, max(grace_seconds, _MAX_UNREACHABLE_SECONDS)), ""
    try:
        state_type = prefect_client.read_flow_run(UUID(child.flow_run)).state_type
        while state_type == StateType.CANCELLING:
            if not message:
                message = f"stage {path.name!r}: waits until its flow run {child.flow_run} is cancelled"
                report_line(message)
            if time.monotonic() > deadline:
                raise StageFailed(f"{message}; without a live worker it is not, start one of its pool: cosmos worker")
            sleep_unless_stopping(_POLL_SECONDS)
            with suppress(httpx.HTTPError), request_once():  # ignore a short outage of the server
                state_type = prefect_client.read_flow_run(UUID(child.flow_run)).state_type
    except ObjectNotFound:  # this server does not know the child, which was started on another server
        return None
    return None if state_type in TERMINAL_STATES else child


def _start_child(run: Run, stage: StageConfig, stage_sync: StageSync) -> ChildFlowRun:
    stage_path, pool = run.stage_path(stage.name), stage.work_pool
    child = read_document(stage_path / CHILD_RUN_FILE, ChildFlowRun) or ChildFlowRun(flow_run="", attempt=0)
    # If a token was saved without the id of a flow run, an earlier process ended during its request. Repeat the request
    # with the same token, for which Prefect creates no second flow run.
    if child.flow_run or not child.token:
        child = child.model_copy(update={"flow_run": "", "attempt": child.attempt + 1, "token": uuid4().hex})
    try:
        run_location = stage_sync.send_run()
        stage_path.mkdir(parents=True, exist_ok=True)
        # The file is written before the request, so that a retry after a kill requests the same flow run.
        write_json(stage_path / CHILD_RUN_FILE, child.model_dump())
        created_flow_run: Any = run_deployment(
            f"stage/{pool}", parameters={"run": run_location, "name": stage.name}, timeout=0,
            idempotency_key=f"{run_location}/{stage.name}/{child.attempt}/{child.token}",
            tags=sorted({f"cosmos-run:{run.id}", *task_run.tags}),
        )  # fmt: skip
    except ObjectNotFound as error:
        raise ConfigError(
            f"stage {stage.name!r}: work_pool = {pool!r}: the server has no deployment stage/{pool}; add one like "
            f"stage/cpu to prefect.yaml, then: cosmos bootstrap --pool {pool}, prefect deploy -n stage/{pool}"
        ) from error
    child = child.model_copy(update={"flow_run": str(created_flow_run.id)})
    write_json(stage_path / CHILD_RUN_FILE, child.model_dump())
    record_event(stage_path, "sent", f"to work pool {pool}, flow run {child.flow_run}")
    return child


def compute_backoff_seconds(num_failures: int) -> float:
    """Return the pause before the next attempt after consecutive failures: 1, 2, 4 ... 60 seconds."""
    return min(60.0, 2.0 ** min(num_failures - 1, 6))


def report_worker_wait(
    prefect_client: SyncPrefectClient, path: Path, report_line: Callable[[str], None], work_pool: str,
    work_queue_id: UUID | None, last_wait_message: str,
) -> str:  # fmt: skip
    """Report why a stage waits for a worker of a work pool, in the flow's log and in `state.json`, unless
    `last_wait_message` has the same reason; return the message."""
    num_workers = sum(map(is_worker_online, prefect_client.read_workers_for_work_pool(work_pool)))
    live_workers_text = (
        f"{num_workers} live" if num_workers else f"none is live; start one: cosmos worker --pool {work_pool}"
    )
    message = f"waits for a worker of pool {work_pool}: {live_workers_text}"
    if prefect_client.read_work_pool(work_pool).is_paused:
        message = f"waits for work pool {work_pool}, which is paused"
    elif work_queue_id and (work_queue := prefect_client.read_work_queue(work_queue_id)).is_paused:
        message = f"waits for queue {work_queue.name} of work pool {work_pool}, which is paused"
    if message != last_wait_message:
        report_line(f"stage {path.name}: {message}")
        update_state(path, state="waiting", error=message)
    return message


def _poll_child(
    prefect_client: SyncPrefectClient,
    stage: StageConfig,
    flow_run_id: UUID,
    mirror_progress: Callable[[], None],
    report_wait_reason: Callable[[str, UUID | None, str], str],
    budget_check: BudgetCheck,
) -> FlowRun:
    last_mirror_time, last_response_time, next_report_time, last_wait_message = 0.0, time.monotonic(), 0.0, ""
    while True:
        try:
            with request_once():
                child_flow_run = prefect_client.read_flow_run(flow_run_id)
                if child_flow_run.state_type in _NOT_STARTED_STATES and time.monotonic() > next_report_time:
                    next_report_time = time.monotonic() + _WORKER_REPORT_PERIOD_SECONDS
                    # Name the pool of the flow run, because a deployment may have another pool than its name says.
                    work_pool = child_flow_run.work_pool_name or stage.work_pool
                    last_wait_message = report_wait_reason(work_pool, child_flow_run.work_queue_id, last_wait_message)
            last_response_time = time.monotonic()
        except ObjectNotFound as error:  # the flow run or its pool was deleted
            error_message = f"{_describe_stage(stage)}: its flow run {flow_run_id} or its pool is gone from the server"
            raise StageFailed(error_message) from error
        except httpx.HTTPError:  # ignore a short outage, as the child flow run continues
            if time.monotonic() - last_response_time > _MAX_UNREACHABLE_SECONDS:
                raise
            sleep_unless_stopping(_POLL_SECONDS)
            continue
        if time.monotonic() - last_mirror_time > _PROGRESS_PERIOD_SECONDS:
            mirror_progress()
            last_mirror_time = time.monotonic()
        if child_flow_run.state_type in TERMINAL_STATES:
            return child_flow_run
        # Check the budget in this process, because the child flow run knows only the cost of stages on its own disks.
        budget_check.raise_if_spent()
        sleep_unless_stopping(_POLL_SECONDS)


def _cancel_child(prefect_client: SyncPrefectClient, child: ChildFlowRun, grace_seconds: float) -> None:
    """Cancel the child flow run, so that it saves a checkpoint and ends; wait at most `grace_seconds` for its end."""
    flow_run_id = UUID(child.flow_run)
    with suppress(httpx.HTTPError, ObjectNotFound):  # stop without a cancellation if the server is unreachable
        prefect_client.set_flow_run_state(flow_run_id, Cancelling())
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline:
            with suppress(httpx.HTTPError), request_once():
                if prefect_client.read_flow_run(flow_run_id).state_type in TERMINAL_STATES:
                    break
            time.sleep(_POLL_SECONDS)


def _make_child_error(stage: StageConfig, path: Path, ended_flow_run: FlowRun) -> CosmosError:
    """Return the error that the stage recorded in `state.json`, or an error made from the state of the child flow run
    if the stage recorded none because its machine was lost."""
    stage_state, message = read_state(path), ended_flow_run.state.message if ended_flow_run.state else ""
    stage_label = _describe_stage(stage)
    if stage_state.state == "failed" and stage_state.error_type in ERRORS_BY_NAME:
        return ERRORS_BY_NAME[stage_state.error_type](stage_state.error)
    if ended_flow_run.state_type == StateType.CANCELLED:
        return Cancelled(f"{stage_label}: its flow run was cancelled")
    if stage_state.is_over_budget:
        return OverBudget(stage_state.error)
    if stage_state.state == "stopped":
        return Preempted(f"{stage_label}: {stage_state.error or 'stopped'}")
    if ended_flow_run.state_type == StateType.COMPLETED and stage_state.state in FINISHED_STATES:
        return StageFailed(f"{stage_label}: it is done there, but {path} has no result: the machines share no disk")
    return StageFailed(f"{stage_label}: its flow run {ended_flow_run.state_name}: {' '.join(str(message).split())}")
