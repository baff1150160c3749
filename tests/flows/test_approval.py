"""A person who is asked before a model is published: once for each request, whatever happens to the flow run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelled, Failed, Scheduled
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.errors import ConfigError
from flows.post_train import post_train
from tests.conftest import wait_until
from tests.flows.test_retrain import Asked, Nightly, events_of, quiet

__all__ = ["quiet"]
pytestmark = pytest.mark.usefixtures("harness")


def retry(asked: Asked) -> tuple[str, str]:
    """Retry the flow run as the button of the UI does, and run it as its worker would."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(asked.id, Scheduled(name="AwaitingRetry", message="Retry from the UI"))
    return asked.go_on()


def test_a_retry_asks_again_where_nobody_answered_and_keeps_an_approval(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path)
    nightly.config.write_text(nightly.config.read_text() + "retries = 0\n")
    nightly.rows({"accuracy": 0.5})
    asked = Asked(nightly)
    assert asked.go_on()[0] == "Suspended"
    with get_client(sync_client=True) as client:  # as the server does after a week
        client.set_flow_run_state(asked.id, Failed(message="The flow was paused and never resumed."), force=True)
    assert retry(asked)[0] == "Suspended"
    obstacle = tmp_path / "published" / f".latest.{os.getpid()}.tmp"
    obstacle.mkdir(parents=True)
    assert asked.say(publish=True)[0] == "Failed"
    obstacle.rmdir()
    assert retry(asked) == ("Completed", f"run {nightly.runs[0]}: 3 stages completed")
    assert nightly.published == [0.5]
    wait_until(lambda: events_of(nightly.runs[0])[-1]["event"] == "cosmos.run.completed", 30, "all events")
    said = [event["event"] for event in events_of(nightly.runs[0])]
    assert said.count("cosmos.run.waiting") == 2, "once for each request, not for its answer"


def test_a_firing_leaves_a_person_alone_who_is_asked_already_and_nothing_publishes_what_nobody_approved(
    tmp_path: Path,
) -> None:
    """Neither a command nor another deployment does."""
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.5})
    asked = Asked(nightly)
    assert asked.go_on()[0] == "Suspended"
    why = f"run {nightly.runs[0]} waits until a person approves its publication; nothing was done"
    assert Asked(nightly).go_on() == ("StillTraining", why)
    path = str(tmp_path / "outputs" / nightly.runs[0])
    with pytest.raises(ConfigError, match="only what a person has approved"):
        post_train(path)
    for _ in range(2):
        done = CliRunner().invoke(app, ["resume", path])
        assert isinstance(done.exception, ConfigError) and "only what a person has approved" in str(done.exception)
    assert nightly.published == []
    assert "waits for approval in the UI of Prefect until" in CliRunner().invoke(app, ["status", path]).output
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(asked.id, Cancelled(), force=True)
    assert Asked(nightly).go_on()[0] == "Suspended", "nobody could answer the request of a cancelled flow run"
