"""Restart flow runs that died before their run had a directory, for example while the Prefect server restarted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx

from cosmos_core.errors import CosmosError

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun

_MAX_FLOW_RUNS = 200  # maximum number of flow runs in one response of the server
_POLL_SECONDS = 1.0
_MAX_SCHEDULED_SECONDS = 60.0
_MAX_UNREACHABLE_SECONDS = 600.0


def find_failed_flow_run(run_id: str) -> FlowRun | None:
    """Return the newest flow run that a deployment started to create the run `run_id`, if it failed or crashed before
    its first task; otherwise, or without a Prefect server, return None."""
    if not run_id or not os.environ.get("PREFECT_API_URL"):
        return None
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    try:
        with get_client(sync_client=True) as prefect_client:
            flow_runs = prefect_client.read_flow_runs(
                flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=["post-train"])),
                flow_run_filter=filters.FlowRunFilter(deployment_id=filters.FlowRunFilterDeploymentId(is_null_=False)),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=_MAX_FLOW_RUNS,
            )
            flow_run = next((each for each in flow_runs if each.parameters.get("run_id") == run_id), None)
            if flow_run is None or flow_run.state_type not in {StateType.CRASHED, StateType.FAILED}:
                return None
            flow_run_filter = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[flow_run.id]))
            return None if prefect_client.read_task_runs(flow_run_filter=flow_run_filter, limit=1) else flow_run
    except httpx.HTTPError:
        return None


def reschedule_flow_run(flow_run: FlowRun) -> Iterator[str]:
    """Schedule a flow run again on its work pool and wait for its end; yield lines of text about its progress. Raises
    `CosmosError` if the flow run did not complete or was deleted, or the server stopped responding."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Scheduled

    pool_name, has_warned_of_delay, start_time = flow_run.work_pool_name, False, time.monotonic()
    run_label, latest_flow_run = f"run {flow_run.parameters['run_id']}", flow_run
    try:
        with get_client(sync_client=True) as prefect_client:
            prefect_client.set_flow_run_state(flow_run.id, Scheduled(message="its run is resumed"), force=True)
            yield f"{run_label} has not begun: its flow run {flow_run.name} is scheduled again on work pool {pool_name}"
            for latest_flow_run in _poll_until_ended(prefect_client, flow_run):
                is_start_overdue = time.monotonic() - start_time > _MAX_SCHEDULED_SECONDS
                if latest_flow_run.state_type == "SCHEDULED" and is_start_overdue and not has_warned_of_delay:
                    has_warned_of_delay = True
                    yield f"no worker of pool {pool_name} takes it: cosmos worker --pool {pool_name}"
    except httpx.HTTPError as error:
        raise CosmosError(f"{run_label}: the Prefect server does not respond: {error}") from error
    except ObjectNotFound as error:
        raise CosmosError(f"{run_label}: its flow run {flow_run.name} is gone from the server") from error
    if latest_flow_run.state is None or not latest_flow_run.state.is_completed():
        state_message = latest_flow_run.state.message if latest_flow_run.state else ""
        raise CosmosError(f"{run_label}: its flow run {flow_run.name} {latest_flow_run.state_name}: {state_message}")


def _poll_until_ended(prefect_client: SyncPrefectClient, flow_run: FlowRun) -> Iterator[FlowRun]:
    """Read a flow run from the server each second and yield what was read, until the flow run has ended; tolerate a
    restart of the server."""
    last_response_time, has_flow_run_ended = time.monotonic(), False
    while not has_flow_run_ended:
        time.sleep(_POLL_SECONDS)
        try:
            polled_flow_run = prefect_client.read_flow_run(flow_run.id)
        except httpx.HTTPError:
            if time.monotonic() - last_response_time > _MAX_UNREACHABLE_SECONDS:
                raise
            continue
        last_response_time = time.monotonic()
        has_flow_run_ended = polled_flow_run.state is not None and polled_flow_run.state.is_final()
        yield polled_flow_run
