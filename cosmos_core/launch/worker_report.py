"""A thread of `cosmos worker` that reports its machine to the Prefect server, for `cosmos doctor --cluster`: versions,
clock, free disk space, and whether the folders of its deployments exist.

The report is a Prefect variable with one name per work pool and host. The thread also sets the final state of flow runs
whose process died while it started or while it was being cancelled.
"""

import math
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

from cosmos_core.error_handling import log_errors
from cosmos_core.machine_properties import git_commit
from cosmos_core.run.process import read_start_time

REPORT_VARIABLE_PREFIX = "cosmos-worker-"
WORKING_DIRECTORY_STEP = "prefect.deployments.steps.set_working_directory"
"""Step of a deployment that names the folder in which its flow runs start."""
_REPORT_INTERVAL_SECONDS = 20.0
_MAX_REPORT_AGE_SECONDS = 300.0
_ENDED_PROCESS_TIMEOUT_SECONDS, _NO_PROCESS_TIMEOUT_SECONDS, _REMOTE_PROCESS_TIMEOUT_SECONDS = 10.0, 60.0, 600.0
"""Seconds in the state Pending or Cancelling after which a flow run counts as lost: if its process is dead, if it
has no process, and if its process may be on another host."""


def start_machine_reports(pool_name: str) -> None:
    """Start the thread that reports the properties of this machine, on which a worker of a work pool runs."""
    # Import Prefect in the calling thread, because two threads must not import it at the same time.
    from prefect.client.orchestration import get_client

    def report_periodically() -> None:
        first_seen_time_by_id: dict[UUID, float] = {}
        while True:
            # After an error, measure waiting times anew, because an outage of the server may delay live processes.
            with log_errors(lambda _: first_seen_time_by_id.clear()), get_client(sync_client=True) as prefect_client:
                report_machine(prefect_client, pool_name)
                end_lost_flow_runs(prefect_client, pool_name, first_seen_time_by_id)
            time.sleep(_REPORT_INTERVAL_SECONDS)

    threading.Thread(target=report_periodically, daemon=True, name="worker-report").start()


def report_machine(prefect_client: Any, pool_name: str) -> None:
    """Save the properties of this machine in a Prefect variable, whose name contains the host and the work pool
    `pool_name`; `prefect_client` is synchronous."""
    from prefect.client.schemas.actions import VariableCreate, VariableUpdate
    from prefect.exceptions import ObjectAlreadyExists

    variable_name = REPORT_VARIABLE_PREFIX + re.sub(r"[^a-z0-9]+", "-", f"{pool_name}-{socket.gethostname()}".lower())
    output_dir = Path(os.environ.get("COSMOS_OUTPUT_DIR") or "outputs").absolute()
    machine_report = {
        **read_versions(), "host": socket.gethostname(), "output_dir": str(output_dir),
        "free_bytes": read_free_bytes(output_dir), "pool": pool_name,
        "missing_folders": _list_missing_folders(prefect_client, pool_name), "time": time.time(),
    }  # fmt: skip
    try:
        prefect_client.create_variable(VariableCreate(name=variable_name, value=machine_report))
    except ObjectAlreadyExists:
        prefect_client.update_variable(VariableUpdate(name=variable_name, value=machine_report))


def end_lost_flow_runs(prefect_client: Any, pool_name: str, first_seen_time_by_id: dict[UUID, float]) -> None:
    """Set Pending flow runs of a process pool to Crashed, and Cancelling ones to Cancelled, if they have no live
    process. Prefect would leave them Pending, or Cancelling for five minutes. `first_seen_time_by_id` has the monotonic
    time at which an earlier call first saw each of these flow runs in its state."""
    from prefect.client.schemas import filters
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelled, Crashed

    if prefect_client.read_work_pool(pool_name).type != "process":
        return
    worker_hosts = {report["host"] for report, _ in read_recent_reports(prefect_client) if report["pool"] == pool_name}
    final_state_by_type = {StateType.PENDING: Crashed, StateType.CANCELLING: Cancelled}
    state_filter = filters.FlowRunFilterStateType(any_=list(final_state_by_type))
    flow_runs = prefect_client.read_flow_runs(
        work_pool_filter=filters.WorkPoolFilter(name=filters.WorkPoolFilterName(any_=[pool_name])),
        flow_run_filter=filters.FlowRunFilter(state=filters.FlowRunFilterState(type=state_filter)),
    )
    for ended_flow_run_id in first_seen_time_by_id.keys() - {flow_run.id for flow_run in flow_runs}:
        del first_seen_time_by_id[ended_flow_run_id]
    for flow_run in flow_runs:
        waiting_seconds = time.monotonic() - first_seen_time_by_id.setdefault(flow_run.id, time.monotonic())
        if waiting_seconds > get_max_pending_seconds(flow_run.infrastructure_pid or "", worker_hosts):
            state_message = f"{flow_run.state_name} for {waiting_seconds:.0f} s: its process is gone"
            final_state: Any = final_state_by_type[flow_run.state_type](message=state_message)
            prefect_client.set_flow_run_state(flow_run.id, final_state, force=True)


def get_max_pending_seconds(pid: str, worker_hosts: Collection[str]) -> float:
    """Return how many seconds a flow run may stay in the state Pending or Cancelling. `pid` is the process id
    of the flow run on one of the hosts `worker_hosts`, on which workers run; empty: no process was started."""
    if not pid:
        return _NO_PROCESS_TIMEOUT_SECONDS
    if not pid.isdigit() or set(worker_hosts) != {socket.gethostname()}:
        return _REMOTE_PROCESS_TIMEOUT_SECONDS
    return math.inf if read_start_time(int(pid)) is not None else _ENDED_PROCESS_TIMEOUT_SECONDS


def read_recent_reports(prefect_client: Any) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield each report of the last five minutes, with the seconds by which the clock of its machine is ahead of the
    clock of the server."""
    request_body: dict[str, Any] = {"variables": {"name": {"like_": REPORT_VARIABLE_PREFIX}}, "offset": 0}
    # Read page by page, because one response of the server has at most 200 variables.
    while variables := prefect_client.request("POST", "/variables/filter", json=request_body).json():
        request_body |= {"offset": request_body["offset"] + len(variables)}
        for variable in (each for each in variables if each["name"].startswith(REPORT_VARIABLE_PREFIX)):
            update_time = datetime.fromisoformat(variable["updated"])
            if (datetime.now(UTC) - update_time).total_seconds() < _MAX_REPORT_AGE_SECONDS:
                yield variable["value"], float(variable["value"]["time"]) - update_time.timestamp()


def is_worker_online(worker: Any) -> bool:
    """Return True if the Prefect server considers a worker to be online, from its heartbeats."""
    return getattr(worker.status, "value", worker.status) == "ONLINE"


def read_versions() -> dict[str, str]:
    """Return the git commit of this clone (empty if the code is no clone, as in an image) and Prefect's version."""
    from prefect import __version__

    return {"commit": git_commit(), "prefect": __version__}


def read_free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free


def _list_missing_folders(prefect_client: Any, pool_name: str) -> list[str]:
    if prefect_client.read_work_pool(pool_name).type != "process":
        # Only flow runs of a pool of type `process` use folders of this machine, so other pools lack none.
        return []
    missing_folders = set[str]()
    for deployment in [each for each in prefect_client.read_deployments() if each.work_pool_name == pool_name]:
        flow_file = str(deployment.entrypoint).partition(":")[0]
        for step in deployment.pull_steps or []:
            folder = step.get(WORKING_DIRECTORY_STEP, {}).get("directory")
            if folder and not Path(folder, flow_file if flow_file.endswith(".py") else "").exists():
                missing_folders.add(folder)
    return sorted(missing_folders)
