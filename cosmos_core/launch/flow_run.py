"""A flow run that died before it began: its run has no directory yet, the server alone knows of it.

A process that starts in the instant in which the server is restarted ends so.
"""

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

_FLOW = "post-train"
_MOST = 200  # as many as the server returns at once
_POLL_SECONDS = 1.0
_UNTAKEN_SECONDS = 60.0
_UNHEARD_SECONDS = 600.0


def find_unbegun(run_id: str) -> FlowRun | None:
    """Return the newest flow run of a deployment that was to make a run, and failed before it did anything; None: there
    is none, or no server."""
    if not run_id or not os.environ.get("PREFECT_API_URL"):
        return None
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    try:
        with get_client(sync_client=True) as client:
            known = client.read_flow_runs(
                flow_filter=filters.FlowFilter(name=filters.FlowFilterName(any_=[_FLOW])),
                flow_run_filter=filters.FlowRunFilter(deployment_id=filters.FlowRunFilterDeploymentId(is_null_=False)),
                sort=FlowRunSort.EXPECTED_START_TIME_DESC,
                limit=_MOST,
            )
            found = next((each for each in known if each.parameters.get("run_id") == run_id), None)
            if found is None or found.state_type not in {StateType.CRASHED, StateType.FAILED}:
                return None
            this = filters.FlowRunFilter(id=filters.FlowRunFilterId(any_=[found.id]))
            return None if client.read_task_runs(flow_run_filter=this, limit=1) else found
    except httpx.HTTPError:
        return None


def begin_again(flow_run: FlowRun) -> Iterator[str]:
    """Let the work pool of a flow run begin it again, and wait for its end; yield lines about it.

    Raises:
        CosmosError: it did not complete, it was deleted, or the server does not respond any more.
    """
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Scheduled

    pool, is_told, began = flow_run.work_pool_name, False, time.monotonic()
    where = f"run {flow_run.parameters['run_id']}"
    found = flow_run
    try:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Scheduled(message="its run is resumed"), force=True)
            yield f"{where} has not begun: its flow run {flow_run.name} is scheduled again on work pool {pool}"
            for found in _followed(client, flow_run):
                is_untaken = found.state_type == "SCHEDULED" and time.monotonic() - began > _UNTAKEN_SECONDS
                if is_untaken and not is_told:
                    is_told = True
                    yield f"no worker of pool {pool} takes it: cosmos worker --pool {pool}"
    except httpx.HTTPError as error:
        raise CosmosError(f"{where}: the Prefect server does not respond: {error}") from error
    except ObjectNotFound as error:
        raise CosmosError(f"{where}: its flow run {flow_run.name} is gone from the server") from error
    if found.state is None or not found.state.is_completed():
        message = found.state.message if found.state else ""
        raise CosmosError(f"{where}: its flow run {flow_run.name} {found.state_name}: {message}")


def _followed(client: SyncPrefectClient, flow_run: FlowRun) -> Iterator[FlowRun]:
    """Yield what the server says of a flow run, now and then until it has ended; a server may be started again."""
    heard, is_over = time.monotonic(), False
    while not is_over:
        time.sleep(_POLL_SECONDS)
        try:
            found = client.read_flow_run(flow_run.id)
        except httpx.HTTPError:
            if time.monotonic() - heard > _UNHEARD_SECONDS:
                raise
            continue
        heard, is_over = time.monotonic(), found.state is not None and found.state.is_final()
        yield found
