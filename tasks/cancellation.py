"""Detect in the process of a flow, by polling the Prefect server, that its flow run was cancelled or suspended.

Prefect's worker stops the process of a cancelled flow run, but stops polling for good, without an error, when the
server was unreachable for half a minute.
"""

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from functools import lru_cache
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import SettingsContext, SyncClientContext, get_settings_context
from prefect.exceptions import ObjectNotFound, Pause, TerminationSignal
from prefect.futures import PrefectConcurrentFuture
from prefect.runtime import flow_run
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, Settings
from prefect.states import Cancelled as CancelledState

from cosmos_core.errors import Cancelled, StageFailed
from cosmos_core.launch import worker
from cosmos_core.run.directory import Run
from cosmos_core.run.liveness import record_stop

logger = logging.getLogger(__name__)

_CANCELLED_STATES = {StateType.CANCELLING, StateType.CANCELLED}
_SUSPENDED_STATE = "Suspended"  # Prefect ends the process of a suspended flow run, but not of a paused one
_MAX_UNREACHABLE_SECONDS = 600.0
_POLL_SECONDS = 1.0
_MAX_REQUEST_SECONDS = 5.0
_SCHEDULER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # signals that cluster schedulers send before they end a job
_executed_flow_run_ids: set[UUID] = set()
_single_request_settings: list[Settings] = []
"""Cache of two entries, empty before its first use: the settings of Prefect, and a copy of them with which a client
sends each request only once."""


def wait_unless_cancelled(pending_futures: Collection[futures.Future[Any]]) -> bool:
    """Wait until all futures have ended, and return False; return True as soon as the flow run is cancelled or
    suspended."""
    while pending_futures:
        pending_futures = futures.wait(pending_futures, timeout=_MAX_REQUEST_SECONDS).not_done
        if pending_futures and is_cancelled():
            return True
    return False


def is_cancelled(*, repeats_requests: bool = False) -> bool | None:
    """Return True if the current flow run was cancelled or suspended, for example with the Pause button of Prefect's
    UI, or if this has happened to the parent flow run whose stage it executes. Return None if the server does not
    respond; with `repeats_requests`, after repeating the request for minutes. Return False outside of a flow run, and
    if the flow run was deleted."""
    if not flow_run.id:
        return False
    try:
        with _open_client() as prefect_client, nullcontext() if repeats_requests else request_once():
            prefect_run = prefect_client.read_flow_run(UUID(flow_run.id))
            if not _is_cancelled_or_suspended(prefect_run) and prefect_run.parent_task_run_id is not None:
                prefect_run = prefect_client.read_flow_run(_find_parent_flow_run(prefect_run.parent_task_run_id))
            return _is_cancelled_or_suspended(prefect_run)
    except ObjectNotFound:
        return False
    except httpx.HTTPError:
        return None


def _is_cancelled_or_suspended(prefect_run: FlowRun) -> bool:
    return prefect_run.state_type in _CANCELLED_STATES or prefect_run.state_name == _SUSPENDED_STATE


def raise_if_suspended() -> None:
    """Raise Prefect's `Pause` if the flow run is suspended: with a final state instead, no person could resume it."""
    with suppress(httpx.HTTPError, ObjectNotFound), _open_client() as prefect_client:
        prefect_run = prefect_client.read_flow_run(UUID(flow_run.id))
        if prefect_run.state_name == _SUSPENDED_STATE:
            raise Pause(state=prefect_run.state)


def confirm_cancellation_at_exit() -> None:
    """Let this process set the state Cancelled of the current flow run when it exits, if the flow run is then in the
    state Cancelling. A worker usually does so, but may have died; the server would do so after five minutes."""
    if flow_run.id and os.environ.get("PREFECT_API_URL"):
        # Without this URL, the Prefect server ends with this process, so the flow run needs no final state.
        if not _executed_flow_run_ids:
            atexit.register(confirm_cancellations)
        _executed_flow_run_ids.add(UUID(flow_run.id))


def confirm_cancellations() -> None:
    """Set the state Cancelled of each flow run that this process has executed and that is in the state Cancelling."""
    for flow_run_id in _executed_flow_run_ids:
        with suppress(httpx.HTTPError, ObjectNotFound), get_client(sync_client=True) as prefect_client:
            if prefect_client.read_flow_run(flow_run_id).state_type == StateType.CANCELLING:
                prefect_client.set_flow_run_state(flow_run_id, CancelledState(message="cancelled: its process ends"))


def _set_signal_handler(signal_numbers: Iterable[int], handler: Callable[[int, Any], None] | signal.Handlers) -> None:
    """Set a handler for signals if this is the main thread: Python allows no other thread to set one. Prefect restores
    its own handler of SIGTERM when a flow ends."""
    if threading.current_thread() is threading.main_thread():
        for signal_number in signal_numbers:
            signal.signal(signal_number, handler)


def stop_on_signals(
    read_signal_names: Callable[[], Collection[str]], on_stop: Callable[[], None] = lambda: None
) -> None:
    """Install signal handlers that let workers save a checkpoint and call `on_stop` before a Python flow ends.
    `read_signal_names` returns the signal names in `train.signal_to_handle` of the recipes that the flow has used so
    far."""

    def handle_signal(signal_number: int, stack_frame: object) -> None:
        if signal_number in _SCHEDULER_SIGNALS and signal.Signals(signal_number).name not in read_signal_names():
            signal.signal(signal_number, signal.SIG_DFL)
            signal.raise_signal(signal_number)
        worker.stop_all()
        on_stop()
        if signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        _set_signal_handler((signal.SIGTERM, *_SCHEDULER_SIGNALS), signal.SIG_IGN)
        raise TerminationSignal(signal=signal_number)

    _set_signal_handler((signal.SIGTERM, signal.SIGINT, *_SCHEDULER_SIGNALS), handle_signal)


def terminate_on_signals(run: Run) -> None:
    """Let the signals that the recipes of the run name in `train.signal_to_handle` end the flow as SIGTERM does. At its
    exit, this process sets the state Cancelled of the flow run if the flow run is being cancelled."""
    confirm_cancellation_at_exit()

    def handle_signal(signal_number: int, stack_frame: object) -> None:
        raise TerminationSignal(signal=signal_number)

    _set_signal_handler(_list_stop_signals(run), handle_signal)


def _list_stop_signals(run: Run) -> set[signal.Signals]:
    return {signal.Signals[name] for recipe in run.pipeline.recipes.values() for name in recipe.train.signal_to_handle}


def stop_stages(run: Run, stage_futures: list[PrefectConcurrentFuture[Any]]) -> None:
    """Ask the workers of this process to save a checkpoint and exit, and wait for the stages to end. Ignore repeated
    stop signals, except SIGINT, during the wait."""
    _set_signal_handler({signal.SIGTERM, *_list_stop_signals(run)} - {signal.SIGINT}, signal.SIG_IGN)
    worker.stop_all()
    grace_seconds = max(run.pipeline.config.grace_seconds, worker.longest_grace_seconds())
    # Wait for the wrapped futures, because `prefect.futures.wait` does not wait in a suspended flow run.
    futures.wait([stage.wrapped_future for stage in stage_futures], timeout=grace_seconds + 5)
    record_stop(run.path, [stage.name for stage in run.pipeline.stages])


def make_publication_check() -> Callable[[], None]:
    """Return a function that any thread calls before it publishes. The function raises `Cancelled` if the flow run was
    cancelled, and `Preempted` if this process was requested to stop. While the Prefect server does not respond, the
    function waits; after ten minutes it raises `StageFailed`, since the flow run may have been cancelled."""
    flow_run_context = copy_context()  # a copy, because other threads do not see the current flow run and its client

    def raise_if_cancelled() -> None:
        wait_start_time, has_warned_of_wait = time.monotonic(), False
        worker.sleep_unless_stopping(0)
        while (was_flow_run_cancelled := flow_run_context.copy().run(is_cancelled)) is None:
            if time.monotonic() - wait_start_time > _MAX_UNREACHABLE_SECONDS:
                raise StageFailed("the Prefect server does not respond, so nothing is published: was it cancelled?")
            if not has_warned_of_wait:
                logger.warning("the Prefect server does not respond: the publication waits until it does")
                has_warned_of_wait = True
            worker.sleep_unless_stopping(_POLL_SECONDS)
        if was_flow_run_cancelled:
            raise Cancelled("its flow run was cancelled, so nothing is published")

    return raise_if_cancelled


@contextmanager
def _open_client() -> Iterator[SyncPrefectClient]:
    """Yield the Prefect client of the current flow run, or a new one in a thread without the flow run's context."""
    if client_context := SyncClientContext.get():
        yield client_context.client
        return
    with get_client(sync_client=True) as client:
        yield client


@contextmanager
def request_once() -> Iterator[None]:
    """Let Prefect's client send each request only once during the `with` block. With Prefect's retries it would wait
    for minutes after failed requests, and a flow would meanwhile notice neither the end of a stage nor a
    cancellation."""
    context = get_settings_context()
    if not _single_request_settings or _single_request_settings[0] is not context.settings:
        # Keep the copied settings for later calls, because copying Prefect's settings takes 40 ms.
        no_retry_settings = context.settings.copy_with_update(updates={PREFECT_CLIENT_MAX_RETRIES: 0})
        _single_request_settings[:] = context.settings, no_retry_settings
    with SettingsContext(profile=context.profile, settings=_single_request_settings[1]):
        yield


@lru_cache
def _find_parent_flow_run(task_run_id: UUID) -> UUID:
    with _open_client() as client:
        parent_flow_run_id = client.read_task_run(task_run_id).flow_run_id
    if parent_flow_run_id is None:
        raise ObjectNotFound(Exception(f"task run {task_run_id} has no flow run"))
    return parent_flow_run_id
