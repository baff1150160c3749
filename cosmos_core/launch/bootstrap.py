"""Set up a Prefect server: work pools, an automation that detects dead flow runs, and the block types of pipelines.

Existing objects are kept; objects of an older version are updated. The GPUs in use are limited by the concurrency limit
of a work pool, which only delays flow runs: Prefect's other limits would end a training that cannot renew its lease.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cosmos_core.error_handling import convert_errors
from cosmos_core.errors import ConfigError
from cosmos_core.launch.notify import make_notification_automations

DEFAULT_POOLS = ("local", "cpu", "gpu")
"""Work pools for which `prefect.yaml` has deployments."""
CRASH_AUTOMATION_NAME = "cosmos: a flow run without a heartbeat has crashed"
HEARTBEAT_SECONDS = 30
"""Seconds between two heartbeats of a flow run that a deployment or `cosmos worker` starts; the minimum in Prefect."""
_MAX_MISSED_HEARTBEATS = 3
FLOW_STATE_NAMES = ("NothingNew", "StillTraining", "NotPromoted", "Declined", "Outdated", "Refused")
"""Names of the final states that the flows of this project return, in addition to Prefect's."""
_FINAL_STATES = ("Completed", "Failed", "Cancelled", "Crashed", "TimedOut")
_IDLE_STATES = ("Suspended", "Paused", "Resuming", "Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot", "Late")
"""Names of the states in which a flow run has no process and therefore sends no heartbeat."""
_RESERVED_NAME_PREFIX = "prefect"
_BAD_NAME_CHARACTERS = set("/%&<>")  # characters that Prefect refuses in names


@dataclass(frozen=True)
class WorkPool:
    """Settings of a Prefect work pool to create or update."""

    name: str
    type: str = "process"
    concurrency_limit: int | None = None
    """Maximum number of concurrent flow runs of the work pool; None: no limit."""
    template: Path | None = None
    """JSON file with the base job template of the work pool; None: the default template of its type."""


def bootstrap_server(
    pools: Sequence[WorkPool], address_by_channel: Mapping[str, str] = MappingProxyType({})
) -> Iterator[str]:
    """Create or update work pools, automations and block types on the Prefect server; yield one line of text for each.
    Notifications go to the addresses in `address_by_channel`. Raises `ConfigError` if there is no server, a template
    is no JSON, or the name or type of a pool is invalid."""
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.settings import get_current_settings

    from cosmos_core.launch.blocks import BLOCK_SLUG, RewardService

    for name in (pool.name for pool in pools):
        if not name.strip() or _BAD_NAME_CHARACTERS & set(name) or name.lower().startswith(_RESERVED_NAME_PREFIX):
            raise ConfigError(
                f"work pool {name!r}: a name has no {' '.join(sorted(_BAD_NAME_CHARACTERS))}, and those that begin "
                f"with {_RESERVED_NAME_PREFIX!r} are Prefect's own; take another"
            )
    server_url = get_current_settings().api.url
    if not server_url:
        raise ConfigError("PREFECT_API_URL is not set; start a server (prefect server start) and set it to its /api")
    with get_client(sync_client=True) as prefect_client:
        with convert_errors(lambda e: ConfigError(f"the Prefect server at {server_url} does not respond: {e}")):
            prefect_client.hello()
        for pool in pools:
            yield _save_work_pool(prefect_client, pool)
        yield _save_automation(prefect_client, _make_crash_automation())
        for channel, address in address_by_channel.items():
            for automation in make_notification_automations(channel, address):
                yield _save_automation(prefect_client, automation)
        try:
            prefect_client.read_block_document_by_name("cosmos-credentials", "secret")
        except ObjectNotFound:
            yield "block secret/cosmos-credentials: not there; workers take credentials from their environment"
        else:
            yield "block secret/cosmos-credentials: there"
    RewardService.register_type_and_schema()
    yield f"block type {BLOCK_SLUG}: registered"


def _check_pool_type(prefect_client: Any, pool: WorkPool) -> None:
    worker_types_by_package = prefect_client.read_worker_metadata()
    pool_types = {str(each["type"]) for types in worker_types_by_package.values() for each in types.values()}
    if pool.type not in pool_types:
        raise ConfigError(
            f"work pool {pool.name!r}: there is no type {pool.type!r}; known: {', '.join(sorted(pool_types))}. Of "
            "another one give the --template"
        )


def _save_work_pool(prefect_client: Any, pool: WorkPool) -> str:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    run_limit, job_template = pool.concurrency_limit, dict[str, Any]()
    if pool.template is not None:
        try:
            job_template = json.loads(pool.template.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"template {pool.template} of work pool {pool.name!r} cannot be read: {error}") from error
    try:
        existing_pool = prefect_client.read_work_pool(pool.name)
    except ObjectNotFound:
        if not job_template and pool.type != WorkPool.type:
            # Check only other types than `process`, because every Prefect server knows the type `process`.
            _check_pool_type(prefect_client, pool)
        pool_settings = {"concurrency_limit": run_limit} | ({"base_job_template": job_template} if job_template else {})
        prefect_client.create_work_pool(WorkPoolCreate(name=pool.name, type=pool.type, **pool_settings))
        return f"work pool {pool.name}: made ({pool.type}{_format_limit(run_limit)})"
    if existing_pool.type != pool.type:
        type_mismatch_text = f"is of type {existing_pool.type}, not {pool.type}"
        raise ConfigError(f"work pool {pool.name!r} {type_mismatch_text}; delete it, or take another name")
    requested_pool_settings = {"concurrency_limit": run_limit, "base_job_template": job_template or None}
    changed_pool_settings: dict[str, Any] = {
        key: value for key, value in requested_pool_settings.items() if value not in (None, getattr(existing_pool, key))
    }
    if not changed_pool_settings:
        return f"work pool {pool.name}: there ({existing_pool.type}{_format_limit(existing_pool.concurrency_limit)})"
    prefect_client.update_work_pool(pool.name, WorkPoolUpdate(**changed_pool_settings))
    return f"work pool {pool.name}: changed ({', '.join(changed_pool_settings)})"


def _format_limit(concurrency_limit: int | None) -> str:
    return f", at most {concurrency_limit} at once" if concurrency_limit is not None else ""


def _make_crash_automation() -> Any:
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    heartbeat_end_events = {f"prefect.flow-run.{name}" for name in (*_FINAL_STATES, *FLOW_STATE_NAMES, *_IDLE_STATES)}
    return AutomationCore(
        name=CRASH_AUTOMATION_NAME,
        description=f"After {_MAX_MISSED_HEARTBEATS} heartbeats that did not come: its process or its machine is gone.",
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},  # type: ignore[arg-type]
            # Require the tag `cosmos`, because flow runs of other projects may send heartbeats only every 180 s.
            match_related={"prefect.resource.id": "prefect.tag.cosmos"},  # type: ignore[arg-type]
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *heartbeat_end_events},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=_MAX_MISSED_HEARTBEATS * HEARTBEAT_SECONDS),
        ),
        actions=[ChangeFlowRunState(state="CRASHED", message="no heartbeat: its process is gone; resume the run")],  # type: ignore[arg-type]
    )


def _save_automation(prefect_client: Any, automation: Any) -> str:
    """Create an automation on the Prefect server, or update the saved automation of the same name, without enabling or
    disabling it; return a line of text that says which was done."""
    saved_automation = next(iter(prefect_client.read_automations_by_name(automation.name)), None)
    if saved_automation is None:
        prefect_client.create_automation(automation)
        return f"automation {automation.name!r}: made"
    if all(getattr(saved_automation, key) == getattr(automation, key) for key in ("description", "trigger", "actions")):
        return f"automation {automation.name!r}: there"
    automation = automation.model_copy(update={"enabled": saved_automation.enabled})
    # Send the request directly: the update method of Prefect's client omits the types of triggers and actions.
    automation_json = automation.model_dump(mode="json", exclude={"owner_resource"})
    path_params = {"id": saved_automation.id}
    prefect_client.request("PUT", "/automations/{id}", path_params=path_params, json=automation_json).raise_for_status()
    return f"automation {automation.name!r}: changed"
