"""Calls of stages in a Python flow that fail before the stage is part of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefect import flow

from cosmos_core.config.compose import Pipeline
from cosmos_core.errors import DataError, UploadError
from tasks import custom, flow_run
from tests.flows.test_flows_in_python import GROW, folder

__all__ = ["folder"]


def test_a_store_that_does_not_respond_fails_a_call_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the stage has begun that could be retried; another execution of the flow calls it again."""
    chosen = {"refuse": True, "retries": 0}
    requests: list[Pipeline] = []

    @flow
    def stored(run_id: str = "stored") -> float:
        arguments = {"refuse": chosen["refuse"]}
        return custom(GROW, name="model", arguments=arguments, retries=chosen["retries"]).metrics["size"]

    def fail(pipeline: Pipeline) -> None:
        requests.append(pipeline)
        raise UploadError("s3://b: no response")

    def call_without_store() -> None:
        with monkeypatch.context() as patch, pytest.raises(UploadError, match=r"^s3://b: no response$"):
            patch.setattr(flow_run, "check_store", fail)
            stored()

    call_without_store()
    assert len(requests) == 1 and not (folder / "outputs" / "stored").exists()
    with pytest.raises(DataError, match="refused on purpose"):
        stored()
    chosen["retries"] = 2  # another setting: the failed stage is added anew
    call_without_store()
    assert len(requests) == 2
    chosen["refuse"] = False
    assert stored() == 1
