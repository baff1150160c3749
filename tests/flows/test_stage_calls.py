"""Calls of stages in a Python flow: which thread they need, and those that fail before the stage is part of the run."""

from __future__ import annotations

import threading
import uuid
from asyncio import CancelledError
from contextlib import nullcontext
from pathlib import Path

import pytest
from prefect import flow, task
from prefect.task_runners import ProcessPoolTaskRunner, ThreadPoolTaskRunner

from cosmos_core.cli_flow import plan_flow
from cosmos_core.config.compose import Pipeline, load_pipeline
from cosmos_core.errors import ConfigError, DataError, UploadError
from cosmos_core.observe.record import read_run
from cosmos_core.run.directory import create_run, open_run
from cosmos_core.run.state import read_state
from flows.post_train import post_train
from tasks import custom, flow_run, remote_stage
from tasks.kinds import all_kinds
from tasks.stage import produce_result
from tests.conftest import MOST_SECONDS, PROGRAMS
from tests.flows.test_flows_in_python import GROW, folder
from tests.unit.test_remote_stage import Server, pooled

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


def test_a_call_needs_no_thread_of_the_task_runner_which_tasks_of_the_user_that_call_stages_may_occupy(
    folder: Path,
) -> None:
    has_made_model = threading.Event()

    @task
    def occupy() -> bool:
        return has_made_model.wait(MOST_SECONDS)

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=1))
    def occupied(run_id: str = "occupied") -> bool:
        occupation = occupy.submit()
        custom(GROW, name="model", retries=0)
        has_made_model.set()
        return occupation.result()

    assert occupied()


def test_a_task_runner_of_processes_is_refused_in_one_line(folder: Path) -> None:
    @flow(task_runner=ProcessPoolTaskRunner(max_workers=1))
    def spread(run_id: str = "spread") -> None:
        custom.submit(GROW, name="model", retries=0)

    with pytest.raises(ConfigError, match=r"flow 'spread' has a ProcessPoolTaskRunner.*take ThreadPoolTaskRunner"):
        spread()


def test_a_run_that_the_worker_removes_with_its_clone_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pull step `git_clone` leaves a flow in such a folder."""
    clone = folder / "tmpk3x_9a0bprefect" / "repository-main"
    clone.mkdir(parents=True)
    monkeypatch.chdir(clone)
    stage = f'[[pipeline.stages]]\nname = "model"\nkind = "custom"\nentry = "{GROW}"\n'
    (clone / "lost.toml").write_text(stage)
    (clone / "kept.toml").write_text(f'[pipeline]\noutput_dir = "{folder}/outputs"\n{stage}')

    @flow
    def cloned(run_id: str = "cloned") -> None:
        custom(GROW, name="model", retries=0)

    cloned()
    post_train("lost.toml", run_id="lost")
    post_train("kept.toml", run_id="kept")
    told = [record.getMessage() for record in caplog.records if "the worker removes" in record.getMessage()]
    assert [message.split()[3] for message in told] == [str(clone / "outputs" / name) for name in ("cloned", "lost")]


def test_a_flow_leaves_a_run_of_a_file_as_it_is(folder: Path) -> None:
    """Its stages would be dropped from the pipeline of that run, whose name both were given."""
    (folder / "r.toml").write_text(f'[[pipeline.stages]]\nname = "model"\nkind = "custom"\nentry = "{GROW}"\n')
    run = create_run(load_pipeline(folder / "r.toml", [], all_kinds()), run_id="taken")
    pipeline = (run.path / "pipeline.toml").read_text()

    @flow
    def taking(run_id: str = "taken") -> None:
        custom(GROW, name="other", retries=0)

    with pytest.raises(ConfigError, match="run taken was made from a file, not by a flow; give the flow another"):
        taking()
    assert (run.path / "pipeline.toml").read_text() == pipeline


def test_a_flow_leaves_a_run_of_another_flow_as_it_is(folder: Path) -> None:
    """Also where a flow passes its own name of the run on to a flow that it calls."""

    @flow
    def inner(run_id: str) -> None:
        custom(GROW, name="inner", retries=0)

    @flow
    def outer(run_id: str = "taken") -> None:
        custom(GROW, name="outer", retries=0)
        inner(run_id)

    for call in (outer, lambda: inner("taken")):
        with pytest.raises(ConfigError, match=r"run taken is one of the flow \S+outer; give this flow another run_id$"):
            call()
    assert [stage.name for stage in open_run(folder / "outputs" / "taken", all_kinds()).pipeline.stages] == ["outer"]
    (folder / "my.py").write_text("from prefect import flow\n\n@flow\ndef other(run_id: str): pass\n")
    with pytest.raises(ConfigError, match=r"run taken is one of the flow \S+outer; give this flow another run_id$"):
        plan_flow("my.py:other", {"run_id": "taken"})


def test_a_stage_whose_task_runs_out_of_time_has_failed_and_the_flow_goes_on(folder: Path) -> None:
    stages = folder / "outputs" / "patient" / "stages"

    @flow
    def patient(run_id: str = "patient") -> str:
        for seconds in (1, 4, 20, 100):  # until the stage has begun in time
            count, name = custom.with_options(timeout_seconds=seconds), f"count-{seconds}"
            arguments = {"steps": 10**6, "seconds": 0.01}
            state = count(f"{PROGRAMS}/counting.py:count", name=name, arguments=arguments, return_state=True)
            assert state.name == "TimedOut"
            if (stages / name / "visits.txt").exists():
                return name
        raise AssertionError("no stage has begun")

    name = patient()
    state = read_state(stages / name)
    assert (state.state, state.error) == ("failed", f"stage {name!r}: its task exceeded timeout_seconds")
    assert read_run(folder / "outputs" / "patient").outcome == "done"


def test_a_stage_on_a_work_pool_whose_task_runs_out_of_time_is_cancelled_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, child, cancelled = pooled(tmp_path, "one"), str(uuid.uuid4()), list[str]()
    running = remote_stage.ChildFlowRun(flow_run=child, attempt=1)
    server = Server(CancelledError())  # type: ignore[arg-type]  # Prefect interrupts its request
    monkeypatch.setattr(remote_stage, "get_client", lambda sync_client: nullcontext(server))
    monkeypatch.setattr(remote_stage, "_find_running_child", lambda *_: running)
    monkeypatch.setattr(remote_stage, "_cancel_child", lambda _, flow_run, seconds: cancelled.append(flow_run.flow_run))
    with pytest.raises(CancelledError):
        produce_result(run, "first")
    assert cancelled == [child] and read_state(run.stage_path("first")).state == "failed"
