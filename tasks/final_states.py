"""Build the final states of task runs and flow runs, each with a message of one line. An expected end, such as a
refused gate, produces no traceback."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture
from prefect.states import Cancelled as CancelledState
from prefect.states import Completed, Failed

from cosmos_core.errors import CosmosError, GateFailed, Preempted
from cosmos_core.run.directory import Run
from cosmos_core.run.state import read_state
from tasks.cancellation import raise_if_suspended

REFUSED_STATE = "Refused"
"""Name of the final state of a gate with a condition that does not hold."""
_SKIPPED_STATE = "Skipped"


def make_failed_state(error: CosmosError) -> State[Any]:
    """Return the final state of a stage that failed and is not retried. The state is returned instead of raising the
    error, because Prefect logs a traceback for a raised error."""
    if isinstance(error, GateFailed):
        return Failed(name=REFUSED_STATE, message=str(error), data=error)
    return Failed(name="Stopped" if isinstance(error, Preempted) else None, message=str(error), data=error)


def make_skipped_state(skip_reason: str) -> State[Any]:
    """Return the final state of a stage that will never start. Without this state, Prefect would leave its task run and
    all dependent task runs pending forever, even after a cancellation."""
    return Completed(name=_SKIPPED_STATE, message=skip_reason)


def has_result(future: PrefectFuture[Any]) -> bool:
    """Return True if the ended task run of a stage produced the result of the stage."""
    task_state = read_task_state(future)
    return task_state.is_completed() and task_state.name != _SKIPPED_STATE


def read_task_state(future: PrefectFuture[Any]) -> State[Any]:
    """Return the current state of a task run. The state of a future is outdated until its method `wait` is called."""
    future.wait(timeout=0)
    return future.state


def derive_flow_state(run: Run, futures: Mapping[str, PrefectFuture[Any]], *, is_cancelled: bool) -> State[Any]:
    """Return the final state of a flow run from the futures of its stages. If the flow run was suspended, raise
    Prefect's `Pause`, which ends the process and leaves the flow run suspended."""
    incomplete_states = {name: read_task_state(future) for name, future in futures.items() if not has_result(future)}
    if is_cancelled:
        raise_if_suspended()
        resume_hint = f"it goes on with: cosmos resume {shlex.quote(str(run.path))}"
        status_text = resume_hint if incomplete_states else "all of its stages are complete"
        return CancelledState(message=f"run {run.id}: cancelled; {status_text}")
    if not incomplete_states:
        return make_completed_state(run, list(futures))
    error_messages = list({str(error): error for error in map(_get_error, incomplete_states.values()) if error})
    gate_errors = [error for error in map(_get_error, incomplete_states.values()) if isinstance(error, GateFailed)]
    if gate_errors and len(gate_errors) == sum(state.is_failed() for state in incomplete_states.values()):
        return Failed(name=REFUSED_STATE, message=f"run {run.id}: {'; '.join(error_messages)}")
    return Failed(message="; ".join([f"run {run.id}: not completed: {', '.join(incomplete_states)}", *error_messages]))


def make_completed_state(run: Run, stage_names: Sequence[str]) -> State[Any]:
    """Return the final state of a flow run whose stages are complete; its message says how many were reused."""
    num_reused_stages = sum(read_state(run.stage_path(name)).state == "reused" for name in stage_names)
    num_reused_text = f", {num_reused_stages} of them reused from earlier runs" if num_reused_stages else ""
    return Completed(message=f"run {run.id}: {len(stage_names)} stages completed{num_reused_text}", data=str(run.path))


def _get_error(state: State[Any]) -> CosmosError | None:
    # Take the value that a task returned out of Prefect's wrapper, if it has one.
    task_result = getattr(state.data, "result", state.data)
    return task_result if isinstance(task_result, CosmosError) else None
