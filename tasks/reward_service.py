"""Provide the reward service of a stage: a running one, or one started on this machine or on another work pool.

On another work pool, the deployment `reward-service/POOL` serves rewards. A Prefect block contains its address and
token; it is deleted when the stage ends, which is the signal for the service to end.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import TERMINAL_STATES, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelling

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, RewardError, StageFailed
from cosmos_core.launch.blocks import delete_service_block, read_service_variables
from cosmos_core.launch.managed_service import managed_reward_service
from cosmos_core.launch.service_health import write_health
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.directory import Run
from tasks.remote_stage import require_second_slot

_POLL_SECONDS = 1.0
_SERVICE_LOAD_TIMEOUT_SECONDS = 1800.0


@contextlib.contextmanager
def reward_service(run: Run, stage: StageConfig) -> Iterator[dict[str, str]]:
    """Provide the reward service of a stage during the `with` block; yield the environment variables with its address
    and token. Raises `RewardError` if the service does not start, and `ConfigError` if the Prefect block or the
    deployment of the service does not exist."""
    path, recipe = run.stage_path(stage.name), run.pipeline.recipes[stage.name]
    if stage.reward_service_pool:
        running_service = _run_remote_service(stage, path)
    else:
        has_remote_rewards = recipe.train.train_policy.remote_reward_config or recipe.validation.remote_reward_config
        # Pass on the address of a running reward service from the environment of this process.
        environment = os.environ if has_remote_rewards and run.pipeline.stage_kind(stage).scores else {}
        running_service = managed_reward_service(
            stage.reward_service, path, run.pipeline.config.python, partial(sleep_unless_stopping, 0), environment
        )
    with running_service as service_variables:
        yield service_variables


@contextlib.contextmanager
def _run_remote_service(stage: StageConfig, stage_path: Path) -> Iterator[dict[str, str]]:
    block_name = f"run-{uuid.uuid4().hex}"
    with get_client(sync_client=True) as prefect_client:
        require_second_slot(prefect_client, stage, str(flow_run.id or ""), "reward_service_pool")
        service_run_id, uncancelled_states = _start_service_run(stage, block_name), TERMINAL_STATES
        try:
            service_variables = _wait_for_service(prefect_client, stage, service_run_id, block_name)
            # The service has created its Prefect block; it ends when the block is deleted, and needs no cancellation.
            uncancelled_states = TERMINAL_STATES | {StateType.RUNNING}
            try:
                yield service_variables
            finally:
                write_health(stage_path, service_variables)
        finally:
            # Ignore an unreachable Prefect server, because the service ends with this flow run in any case.
            with contextlib.suppress(httpx.HTTPError, ObjectNotFound):
                delete_service_block(prefect_client, block_name)
                if prefect_client.read_flow_run(service_run_id).state_type not in uncancelled_states:
                    prefect_client.set_flow_run_state(service_run_id, Cancelling())


def _start_service_run(stage: StageConfig, block_name: str) -> UUID:
    work_pool = stage.reward_service_pool
    flow_parameters = {"config": stage.reward_service, "block": block_name, "of_flow_run": str(flow_run.id or "")}
    try:
        created_flow_run: Any = run_deployment(f"reward-service/{work_pool}", parameters=flow_parameters, timeout=0)
    except ObjectNotFound as error:
        raise ConfigError(
            f"stage {stage.name!r}: reward_service_pool = {work_pool!r}: the server has no deployment "
            f"reward-service/{work_pool}; add one like reward-service/gpu to prefect.yaml, then: prefect deploy "
            f"-n reward-service/{work_pool}"
        ) from error
    return UUID(str(created_flow_run.id))


def _wait_for_service(
    prefect_client: SyncPrefectClient, stage: StageConfig, service_run_id: UUID, block_name: str
) -> dict[str, str]:
    """Wait until the service accepts requests, and return the environment variables with its address and token. Raises
    `RewardError` if a reward or its configuration is wrong, and `StageFailed` if the service ended for another reason,
    its machine was lost, or it was not ready in time."""
    deadline = time.monotonic() + _SERVICE_LOAD_TIMEOUT_SECONDS
    service_label = f"the reward service on {stage.reward_service_pool!r}"
    while (service_variables := read_service_variables(prefect_client, block_name)) is None:
        state = prefect_client.read_flow_run(service_run_id).state
        if state is not None and state.type in TERMINAL_STATES:
            message = " ".join(str(state.message or "").split())
            has_config_error = state.type == StateType.FAILED and ("RewardError" in message or "ConfigError" in message)
            raise (RewardError if has_config_error else StageFailed)(f"{service_label} ended: {state.name}: {message}")
        if time.monotonic() > deadline:
            raise StageFailed(
                f"{service_label} did not load in {_SERVICE_LOAD_TIMEOUT_SECONDS:g} s; does a worker of the pool run?"
            )
        sleep_unless_stopping(_POLL_SECONDS)
    return service_variables
