"""Diagnose a cluster: Prefect server, work pools and their workers, deployments, Ray, reward services, disk.

The machines of workers that `cosmos worker` started report themselves to the Prefect server (`worker_report.py`).
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from cosmos_core.environment import mask_text
from cosmos_core.launch import worker_report
from cosmos_core.launch.service_health import fetch_service_health
from cosmos_core.launch.worker_report import is_worker_online, read_free_bytes
from cosmos_core.machine_properties import find_connection_error

_MAX_CANCELLING_SECONDS = 60.0
"""Seconds in state Cancelling after which the worker of a flow run counts as unresponsive."""
_MAX_DATABASE_READ_SECONDS, _MAX_CLOCK_OFFSET_SECONDS = 1.0, 5.0
_MIN_DISK_BYTES = 20 * 2**30


@dataclass(frozen=True)
class Diagnosis:
    """Result of one diagnosis: name of the check, message, and whether the checked property is healthy."""

    name: str
    message: str
    is_healthy: bool = True


def run_checks(output_dir: Path, prefect_client: Any) -> Iterator[Diagnosis]:
    """Check the cluster with a synchronous Prefect client, and the free space in `output_dir`; yield the results."""
    server_checks: dict[str, Callable[[Any], Iterator[Diagnosis]]] = {
        "server": _check_server, "pools": _check_pools, "workers": _check_workers, "cancellation": _check_cancellation,
        "deployments": _check_deployment_folders,
    }  # fmt: skip
    for name, check in server_checks.items():
        try:
            yield from check(prefect_client)
        except Exception as error:  # noqa: BLE001 - an error of any type is a result of the check
            message = mask_text(f"{type(error).__name__}: {' '.join(str(error).split())}")
            yield Diagnosis(name, message[:300], is_healthy=False)
    yield from _check_ray()
    for health in fetch_service_health(os.environ):
        yield Diagnosis("rewards", f"{health['url']}: {health['status']}", health["status"] in {"ok", "tells nothing"})
    free_bytes = read_free_bytes(output_dir)
    yield Diagnosis("disk", f"{free_bytes / 2**30:.0f} GiB are free in {output_dir}", free_bytes >= _MIN_DISK_BYTES)


def _check_server(prefect_client: Any) -> Iterator[Diagnosis]:
    from prefect import __version__

    hello_response = prefect_client.hello()
    server_version = prefect_client.api_version()  # unlike `hello`, this request checks the credentials
    is_same_version = server_version.split(".")[:2] == __version__.split(".")[:2]
    yield Diagnosis("server", f"Prefect {server_version} there, {__version__} here", is_same_version)
    if "Date" in hello_response.headers:
        clock_offset = (datetime.now(UTC) - parsedate_to_datetime(hello_response.headers["Date"])).total_seconds()
        message = f"this machine is {clock_offset:+.0f} s from the server"
        yield Diagnosis("clock", message, abs(clock_offset) <= _MAX_CLOCK_OFFSET_SECONDS)
    start_time = time.monotonic()
    prefect_client.read_flow_runs(limit=1)
    query_seconds = time.monotonic() - start_time
    remedy = "" if query_seconds < _MAX_DATABASE_READ_SECONDS else "; PostgreSQL holds more workers than SQLite"
    yield Diagnosis(
        "database", f"a read takes {query_seconds:.2f} s{remedy}", query_seconds < _MAX_DATABASE_READ_SECONDS
    )


def _check_pools(prefect_client: Any) -> Iterator[Diagnosis]:
    deployed_pool_names = {deployment.work_pool_name for deployment in prefect_client.read_deployments()}
    for pool in prefect_client.read_work_pools():
        pool_workers = prefect_client.read_workers_for_work_pool(pool.name)
        live_worker_names = sorted(worker.name for worker in pool_workers if is_worker_online(worker))
        pool_usage_note = "its deployments wait" if pool.name in deployed_pool_names else "no deployment needs one"
        message = f"{len(live_worker_names)} live workers: {', '.join(live_worker_names)}"
        message = message if live_worker_names else f"no live worker, and {pool_usage_note}"
        if pool.is_paused:
            message += "; the pool is paused"
        is_pool_healthy = bool(live_worker_names or pool.name not in deployed_pool_names) and not pool.is_paused
        yield Diagnosis(f"pool {pool.name}", message, is_pool_healthy)
    for name in sorted(deployed_pool_names - {pool.name for pool in prefect_client.read_work_pools()} - {None}):
        message = "deployments name it, and it is not there; cosmos bootstrap makes it"
        yield Diagnosis(f"pool {name}", message, is_healthy=False)


def _check_workers(prefect_client: Any) -> Iterator[Diagnosis]:
    local_package_versions, reporting_pool_names = worker_report.read_versions(), set[str]()
    for report, clock_offset in worker_report.read_recent_reports(prefect_client):
        reporting_pool_names.add(report["pool"])
        worker_problems = [
            f"{key} {report[key]} there, {version} here"
            for key, version in local_package_versions.items()
            if version and report[key] and report[key] != version
        ]
        worker_problems += [f"{folder} of its deployments is missing" for folder in report["missing_folders"]]
        worker_problems += ["its clock differs from the server's"] * (abs(clock_offset) > _MAX_CLOCK_OFFSET_SECONDS)
        worker_problems += ["its disk is full soon"] * (report["free_bytes"] < _MIN_DISK_BYTES)
        free_space_text = f"{report['free_bytes'] / 2**30:.0f} GiB are free in {report['output_dir']}"
        message = "; ".join([f"{free_space_text}, clock {clock_offset:+.0f} s", *worker_problems])
        yield Diagnosis(f"worker of {report['pool']} on {report['host']}", message, not worker_problems)
    for pool in prefect_client.read_work_pools():
        has_live_worker = any(map(is_worker_online, prefect_client.read_workers_for_work_pool(pool.name)))
        if has_live_worker and pool.type == "process" and pool.name not in reporting_pool_names:
            message = "none was started by cosmos worker: after an outage of the server they stop no cancelled flow run"
            yield Diagnosis(f"workers of {pool.name}", message, is_healthy=False)


def _check_cancellation(prefect_client: Any) -> Iterator[Diagnosis]:
    from prefect.client.schemas.filters import FlowRunFilter

    cancelling_filter = FlowRunFilter.model_validate({"state": {"type": {"any_": ["CANCELLING"]}}})
    for flow_run in prefect_client.read_flow_runs(flow_run_filter=cancelling_filter, limit=200):
        cancelling_seconds = (datetime.now(UTC) - flow_run.state.timestamp).total_seconds()
        if cancelling_seconds > _MAX_CANCELLING_SECONDS:
            cancellation_problem = f"no worker of {flow_run.work_pool_name} looks; restart it"
            message = f"{flow_run.name} has been Cancelling for {cancelling_seconds:.0f} s: {cancellation_problem}"
            yield Diagnosis("cancellation", message, is_healthy=False)
            return
    yield Diagnosis("cancellation", "no flow run waits for it")


def _check_deployment_folders(prefect_client: Any) -> Iterator[Diagnosis]:
    work_pools_by_folder: dict[str, list[str]] = {}
    for deployment in prefect_client.read_deployments():
        # Flows of users are not checked, because they may run in any folder.
        is_user_flow = not str(deployment.entrypoint).startswith("flows/")
        for step in [] if is_user_flow else deployment.pull_steps or []:
            if folder := step.get(worker_report.WORKING_DIRECTORY_STEP, {}).get("directory"):
                work_pools_by_folder.setdefault(folder, []).append(str(deployment.work_pool_name))
    deployment_folders_text = "; ".join(
        f"{folder} in {', '.join(sorted(set(pools)))}" for folder, pools in work_pools_by_folder.items()
    )
    deployment_folders_text = deployment_folders_text or "none is deployed; prefect --no-prompt deploy --all"
    yield Diagnosis("deployments", deployment_folders_text, len(work_pools_by_folder) == 1)


def _check_ray() -> Iterator[Diagnosis]:
    ray_address = os.environ.get("RAY_ADDRESS", "")
    if ":" not in ray_address or "://" in ray_address:
        return
    if connection_error := find_connection_error(ray_address):
        yield Diagnosis("Ray", f"RAY_ADDRESS = {ray_address!r} is not reached: {connection_error}", is_healthy=False)
        return
    ray_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    has_token = os.environ.get("RAY_AUTH_MODE") == "token" and bool(ray_token)
    security_warning = "without RAY_AUTH_MODE=token and RAY_AUTH_TOKEN: whoever reaches it runs code"
    yield Diagnosis("Ray", f"{ray_address} is reached, {'with a token' if has_token else security_warning}", has_token)
