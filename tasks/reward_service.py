"""The reward service of a stage: beside it, one that runs already, or one that is started for it on another work pool.

There the deployment `reward-service/POOL` serves until the stage is done. Address and token come back in a block of
Prefect of its own, which is deleted afterwards: that is also what tells the service to end.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelling

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError, RewardError, StageFailed
from cosmos_core.launch.blocks import forget_service, read_service
from cosmos_core.launch.companion import companion
from cosmos_core.launch.service_health import note_health
from cosmos_core.launch.worker import sleep_unless_stopping
from cosmos_core.run.directory import Run

_POLL_SECONDS = 1.0
_LOAD_SECONDS = 1800.0
_FINAL = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}


@contextlib.contextmanager
def reward_service(run: Run, stage: StageConfig) -> Iterator[dict[str, str]]:
    """Have the service of a stage while the body runs; yield the variables by which its clients find it.

    Raises:
        RewardError: it does not start.
        ConfigError: there is no such block or deployment.
    """
    path, check = run.stage_path(stage.name), partial(sleep_unless_stopping, 0)
    serves = _elsewhere(stage, path, check) if stage.reward_service_pool else companion(
        stage.reward_service, path, run.pipeline.config.python, check, _environment(run, stage)
    )  # fmt: skip
    with serves as found:
        yield found


def _environment(run: Run, stage: StageConfig) -> Mapping[str, str]:
    """Return the environment where it names the reward service that a stage asks."""
    recipe = run.pipeline.recipes[stage.name]
    asks = recipe.train.train_policy.remote_rewards or recipe.validation.remote_rewards
    return os.environ if asks and run.pipeline.kind_of(stage).scores else {}


@contextlib.contextmanager
def _elsewhere(stage: StageConfig, path: Path, check: Callable[[], None]) -> Iterator[dict[str, str]]:
    block = f"run-{uuid.uuid4().hex}"
    serving = _begin(stage, block)
    with get_client(sync_client=True) as client:
        try:
            found = _wait(client, stage, serving, block)
            try:
                yield found
            finally:
                note_health(path, found)
        finally:
            # It ends with our flow run too: a server that is away costs the stage nothing.
            with contextlib.suppress(httpx.HTTPError, ObjectNotFound):
                forget_service(client, block)
                if client.read_flow_run(serving).state_type not in {*_FINAL, StateType.RUNNING}:
                    client.set_flow_run_state(serving, Cancelling())


def _begin(stage: StageConfig, block: str) -> UUID:
    pool = stage.reward_service_pool
    parameters = {"config": stage.reward_service, "block": block, "of_flow_run": str(flow_run.id or "")}
    try:
        found: Any = run_deployment(f"reward-service/{pool}", parameters=parameters, timeout=0)
    except ObjectNotFound as error:
        raise ConfigError(
            f"stage {stage.name!r}: reward_service_pool = {pool!r}: the server has no deployment "
            f"reward-service/{pool}; add one like reward-service/gpu to prefect.yaml, then: prefect deploy "
            f"-n reward-service/{pool}"
        ) from error
    return UUID(str(found.id))


def _wait(client: SyncPrefectClient, stage: StageConfig, serving: UUID, block: str) -> dict[str, str]:
    """Return the variables of the service once it takes requests.

    Raises:
        RewardError: a reward or its configuration is wrong.
        StageFailed: it ended otherwise, its machine went away, or no worker has it ready in time.
    """
    where, deadline = f"the reward service on {stage.reward_service_pool!r}", time.monotonic() + _LOAD_SECONDS
    while (found := read_service(client, block)) is None:
        state = client.read_flow_run(serving).state
        if state is not None and state.type in _FINAL:
            reason = " ".join(str(state.message or "").split())
            is_wrong = state.type == StateType.FAILED and ("RewardError" in reason or "ConfigError" in reason)
            raise (RewardError if is_wrong else StageFailed)(f"{where} ended: {state.name}: {reason}")
        if time.monotonic() > deadline:
            raise StageFailed(f"{where} did not load in {_LOAD_SECONDS:g} s; does a worker of the pool run?")
        sleep_unless_stopping(_POLL_SECONDS)
    return found
