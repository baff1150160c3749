"""Whether this flow run was cancelled, which the flow asks the server itself.

Prefect's worker stops the process of a cancelled flow run, but its polling ends for good when the server was away for
half a minute, and the worker goes on as if nothing were wrong.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent import futures
from contextvars import copy_context
from functools import lru_cache
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound, TerminationSignal
from prefect.futures import PrefectFuture, wait
from prefect.runtime import flow_run

from cosmos_core.errors import Cancelled, StageFailed
from cosmos_core.launch import worker
from cosmos_core.run.directory import Run

logger = logging.getLogger(__name__)

_CANCELLED = {StateType.CANCELLING, StateType.CANCELLED}
_UNHEARD_SECONDS = 600.0
_POLL_SECONDS = 1.0
_ASK_SECONDS = 5.0


def wait_unless_cancelled(pending: Collection[futures.Future[Any]], seconds: float = _ASK_SECONDS) -> bool:
    """Wait for tasks, and ask each `seconds` whether this flow run was cancelled; return whether it was."""
    while pending:
        pending = futures.wait(pending, timeout=seconds).not_done
        if pending and is_cancelled():
            return True
    return False


def is_cancelled() -> bool | None:
    """Return whether this flow run, or the one whose stage it runs, was cancelled; None: the server does not respond.

    False where there is no flow run, or somebody deleted it.
    """
    if not flow_run.id:
        return False
    client = get_client(sync_client=True)
    try:
        found = client.read_flow_run(UUID(flow_run.id))
        if found.state_type in _CANCELLED or found.parent_task_run_id is None:
            return found.state_type in _CANCELLED
        return _parent(client, found.parent_task_run_id).state_type in _CANCELLED
    except ObjectNotFound:
        return False
    except httpx.HTTPError:
        return None


def listen_for_stop(run: Run) -> None:
    """`train.signal_to_handle` stops the flow as SIGTERM does, for which Prefect listens itself."""

    def terminate(number: int, frame: object) -> None:
        raise TerminationSignal(signal=number)

    if threading.current_thread() is threading.main_thread():
        for name in {name for recipe in run.pipeline.recipes.values() for name in recipe.train.signal_to_handle}:
            signal.signal(signal.Signals[name], terminate)


def stop_stages(run: Run, stages: list[PrefectFuture[Any]]) -> None:
    """Ask the workers of this process to save and end, and wait for them; a second SIGTERM changes nothing."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the flow ends, when Prefect restores it
    worker.stop_all()
    wait(stages, timeout=max(run.pipeline.config.grace_seconds, worker.longest_grace()) + 5)


def publication_check() -> Callable[[], None]:
    """Return a function, for any thread, that raises if a publication is not to go on. It waits for a server that does
    not respond: the flow run may have been cancelled shortly before.

    The function raises:
        Cancelled: the flow run was cancelled.
        Preempted: this process is to stop.
        StageFailed: the server did not respond for ten minutes.
    """
    context = copy_context()  # in which the flow run and its client are known

    def check() -> None:
        began, is_told = time.monotonic(), False
        worker.sleep_unless_stopping(0)
        while (was_cancelled := context.copy().run(is_cancelled)) is None:
            if time.monotonic() - began > _UNHEARD_SECONDS:
                raise StageFailed("the Prefect server does not respond, so nothing is published: was it cancelled?")
            if not is_told:
                logger.warning("the Prefect server does not respond: the publication waits until it does")
                is_told = True
            worker.sleep_unless_stopping(_POLL_SECONDS)
        if was_cancelled:
            raise Cancelled("its flow run was cancelled, so nothing is published")

    return check


def _parent(client: SyncPrefectClient, task_run: UUID) -> FlowRun:
    parent = _flow_run_of(client, task_run)
    if parent is None:
        raise ObjectNotFound(Exception(f"task run {task_run} has no flow run"))
    return client.read_flow_run(parent)


@lru_cache
def _flow_run_of(client: SyncPrefectClient, task_run: UUID) -> UUID | None:
    return client.read_task_run(task_run).flow_run_id
