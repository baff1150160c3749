"""A stage on another work pool: the deployment `stage/POOL` runs it, this task follows it.

Which flow run does it is noted beside the stage, so that a parent that died and was resumed goes on following the same
one. The child decides about reuse and retries, as the facts of its machine count; its manifest says whether it is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import BY_NAME, Cancelled, ConfigError, CosmosError, Preempted, StageFailed
from cosmos_core.launch.worker import grace_of, sleep_unless_stopping
from cosmos_core.run.directory import Run
from cosmos_core.run.files import Document, read_document, write_json
from cosmos_core.run.manifest import Result, problem
from cosmos_core.run.state import FINISHED, read_state, record_event, update_state
from tasks.reuse import existing_of_pool
from tasks.stored import Stored

logger = logging.getLogger(__name__)

NOTE = "pool.json"
_POLL_SECONDS = 1.0
_MIRROR_SECONDS = 5.0
_WORKERS_SECONDS = 10.0
_UNHEARD_SECONDS = 600.0
_MAX_BACKOFF_SECONDS = 60.0
_FINAL = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}


class Child(Document):
    """The flow run that brings a stage to its result."""

    flow_run: str
    """Empty: asked for, and whoever asked died before the server responded."""
    attempt: int
    token: str = ""
    """Part of its idempotency key, and random: a stage that was moved aside, or a run whose directory was removed,
    begins with attempt 1 again, and the server would return the flow run that ended then."""
    failures: int = 0
    """Children in a row that died without a word and without a new checkpoint."""
    failed_at: int = 0
    """Step of the newest checkpoint then."""


def perform_elsewhere(
    run: Run, stage: StageConfig, on_line: Callable[[str], None] = logger.info
) -> tuple[Result, bool]:
    """Let the stage's work pool bring it to its result, unless it is there; return it and whether it was there already.
    `on_line` is told what the pool is waited for.

    Raises:
        CosmosError: what ended the child, or there is no such deployment.
    """
    path, stored = run.stage_path(stage.name), Stored(run, stage)
    if found := existing_of_pool(run, stage):
        return found, True
    try:
        ended = _ended(run, stage, stored, on_line)
    except httpx.HTTPError as error:
        said = " ".join(str(error).split()) or type(error).__name__
        where = f"stage {stage.name!r} on {stage.work_pool!r}"
        raise StageFailed(f"{where}: the Prefect server does not respond: {said}") from error
    result = stored.receive_result()
    if ended.state_type == StateType.COMPLETED and result is not None:
        if damage := problem(path, result):
            raise StageFailed(f"stage {stage.name!r} on {stage.work_pool!r}: {damage}: do both machines share {path}?")
        return result, read_state(path).state == "reused"
    raise _why(stage, path, ended)


def _ended(run: Run, stage: StageConfig, stored: Stored, on_line: Callable[[str], None]) -> FlowRun:
    """Follow the flow run that an earlier parent began, or a new one, to its end."""
    with get_client(sync_client=True) as client:
        child = _going(client, run.stage_path(stage.name)) or _begin(run, stage, stored)
        try:
            wait = Wait(client, stage, run.stage_path(stage.name), on_line)
            return _follow(client, stage, UUID(child.flow_run), stored.mirror(), wait)
        except Preempted:
            _cancel(client, child, grace_of(run.stage_path(stage.name), run.pipeline.config.grace_seconds))
            stored.mirror()()
            raise


def count_death(path: Path) -> int:
    """Count a child that could not count its own failure, because its machine or its process was gone; return how many
    in a row died so. A new child has forgotten what state.json counted before."""
    child, step = read_document(path / NOTE, Child), read_state(path).checkpoint_step or 0
    if child is None:
        return 1
    counted = child.model_copy(
        update={"failures": 1 if step > child.failed_at else child.failures + 1, "failed_at": step}
    )
    write_json(path / NOTE, counted.model_dump())
    return counted.failures


def _going(client: SyncPrefectClient, path: Path) -> Child | None:
    """The flow run of an earlier parent, if it has not ended."""
    child = read_document(path / NOTE, Child)
    try:
        found = client.read_flow_run(UUID(child.flow_run)) if child and child.flow_run else None
    except ObjectNotFound:  # of another server
        return None
    return child if found is not None and found.state_type not in _FINAL else None


def _begin(run: Run, stage: StageConfig, stored: Stored) -> Child:
    path = run.stage_path(stage.name)
    before = read_document(path / NOTE, Child)
    if before and before.failures:
        sleep_unless_stopping(min(_MAX_BACKOFF_SECONDS, 2.0 ** (before.failures - 1)))
    asked = _asked(before)
    try:
        where = stored.send_run()
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / NOTE, asked.model_dump())  # before the server is asked: a kill in between asks for the same
        found: Any = run_deployment(
            f"stage/{stage.work_pool}",
            parameters={"run": where, "name": stage.name},
            timeout=0,
            idempotency_key=f"{where}/{stage.name}/{asked.attempt}/{asked.token}",
            tags=[f"cosmos-run:{run.id}"],
        )
    except ObjectNotFound as error:
        pool = stage.work_pool
        raise ConfigError(
            f"stage {stage.name!r}: work_pool = {pool!r}: the server has no deployment stage/{pool}; add one like "
            f"stage/cpu to prefect.yaml, then: cosmos bootstrap --pool {pool}, prefect deploy -n stage/{pool}"
        ) from error
    child = asked.model_copy(update={"flow_run": str(found.id)})
    write_json(path / NOTE, child.model_dump())
    record_event(path, "sent", f"to work pool {stage.work_pool}, flow run {child.flow_run}")
    return child


def _asked(before: Child | None) -> Child:
    """The next child, which the server is still to begin; the one that an earlier parent asked for, if it died then."""
    if before is None:
        return Child(flow_run="", attempt=1, token=uuid4().hex)
    if not before.flow_run:
        return before
    return before.model_copy(update={"flow_run": "", "attempt": before.attempt + 1, "token": uuid4().hex})


class Wait:
    """What a stage waits for until a worker takes its flow run, for the log of the flow and for `state.json`."""

    def __init__(
        self, client: SyncPrefectClient, stage: StageConfig, path: Path, on_line: Callable[[str], None]
    ) -> None:
        self._client, self._pool, self._path, self._on_line = client, stage.work_pool, path, on_line
        self._said, self._next = "", 0.0

    def look(self) -> None:
        """Say it once, and again when it changes."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _WORKERS_SECONDS
        said = self._words()
        if said != self._said:
            self._said = said
            self._on_line(f"stage {self._path.name}: {said}")
            update_state(self._path, state="waiting", error=said)

    def _words(self) -> str:
        workers = self._client.read_workers_for_work_pool(self._pool)
        num_live = sum(getattr(worker.status, "value", worker.status) == "ONLINE" for worker in workers)
        if self._client.read_work_pool(self._pool).is_paused:
            return f"waits for work pool {self._pool}, which is paused"
        if num_live:
            return f"waits for a worker of pool {self._pool}: {num_live} live"
        return f"waits for a worker of pool {self._pool}: none is live; start one: cosmos worker --pool {self._pool}"


def _follow(
    client: SyncPrefectClient, stage: StageConfig, flow_run: UUID, mirror: Callable[[], None], wait: Wait
) -> FlowRun:
    mirrored, heard = 0.0, time.monotonic()
    while True:
        try:
            found = client.read_flow_run(flow_run)
            if found.state_type == StateType.SCHEDULED:
                wait.look()
            heard = time.monotonic()
        except ObjectNotFound as error:  # somebody deleted it
            where = f"stage {stage.name!r} on {stage.work_pool!r}"
            raise StageFailed(f"{where}: its flow run {flow_run} is gone from the server") from error
        except httpx.HTTPError:  # a server that is started again; the child goes on meanwhile
            if time.monotonic() - heard > _UNHEARD_SECONDS:
                raise
            sleep_unless_stopping(_POLL_SECONDS)
            continue
        if time.monotonic() - mirrored > _MIRROR_SECONDS:
            mirror()
            mirrored = time.monotonic()
        if found.state_type in _FINAL:
            return found
        sleep_unless_stopping(_POLL_SECONDS)


def _cancel(client: SyncPrefectClient, child: Child, grace_seconds: float) -> None:
    """Ask the child to save and end, and wait for it as long as its worker may take."""
    flow_run = UUID(child.flow_run)
    with suppress(httpx.HTTPError, ObjectNotFound):  # that the stage is stopped is what counts here
        client.set_flow_run_state(flow_run, Cancelling())
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and client.read_flow_run(flow_run).state_type not in _FINAL:
            time.sleep(_POLL_SECONDS)


def _why(stage: StageConfig, path: Path, ended: FlowRun) -> CosmosError:
    """What the stage itself noted, unless its machine went away before it could."""
    state, message = read_state(path), ended.state.message if ended.state else ""
    where = f"stage {stage.name!r} on {stage.work_pool!r}"
    if state.state == "failed" and state.error_type in BY_NAME:
        return BY_NAME[state.error_type](state.error)
    if ended.state_type == StateType.CANCELLED:
        return Cancelled(f"{where}: its flow run was cancelled")
    if state.state == "stopped":
        return Preempted(f"{where}: {state.error or 'stopped'}")
    if ended.state_type == StateType.COMPLETED and state.state in FINISHED:
        return StageFailed(f"{where}: it is done there, but {path} has no result: the machines share no disk")
    return StageFailed(f"{where}: its flow run {ended.state_name}: {' '.join(str(message).split())}")
