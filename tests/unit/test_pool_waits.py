"""What a stage on a work pool waits for: a worker, a pool or a queue that is paused, a slot that is never free."""

from __future__ import annotations

import uuid
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.exceptions import ObjectNotFound

from cosmos_core.config.schema.pipeline import StageConfig
from cosmos_core.errors import ConfigError
from cosmos_core.run.state import read_state
from tasks import remote_stage, reward_service

STAGE = StageConfig(name="first", kind="custom", entry="x:y", work_pool="gpu")


class Pool:
    """A work pool as a server tells of it, with one queue."""

    def __init__(self) -> None:
        self.is_paused = False
        self.queue = SimpleNamespace(name="nightly", is_paused=False)
        self.workers: list[Any] = []

    def read_workers_for_work_pool(self, name: str) -> Any:
        return self.workers

    def read_work_pool(self, name: str) -> Any:
        return self

    def read_work_queue(self, queue_id: str) -> Any:
        return self.queue


def test_a_stage_whose_pool_or_queue_has_one_slot_that_its_own_flow_run_takes_is_refused() -> None:
    pool_limit = r"pool 'big' runs one .* big --limit 2$"
    queue_limit = r"queue 'q' of pool 'big' runs one .*: prefect work-queue set-concurrency-limit q 2 --pool big$"
    for pool, limit, queue, said in (
        ("big", 1, 9, pool_limit), ("big", 2, 9, ""), ("big", None, None, ""), ("cpu", 1, 1, ""),
        ("big", None, 1, queue_limit), ("big", 1, 1, pool_limit),
    ):  # fmt: skip
        server: Any = SimpleNamespace(
            read_deployment_by_name=lambda name: SimpleNamespace(
                work_pool_name={"stage/gpu": "big"}[name], work_queue_id="1"
            ),
            read_flow_run=lambda _, pool=pool: SimpleNamespace(work_pool_name=pool, work_queue_id="1"),
            read_work_pool=lambda _, limit=limit: SimpleNamespace(concurrency_limit=limit),
            read_work_queue=lambda _, queue=queue: SimpleNamespace(name="q", concurrency_limit=queue),
        )
        error = pytest.raises(ConfigError, match=f"work_pool = 'gpu': {said}") if said else nullcontext()
        with error:
            remote_stage.require_second_slot(server, STAGE, str(uuid.uuid4()))


def test_a_reward_service_that_waits_for_the_slot_of_its_own_stage_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for half an hour while the stage held its GPUs, and was tried again."""
    deployments = {"reward-service/gpu": SimpleNamespace(work_pool_name="gpu")}
    server = SimpleNamespace(
        read_deployment_by_name=deployments.__getitem__,
        read_flow_run=lambda _: SimpleNamespace(work_pool_name="gpu", work_queue_id=None),
        read_work_pool=lambda _: SimpleNamespace(concurrency_limit=1),
    )
    monkeypatch.setattr(reward_service, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(reward_service, "_start_service_run", lambda *_: pytest.fail("it is begun"))
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(uuid.uuid4()))
    served = STAGE.model_copy(update={"reward_service_pool": "gpu"})
    said = r"reward_service_pool = 'gpu': pool 'gpu' runs one .*; leave reward_service_pool out, or .* gpu --limit 2$"
    with pytest.raises(ConfigError, match=said), reward_service._run_remote_service(served, tmp_path):
        pass


def test_what_a_stage_waits_for_is_said_once_in_the_log_and_by_status(tmp_path: Path) -> None:
    lines: list[str] = []
    server: Any = Pool()
    wait, said = partial(remote_stage.report_worker_wait, server, tmp_path / "first", lines.append, "gpu", "1"), ""
    live, dead = SimpleNamespace(status="ONLINE"), SimpleNamespace(status="OFFLINE")
    for workers in ([], [dead], [live, dead], [live]):
        server.workers = workers
        said = wait(said)
    server.queue.is_paused = True
    said = wait(said)
    server.is_paused = True
    wait(said)
    assert lines == [
        "stage first: waits for a worker of pool gpu: none is live; start one: cosmos worker --pool gpu",
        "stage first: waits for a worker of pool gpu: 1 live",
        "stage first: waits for queue nightly of work pool gpu, which is paused",
        "stage first: waits for work pool gpu, which is paused",
    ]
    assert read_state(tmp_path / "first").error == "waits for work pool gpu, which is paused"


def test_a_flow_run_that_the_server_has_forgotten_takes_no_slot_of_a_pool() -> None:
    def forgotten(*_: object) -> Any:
        raise ObjectNotFound(Exception())

    server: Any = SimpleNamespace(read_flow_run=forgotten)
    remote_stage.require_second_slot(server, STAGE, str(uuid.uuid4()))
