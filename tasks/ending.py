"""How task and flow runs end: with a name and one line that say why, and no traceback for what is no error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Cancelled as CancelledState
from prefect.states import Completed, Failed

from cosmos_core.errors import CosmosError, GateFailed, Preempted
from cosmos_core.run.directory import Run

REFUSED = "Refused"
"""A gate's condition does not hold."""
_SKIPPED = "Skipped"


def ended(error: CosmosError) -> State[Any]:
    """Return the final state of a stage that is not tried again; raised, the error would be logged with a traceback."""
    if isinstance(error, GateFailed):
        return Failed(name=REFUSED, message=str(error), data=error)
    return Failed(name="Stopped" if isinstance(error, Preempted) else None, message=str(error), data=error)


def skipped(why: str) -> State[Any]:
    """Return the final state of a stage that is never begun. Prefect itself would leave its task run pending for ever,
    and all after it, also where this one were cancelled."""
    return Completed(name=_SKIPPED, message=why)


def has_result(future: PrefectFuture[Any]) -> bool:
    """Return whether the stage of a task run, which has ended, came to its result."""
    state = state_of(future)
    return state.is_completed() and state.name != _SKIPPED


def state_of(future: PrefectFuture[Any]) -> State[Any]:
    """Return the state of a task run; without the wait it would be what the server has heard of it so far."""
    future.wait(timeout=0)
    return future.state


def of_flow(run: Run, futures: Mapping[str, PrefectFuture[Any]], *, is_cancelled: bool) -> State[Any]:
    """Return the final state of the flow run that ran these stages."""
    bad = {name: state_of(future) for name, future in futures.items() if not has_result(future)}
    if not bad:
        return Completed(message=f"run {run.id}: {len(futures)} stages completed", data=str(run.path))
    if is_cancelled:
        return CancelledState(message=f"run {run.id}: cancelled; it goes on with: cosmos resume {run.path}")
    errors = list({str(error): error for error in map(_error_of, bad.values()) if error})
    refusals = [error for error in map(_error_of, bad.values()) if isinstance(error, GateFailed)]
    if refusals and len(refusals) == sum(state.is_failed() for state in bad.values()):
        return Failed(name=REFUSED, message=f"run {run.id}: {'; '.join(errors)}")
    return Failed(message="; ".join([f"run {run.id}: not completed: {', '.join(bad)}", *errors]))


def _error_of(state: State[Any]) -> CosmosError | None:
    data = getattr(state.data, "result", state.data)  # Prefect wraps what a task returns
    return data if isinstance(data, CosmosError) else None
