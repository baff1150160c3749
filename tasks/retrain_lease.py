"""Let one flow run of a schedule retrain at a time: a file lock for this machine, a lease on the server for all.

The lease is a Prefect variable, whose name is unique on the server, with the id of the flow run that holds it. It
expires when that flow run is in a final state on the server: the automation of `cosmos bootstrap` marks a flow run
without heartbeats as crashed. Machines without a shared disk still decide separately whether data or settings changed.
"""

import logging
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.lock import FileLock
from cosmos_core.run.process import identify_machine

logger = logging.getLogger(__name__)

_POLL_SECONDS = 5.0


class RetrainLease:
    """Exclusive right of a flow run to retrain the pipeline of a state file and to publish its models. The right is
    released at the end of the `with` block."""

    def __init__(self, state_file: Path, flow_run: str, deployment: str = "") -> None:
        """Prepare the lock and the lease for `state_file`, the state file of a retraining. `flow_run` is the id of this
        flow run, and `deployment` the id of its deployment (empty: no deployment)."""
        self._variable_name = f"cosmos-retraining-{state_file.stem}-{deployment}".rstrip("-")
        # A flow run acquires this lock before it reads the state file, so that a run with older data does not publish
        # after a run with newer data.
        self._lock = FileLock(state_file.with_suffix(".lock"))
        self._variable_value = {"flow_run": flow_run, "machine": identify_machine(), "lock": str(self._lock.path)}
        self._lease_id: UUID | None = None

    def try_acquire(self) -> bool:
        """Try to acquire the lock and the lease; return False if another flow run holds one of them."""
        return self._lock.try_acquire() and self._try_acquire_lease()

    def acquire(self) -> None:
        """Wait until the lock and the lease are acquired. Raises `Preempted` if this process was requested to stop."""
        self._lock.acquire(on_poll=lambda: sleep_unless_stopping(0))
        while not self._try_acquire_lease():
            sleep_unless_stopping(_POLL_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lease_id is not None:
            try:
                with get_client(sync_client=True) as prefect_client:
                    _delete_variable(prefect_client, self._lease_id)
            except httpx.HTTPError as request_error:
                warning_template = "the lease %s was not removed; it expires with this flow run: %s"
                logger.warning(warning_template, self._variable_name, request_error)
        self._lock.release()

    def _try_acquire_lease(self) -> bool:
        lease_variable = VariableCreate(name=self._variable_name, value=self._variable_value)
        with get_client(sync_client=True) as prefect_client:
            while self._lease_id is None:
                try:
                    self._lease_id = prefect_client.create_variable(lease_variable).id
                except ObjectAlreadyExists:
                    if (stored_variable := prefect_client.read_variable_by_name(self._variable_name)) is None:
                        continue
                    if not self._has_expired(prefect_client, stored_variable.value):
                        return False
                    _delete_variable(prefect_client, stored_variable.id)
        return True

    def _has_expired(self, prefect_client: SyncPrefectClient, holder_record: Any) -> bool:
        """Return True if this flow run can take the lease from its holder: the holder has ended, is an earlier attempt
        of this flow run, or used the same lock file, which only this process now has locked. Each folder of runs has
        its own lock files."""
        has_same_lock_file = all(holder_record.get(key) == self._variable_value[key] for key in ("machine", "lock"))
        if holder_record["flow_run"] == self._variable_value["flow_run"] or has_same_lock_file:
            return True
        try:
            flow_run_state = prefect_client.read_flow_run(UUID(holder_record["flow_run"])).state
        except ObjectNotFound:
            return True
        return flow_run_state is None or flow_run_state.is_final()


def _delete_variable(prefect_client: SyncPrefectClient, variable_id: UUID) -> None:
    """Delete a Prefect variable by its id rather than its name, so that a newer variable of the same name is kept."""
    try:
        prefect_client.request("DELETE", "/variables/{id}", path_params={"id": variable_id})
    except httpx.HTTPStatusError as error:
        if error.response.status_code != httpx.codes.NOT_FOUND:  # 404: another flow run has deleted the variable
            raise
