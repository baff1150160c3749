"""What a Prefect server needs beside the deployments: work pools, an automation that notices dead flow runs, and the
types of blocks that pipelines name.

What is there stays, and what an older version made is brought up to date. GPUs are counted by the concurrency limit of
a work pool, which says how many runs begin; a limit that a run holds as a lease would end a training that cannot renew
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from cosmos_core.errors import ConfigError

POOLS = ("local", "cpu", "gpu")
"""Those that `prefect.yaml` has deployments for."""
AUTOMATION = "cosmos: a flow run without a heartbeat has crashed"
HEARTBEAT_SECONDS = 30
"""What the deployments ask of their flow runs; Prefect takes no less."""
_MISSED = 3
OUTCOMES = ("NothingNew", "StillTraining", "NotPromoted", "Declined", "Outdated", "Refused")
"""Names of the final states that flows of this project return."""
_ENDS = ("Completed", "Failed", "Cancelled", "Crashed", "TimedOut")
_WITHOUT_PROCESS = ("Suspended", "Paused", "Resuming", "Scheduled", "AwaitingRetry", "AwaitingConcurrencySlot", "Late")
"""States of a flow run that has no process, and so sends no heartbeat."""
_RESERVED = "prefect"
_NO_NAME = set("/%&<>")  # which Prefect takes in no name


@dataclass(frozen=True)
class Pool:
    """A work pool that is to be there."""

    name: str
    type: str = "process"
    limit: int | None = None
    """Most runs at once; None: as many as its workers take."""
    template: Path | None = None
    """Base job template, a JSON file; None: that of the type."""


def bootstrap(pools: Sequence[Pool]) -> Iterator[str]:
    """Make what is not there yet; yield a line about each thing.

    Raises:
        ConfigError: there is no server, a template is no JSON, or a pool has a name or a type that cannot be.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    for pool in pools:
        _check_name(pool.name)
    url = get_current_settings().api.url
    if not url:
        raise ConfigError("PREFECT_API_URL is not set; start a server (prefect server start) and set it to its /api")
    with get_client(sync_client=True) as client:
        try:
            client.hello()
        except Exception as error:  # whatever its transport raises
            raise ConfigError(f"the Prefect server at {url} does not respond: {error}") from error
        for pool in pools:
            yield _pool(client, pool)
        yield _automation(client)
        yield _credentials(client)
    yield _block_types()


def _check_name(name: str) -> None:
    if not name.strip() or _NO_NAME & set(name) or name.lower().startswith(_RESERVED):
        raise ConfigError(
            f"work pool {name!r}: a name has no {' '.join(sorted(_NO_NAME))}, and those that begin with "
            f"{_RESERVED!r} are Prefect's own; take another"
        )


def _check_type(client: Any, pool: Pool) -> None:
    """Make sure that Prefect knows the type of a pool that brings no template of its own."""
    if pool.type == Pool.type:
        return  # a server looks up the others elsewhere
    collections = client.read_worker_metadata().values()
    known = sorted({str(worker["type"]) for collection in collections for worker in collection.values()})
    if pool.type not in known:
        raise ConfigError(
            f"work pool {pool.name!r}: there is no type {pool.type!r}; known: {', '.join(known)}. Of another one "
            "give the --template"
        )


def _pool(client: Any, pool: Pool) -> str:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    template = _template(pool)
    try:
        there = client.read_work_pool(pool.name)
    except ObjectNotFound:
        if not template:
            _check_type(client, pool)
        wanted = {"base_job_template": template} if template else {}
        client.create_work_pool(WorkPoolCreate(name=pool.name, type=pool.type, concurrency_limit=pool.limit, **wanted))
        return f"work pool {pool.name}: made ({pool.type}{_limit(pool.limit)})"
    if there.type != pool.type:
        raise ConfigError(
            f"work pool {pool.name!r} is of type {there.type}, not {pool.type}; delete it, or take another name"
        )
    changes: dict[str, Any] = {}
    if pool.limit is not None and there.concurrency_limit != pool.limit:
        changes["concurrency_limit"] = pool.limit
    if template and there.base_job_template != template:
        changes["base_job_template"] = template
    if not changes:
        return f"work pool {pool.name}: there ({there.type}{_limit(there.concurrency_limit)})"
    client.update_work_pool(pool.name, WorkPoolUpdate(**changes))
    return f"work pool {pool.name}: changed ({', '.join(changes)})"


def _template(pool: Pool) -> dict[str, Any]:
    if pool.template is None:
        return {}
    try:
        found: dict[str, Any] = json.loads(pool.template.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"template {pool.template} of work pool {pool.name!r} cannot be read: {error}") from error
    return found


def _limit(limit: int | None) -> str:
    return f", at most {limit} at once" if limit is not None else ""


def _automation(client: Any) -> str:
    """Make the automation, or bring one that an older version made up to date; whether it is enabled stays."""
    from prefect.events.actions import ChangeFlowRunState
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    ends = {f"prefect.flow-run.{name}" for name in (*_ENDS, *OUTCOMES, *_WITHOUT_PROCESS)}
    there = client.read_automations_by_name(AUTOMATION)
    wanted = AutomationCore(
        name=AUTOMATION,
        description=f"After {_MISSED} heartbeats that did not come: its process or its machine is gone.",
        enabled=there[0].enabled if there else True,
        trigger=EventTrigger(
            match={"prefect.resource.id": "prefect.flow-run.*"},  # type: ignore[arg-type]
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ends},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=_MISSED * HEARTBEAT_SECONDS),
        ),
        actions=[ChangeFlowRunState(state="CRASHED", message="no heartbeat: its process is gone; resume the run")],  # type: ignore[arg-type]
    )
    if not there:
        client.create_automation(wanted)
        return f"automation {AUTOMATION!r}: made"
    if all(getattr(there[0], key) == getattr(wanted, key) for key in ("description", "trigger", "actions")):
        return f"automation {AUTOMATION!r}: there"
    content = wanted.model_dump(mode="json", exclude={"owner_resource"})  # Prefect's own update omits types
    client.request("PUT", "/automations/{id}", path_params={"id": there[0].id}, json=content).raise_for_status()
    return f"automation {AUTOMATION!r}: changed"


def _credentials(client: Any) -> str:
    from prefect.exceptions import ObjectNotFound

    block = "cosmos-credentials"
    try:
        client.read_block_document_by_name(block, "secret")
    except ObjectNotFound:
        return f"block secret/{block}: not there; workers take credentials from their environment"
    return f"block secret/{block}: there"


def _block_types() -> str:
    from cosmos_core.launch.blocks import SLUG, RewardService

    RewardService.register_type_and_schema()
    return f"block type {SLUG}: registered"
