"""Futures of stages that a flow in Python submits: cancelled with the flow, and reported if nothing waited for them."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run as current_flow_run
from prefect.states import Cancelling

from cosmos_core.run.progress import read_metrics
from cosmos_core.run.state import read_state
from tasks import custom
from tasks.flow_run import unfinished_stage
from tests.conftest import PROGRAMS, wait_until
from tests.flows.test_flows_in_python import GROW, folder

__all__ = ["folder"]


def test_a_cancelled_flow_stops_the_stage_for_whose_future_it_waits(folder: Path) -> None:
    @flow
    def patient(run_id: str = "patient") -> None:
        future = custom.submit(f"{PROGRAMS}/counting.py:count", name="count", arguments={"steps": 9000, "seconds": 0.1})
        path = folder / "outputs" / "patient" / "stages" / "count"
        wait_until(lambda: read_metrics(path / "metrics.jsonl"), 60, "a step")
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(UUID(current_flow_run.id), Cancelling(), force=True)
        future.result()

    with pytest.raises(Exception, match="saved at step"):
        patient()
    assert read_state(folder / "outputs" / "patient" / "stages" / "count").state == "stopped"


def test_a_stage_that_nothing_waited_for_is_reported(folder: Path) -> None:
    @flow
    def hasty(run_id: str = "hasty") -> None:
        custom.submit(GROW, arguments={"refuse": True})

    hasty()
    assert unfinished_stage().startswith("stage 'custom' is not done, and the flow did not wait for it")
