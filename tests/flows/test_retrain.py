"""Retraining on a schedule: only for something new, published only when it is better, and back again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import VariableCreate
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.flow_runs import resume_flow_run
from prefect.input.actions import read_flow_run_input
from prefect.settings import get_current_settings
from prefect.states import Cancelled as CancelledState
from prefect.states import Crashed, Running, Scheduled
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError, GateFailed
from cosmos_core.launch import worker
from cosmos_core.launch.worker import AttemptSettings
from cosmos_core.run.hub import failed_hub_requests
from cosmos_core.run.lock import FileLock
from cosmos_core.run.manifest import Result
from cosmos_core.run.retrain_state import locate_retrain_state
from cosmos_core.run.state import read_state, record_failure
from cosmos_core.upload.file import FileTarget
from flows.retrain import retrain
from tasks.kinds import all_kinds
from tests import attempts
from tests.conftest import PROGRAMS, wait_until

PIPELINE = f"""
[pipeline]
name = "nightly"
output_dir = "FOLDER/outputs"

[[pipeline.stages]]
name = "learn"
kind = "custom"
entry = "{PROGRAMS}/learning.py:learn"
data = "FOLDER/rows.jsonl"
retries = 0

[[pipeline.stages]]
name = "gate"
kind = "gate"
after = "learn"
require = ["validation/accuracy > published"]
confidence = 0.9

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = ["gate", "learn"]
model = "stage:learn"
target = "FOLDER/published"
"""


pytestmark = pytest.mark.usefixtures("harness")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a flow shows is tested elsewhere; a stage whose rows say `fail` ends its process, so it has one."""

    def attempt(settings: AttemptSettings) -> Result:
        rows = Path(settings.stage_path.parents[3] / "rows.jsonl").read_text()
        return (run_attempt if '"fail"' in rows else attempts.run_here)(settings)

    run_attempt = worker.run_attempt
    monkeypatch.setattr(worker, "run_attempt", attempt)
    with attempts.unshown():
        yield


class Nightly:
    """A folder with rows, a pipeline and what it has published."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "nightly.toml"
        self.config.write_text(PIPELINE.replace("FOLDER", str(folder)))
        self.target = FileTarget(str(folder / "published"))

    def rows(self, *rows: dict[str, Any]) -> None:
        (self.folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fire(self, *overrides: str) -> tuple[str, str]:
        state = retrain(str(self.config), list(overrides), return_state=True)
        return str(state.name), str(state.message)

    @property
    def published(self) -> list[float]:
        """The accuracy of each model that the target has had."""
        return [self.target.record_of(name)["metrics"]["validation/accuracy"] for name in self.target.history()]

    @property
    def runs(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "outputs").glob("2*"))


def test_it_trains_only_for_new_content_continues_what_failed_and_publishes_only_what_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.5, "fail": True})
    assert nightly.fire()[0] == "Failed"
    assert "failed" in (tmp_path / "outputs" / nightly.runs[0] / "report.html").read_text()
    priced = 'name = "nightly"\nprice_per_gpu_hour = 2.0\nbudget = 400.0'
    nightly.config.write_text(nightly.config.read_text().replace('name = "nightly"', priced))
    assert nightly.fire()[0] == "Completed", "the run that failed is continued"
    [first] = nightly.runs
    assert "budget = 400.0" in (tmp_path / "outputs" / first / "pipeline.toml").read_text(), "with a raised budget"
    assert len(nightly.target.history()) == 1
    os.utime(tmp_path / "rows.jsonl")
    said = ("NothingNew", f"nothing new since run {first}, which was published")
    assert nightly.fire() == said
    with monkeypatch.context() as patch:
        patch.setitem(failed_hub_requests, "https://hub.example", (time.monotonic(), "timed out"))
        outage = "; https://hub.example did not respond: timed out"
        assert nightly.fire() == (said[0], f"{said[1]}{outage}"), "it is no proof that nothing is new"
    assert nightly.runs == [first]

    nightly.rows({"accuracy": 0.52})  # better, but within the noise of 100 prompts
    name, message = nightly.fire()
    assert name == "NotPromoted" and "accuracy = 0.52, bound 0.5, noise 0.0" in message
    assert nightly.fire()[0] == "NothingNew", "what was refused is not trained again"
    assert len(nightly.target.history()) == 1
    expect_events(nightly)
    nightly.rows({"accuracy": 0.9})
    assert nightly.fire()[0] == "Completed"
    assert len(nightly.runs) == 3
    old, new = nightly.target.history()
    assert old.startswith(first)
    expect_rollback(nightly, old, new)


def expect_events(nightly: Nightly) -> None:
    """What the server has been told of the first run, which failed once, and of the second, which was refused."""
    first, second = nightly.runs
    wait_until(lambda: len(events_of(second)) == 3, 30, "the server has all events")
    assert [(event["event"], event["payload"].get("stage")) for event in events_of(first)] == [
        ("cosmos.stage.failed", "learn"), ("cosmos.run.failed", None),
        ("cosmos.stage.completed", "learn"), ("cosmos.stage.completed", "gate"),
        ("cosmos.stage.completed", "publish"), ("cosmos.model.published", "publish"), ("cosmos.run.completed", None),
    ]  # fmt: skip
    assert [event["event"] for event in events_of(second)] == [
        "cosmos.stage.completed", "cosmos.gate.failed", "cosmos.run.failed",
    ]  # fmt: skip
    published = events_of(first)[-2]
    assert published["payload"]["published"] == f"{nightly.folder}/published/{nightly.target.history()[0]}"
    assert events_of(first)[-1]["payload"]["metrics"]["validation/accuracy"] == 0.5
    refused = events_of(second)[1]
    assert (refused["payload"]["exit_code"], refused["resource"]["cosmos.stage"]) == (65, "gate")
    assert "accuracy = 0.52, bound 0.5" in refused["payload"]["error"]


def expect_rollback(nightly: Nightly, old: str, new: str) -> None:
    """Of two published models the older one can be published again, and then the newer one."""
    command, published = CliRunner(), nightly.folder / "published"
    done = command.invoke(app, ["promote", str(published)])
    assert [line.split()[0] for line in done.output.splitlines()] == [old, new]
    assert "validation/accuracy = 0.9" in done.output
    done = command.invoke(app, ["rollback", str(published)])
    assert done.output == f"published: {published}/{old}; before: {new}\n"
    assert os.readlink(published / "latest") == old
    assert isinstance(command.invoke(app, ["rollback", str(published)]).exception, ConfigError)
    command.invoke(app, ["promote", str(published), new])
    assert nightly.target.history() == [old, new]


@pytest.mark.full
def test_gates_targets_and_overrides_are_something_new_each_once(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.5})
    assert nightly.fire()[0] == "Completed"
    assert nightly.fire("learn.train.epoch=2")[0] == "NotPromoted", "it is no better"
    assert nightly.fire()[0] == nightly.fire("learn.train.epoch=2")[0] == "NothingNew", "neither forgets the other"
    nightly.rows({"accuracy": 0.4})
    assert nightly.fire()[0] == "NotPromoted"
    settings = nightly.config.read_text()
    for old, new in (("> published", ">= 0.1"), ("0.9", "0.8"), ("/published", "/elsewhere")):
        settings = settings.replace(old, new)
        nightly.config.write_text(settings)
        assert (nightly.fire()[0], nightly.fire()[0]) == ("Completed", "NothingNew"), new
    assert read_state(tmp_path / "outputs" / nightly.runs[-1] / "stages" / "learn").state == "reused"
    for folder in ("published", "elsewhere"):
        assert FileTarget(str(tmp_path / folder)).published()["metrics"]["validation/accuracy"] == 0.4  # type: ignore[index]


@pytest.mark.full
def test_one_firing_works_at_a_time_so_that_older_data_is_never_published_last(tmp_path: Path) -> None:
    nightly, end = Nightly(tmp_path), tmp_path / "end"
    nightly.rows({"accuracy": 0.5, "until": str(end)})
    command = [sys.executable, "-c", f"from flows.retrain import retrain; retrain({str(nightly.config)!r})"]
    environment = os.environ | {"PREFECT_API_URL": str(get_current_settings().api.url)}
    first = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2])
    try:
        learned = "outputs/2*/stages/learn/model/model.safetensors"
        wait_until(lambda: list(tmp_path.glob(learned)) or first.poll() is not None, 60, "the first firing trains")
        said = ("StillTraining", f"an earlier firing of run {nightly.runs[0]} has not ended; nothing was done")
        assert nightly.fire() == said, "the same data"
        nightly.rows({"accuracy": 0.9})
        assert nightly.fire() == said, "newer data"
        end.touch()
        assert first.wait(60) == 0
    finally:
        first.kill()
    assert nightly.fire()[0] == "Completed"
    assert nightly.target.published()["metrics"]["validation/accuracy"] == 0.9  # type: ignore[index]
    assert nightly.fire()[0] == "NothingNew" and len(nightly.runs) == 2


def events_of(run_id: str) -> list[dict[str, Any]]:
    """What the server has been told of a run, in order; the newest of all runs come first, of which it gives 50."""
    with get_client(sync_client=True) as client:
        wanted = {"event": {"prefix": ["cosmos."]}, "order": "DESC"}
        found = client.request("POST", "/events/filter", json={"filter": wanted, "limit": 50}).json()["events"]
    return [event for event in reversed(found) if event["resource"]["cosmos.run"] == run_id]


def test_approval_needs_a_deployment(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.5})
    with pytest.raises(ConfigError, match="approve = true needs a deployment"):
        retrain(str(nightly.config), approve=True)

    @flow
    def outer() -> None:
        retrain(str(nightly.config), approve=True)

    with get_client(sync_client=True) as client:
        deployment = client.create_deployment(client.create_flow(outer), tmp_path.name)
        flow_run = client.create_flow_run_from_deployment(deployment)
    with pytest.raises(ConfigError, match="as_subflow=False"):  # Prefect suspends no flow run of another one
        run_flow(outer, flow_run)
    assert nightly.runs == []


class Asked:
    """A flow run of a deployment that asks a person, run here in place of by a worker."""

    def __init__(self, nightly: Nightly, name: str | None = None) -> None:
        with get_client(sync_client=True) as client:
            deployment = client.create_deployment(client.create_flow(retrain), nightly.folder.name)
            parameters = {"config": str(nightly.config), "approve": True}
            self.id = client.create_flow_run_from_deployment(
                deployment, parameters=parameters, name=name, tags=["cosmos-user:ada"]
            ).id
            note = locate_retrain_state(load_pipeline(nightly.config, (), all_kinds()), (), "published").stem
            self.lease = f"cosmos-retraining-{note}-{deployment}"

    @property
    def flow_run(self) -> FlowRun:
        with get_client(sync_client=True) as client:
            return client.read_flow_run(self.id)

    def go_on(self) -> tuple[str, str]:
        """Run it until it is suspended or ends; return name and message of its state."""
        with get_client(sync_client=True) as client:
            with suppress(Pause):
                run_flow(retrain, client.read_flow_run(self.id), return_type="state")
            state = client.read_flow_run(self.id).state
        assert state is not None
        return str(state.name), str(state.message)

    def say(self, publish: bool) -> tuple[str, str]:
        resume_flow_run(self.id, run_input={"publish": publish})
        return self.go_on()


def test_a_person_sees_metrics_and_gates_and_what_is_approved_is_published_when_a_firing_at_work_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have changed since, and an event that cannot be sent costs nothing."""

    def refuse(*arguments: object, **parameters: object) -> None:
        raise ConnectionError("no server")

    nightly = Nightly(tmp_path)
    (tmp_path / "earlier").mkdir()
    metrics = {"validation/accuracy": 0.5, "validation/prompts": 100.0}
    nightly.target.publish(tmp_path / "earlier", "v1", {"version": "v1", "metrics": metrics, "files": {}})
    nightly.rows({"accuracy": 0.7})
    asked = Asked(nightly, "before the release")
    with monkeypatch.context() as patch:
        patch.setattr("tasks.events.emit_event", refuse)
        assert asked.go_on()[0] == "Suspended"
    run = nightly.runs[-1]
    expect_request(nightly, asked, run)
    nightly.rows({"accuracy": 0.9})
    [note] = tmp_path.glob("outputs/.cosmos/retraining/*.json")
    with FileLock(note.with_suffix(".lock")) as lock:
        assert lock.try_acquire()
        release = threading.Timer(1.0, lock.release)
        release.start()
        assert asked.say(publish=True) == ("Completed", f"run {run}: 3 stages completed")
        release.join()
    assert asked.flow_run.name == "before the release"
    assert nightly.published == [0.5, 0.7], "nobody was asked about the newer rows"
    assert nightly.runs[-1] == run and read_state(tmp_path / "outputs" / run / "stages" / "learn").attempt == 1
    assert nightly.fire()[0] == "Completed"
    assert nightly.published == [0.5, 0.7, 0.9], "the newer rows are for the next firing"


def expect_request(nightly: Nightly, asked: Asked, run: str) -> None:
    """A person sees metrics and gates, and `status` says what the run waits for."""
    assert asked.flow_run.name == "before the release" and {"cosmos-user:ada", f"cosmos-run:{run}"} <= set(
        asked.flow_run.tags
    )
    details = asked.flow_run.state.state_details  # type: ignore[union-attr]
    form = read_flow_run_input(details.run_input_keyset["description"], flow_run_id=asked.id)  # type: ignore[index]
    assert f"Publish the model of run {run}?" in form and "accuracy 0.700" in form
    assert "validation/accuracy > published: measured 0.7, bound 0.5, holds" in form
    shown = CliRunner().invoke(app, ["status", run, "--output-dir", str(nightly.folder / "outputs")]).output
    assert "waits for approval in the UI of Prefect until" in shown and "died" not in shown


def test_a_firing_that_was_stopped_after_a_gate_has_refused_is_not_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another branch of the pipeline may still have been in training, whose model may be better."""
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.9})
    with monkeypatch.context() as patch:
        record: Any = lambda run, names: record_failure(run.stage_path("gate"), GateFailed("too low"))  # noqa: E731
        patch.setattr("flows.retrain.run_stages", lambda *given: record(*given) or CancelledState(message="stopped"))
        assert nightly.fire()[0] == "Cancelled"
    assert nightly.fire()[0] == "Completed" and nightly.published == [0.9]
    assert len(nightly.runs) == 1


def test_a_firing_on_another_machine_is_told_apart_while_its_flow_run_has_not_ended(tmp_path: Path) -> None:
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.5})
    here, there = Asked(nightly), Asked(nightly)
    assert here.lease == there.lease, "of one deployment"
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(there.id, Running())
        other = {"flow_run": str(there.id), "machine": "node-3/boot/pids"}
        client.create_variable(VariableCreate(name=here.lease, value=other))
        name, message = here.go_on()
        assert (name, message) == ("StillTraining", "an earlier firing has not ended; nothing was done")
        found = client.read_variable_by_name(here.lease)
        assert found is not None and found.value == other and nightly.runs == []
        client.set_flow_run_state(there.id, Crashed())
        late = Asked(nightly)
        assert late.go_on()[0] == "Suspended", "the lease expired with the flow run that held it"
        assert client.read_variable_by_name(here.lease) is None, "nobody holds it while a person is asked"


def test_what_a_person_has_said_never_replaces_a_model_of_newer_content(tmp_path: Path) -> None:
    """Nor does a flow run that is retried after its rows have changed train on either."""
    nightly = Nightly(tmp_path)
    nightly.rows({"accuracy": 0.9})
    asked, failed = Asked(nightly), Asked(nightly)
    assert asked.go_on()[0] == "Suspended"
    nightly.rows({"accuracy": 0.5, "fail": True})
    assert failed.go_on()[0] == "Failed"
    nightly.rows({"accuracy": 0.6})
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(failed.id, Scheduled(name="AwaitingRetry"), force=True)
    name, message = failed.go_on()
    assert name == "Outdated" and "were changed; the next firing takes the new ones" in message
    assert nightly.published == []
    assert nightly.fire()[0] == "Completed" and nightly.published == [0.6]
    old, _, new = nightly.runs
    why = f"run {old} is not continued: run {new} of newer content was published since"
    assert asked.say(publish=True) == ("Outdated", why)
    assert nightly.published == [0.6] and nightly.fire()[0] == "NothingNew"
