"""Prefect for real, a server and a worker on loopback: deployments, what the UI shows, cancellation, a lost worker."""

from __future__ import annotations

import base64
import json
import os
import signal
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from cosmos_core.config.compose import load_pipeline
from cosmos_core.run.directory import create_run
from cosmos_core.run.files import read_json
from cosmos_core.run.manifest import find_output_damage, read_result
from cosmos_core.run.state import read_state
from tasks.kinds import all_kinds
from tests.commands.orchestra import Orchestra
from tests.conftest import DEMOS, Workspace, processes_below, wait_until

SFT = """
[pipeline]
name = "short-demo"
threads = 1
grace_seconds = 10
output_dir = "OUTPUTS"

[policy]
model_max_length = 64
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"
arguments = { train_rows = 400, heldout_rows = 20, hidden_size = 64 }

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"

[pipeline.stages.overrides.train]
epoch = 1000
max_num_steps = 40
train_batch_per_replica = 16
optm_lr = 3e-3
train_policy = { type = "sft", mini_batch = 16, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 5, max_keep = 2 }
""".replace("DEMOS", str(DEMOS))
GRPO = """
[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["sft", "task"]
model = "stage:sft"
data = "stage:task"

[pipeline.stages.overrides.train]
max_num_steps = 3
train_batch_per_replica = 32
train_policy = { type = "grpo", reward_function = "exact_match", mini_batch = 16 }
ckpt = { enable_checkpoint = true, save_freq = 2, max_keep = 2 }

[pipeline.stages.overrides.rollout]
backend = "hf"
n_generation = 4
batch_size = 8
max_response_length = 8

[[pipeline.stages]]
name = "export"
kind = "export"
after = "grpo"
model = "stage:grpo"

[[pipeline.stages]]
name = "report"
kind = "report"
after = "export"
"""
COUNTING = """
[pipeline]
name = "counting"

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
arguments = { steps = 4 }

[[pipeline.stages]]
name = "second_half"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
after = "first"
arguments = { steps = 6 }
"""
IN_PLACE = COUNTING.replace("[pipeline]", '[pipeline]\noutput_dir = "OUTPUTS"')
RELEASED = """
[pipeline]
name = "released"
grace_seconds = 10
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "left"
kind = "custom"
entry = "PROGRAMS/released.py:count"
arguments = { release = "OUTPUTS/go-left" }

[[pipeline.stages]]
name = "right"
kind = "custom"
entry = "PROGRAMS/released.py:count"
arguments = { release = "OUTPUTS/go-right" }
"""
LAST = """
[[pipeline.stages]]
name = "left"
kind = "custom"
after = "second_half"
entry = "PROGRAMS/released.py:count"
arguments = { release = "OUTPUTS/go-left" }
"""
NIGHTLY = """
[pipeline]
name = "asked"
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "learn"
kind = "custom"
entry = "PROGRAMS/learning.py:learn"
data = "OUTPUTS/rows.jsonl"

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = "learn"
model = "stage:learn"
target = "OUTPUTS/published"
"""


def write(place: Workspace, text: str) -> str:
    return str(place.write("pipeline.toml", text.replace("OUTPUTS", str(place.path / "outputs"))))


def wait_for_steps(place: Workspace, run: str, *names: str) -> None:
    """Wait until stages, those of `RELEASED` if none is named, have made five steps."""

    def step(stage: str) -> int:
        progress = read_json(place.path / "outputs" / run / "stages" / stage / "progress.json")
        return int(progress["step"]) if isinstance(progress, dict) else 0

    wait_until(lambda: min(map(step, names or ("left", "right"))) >= 5, 90, "all at step 5")


def release(place: Workspace) -> None:
    """Let both stages of `RELEASED` end."""
    for name in ("left", "right"):
        (place.path / "outputs" / f"go-{name}").touch()


def expect_gone(flow_run: str, seconds: float) -> None:
    """No process of a flow run is left; all of them inherit its id."""
    left = partial(processes_below, Path(flow_run))
    wait_until(lambda: not left(), seconds, lambda: f"gone: {left()}")


@pytest.mark.full
def test_a_deployed_demo_runs_on_a_worker_and_its_model_is_on_disk(orchestra: Orchestra, place: Workspace) -> None:
    config = write(place, SFT + GRPO)
    flow_run = orchestra.run("post-train/local", f"config={config}", "run_id=deployed")
    found = orchestra.wait_for(flow_run, "COMPLETED", 300)
    assert found["name"] == "short-demo deployed"
    run = place.path / "outputs" / "deployed"
    results = {name: read_result(run / "stages" / name) for name in ("task", "sft", "grpo", "export")}
    for name, result in results.items():
        assert result is not None
        assert find_output_damage(run / "stages" / name, result, ignores_cache=True) is None
    assert results["export"]
    model = run / "stages" / "export" / results["export"]["info"]["model"]
    assert {"config.json", "model.safetensors"} <= {file.name for file in model.iterdir()}
    assert (run / "report.html").is_file()
    artifacts = orchestra.artifacts(flow_run)
    assert {"short-demo-run", "short-demo-sft-progress", "short-demo-grpo-curves"} <= artifacts.keys()
    assert f"model `{model}`" in artifacts["short-demo-run"]["data"]
    expect_gone(flow_run, 15)


def test_a_schedule_fires_a_person_declines_and_without_new_data_the_next_firing_trains_nothing(
    orchestra: Orchestra, place: Workspace
) -> None:
    """With SQLAlchemy 2.1 the scheduler of Prefect ended in an error at each turn, and nothing was ever scheduled."""
    config = write(place, NIGHTLY)
    place.write("outputs/rows.jsonl", '{"accuracy": 0.5}\n')
    orchestra.ensure_worker()
    deployment = httpx.get(f"{orchestra.url}/deployments/name/retrain/local", timeout=30).json()["id"]
    schedules = f"deployments/{deployment}/schedules"

    timing = {"interval": 20, "anchor_date": (datetime.now(UTC) + timedelta(seconds=3)).isoformat()}
    wanted = {"schedule": timing, "active": True, "parameters": {"config": config, "approve": True}}
    [made] = orchestra.post(schedules, [wanted])
    try:
        wait_until(lambda: begun(orchestra, config), 80, "it fires, later on a busy machine", pause=0.3)
    finally:
        httpx.delete(f"{orchestra.url}/{schedules}/{made['id']}", timeout=30).raise_for_status()
    asked = begun(orchestra, config)[0]["id"]
    wait_until(lambda: orchestra.flow_run(asked)["state_name"] == "Suspended", 80, "it asks a person", pause=0.3)
    expect_gone(asked, 30)
    orchestra.post(f"flow_runs/{asked}/resume", {"run_input": {"publish": False}})
    assert orchestra.wait_for(asked, "COMPLETED", 120)["state_name"] == "Declined"
    assert not (place.path / "outputs" / "published" / "latest").exists()
    found = orchestra.wait_for(orchestra.begin("retrain/local", config=config, approve=True), "COMPLETED", 80)
    [run] = (place.path / "outputs").glob("2*")
    nothing = ("NothingNew", f"nothing new since run {run.name}, which was declined")
    assert (found["state_name"], found["state"]["message"]) == nothing
    assert read_state(run / "stages" / "learn").attempt == 1, "what was trained before is not trained again"


def begun(orchestra: Orchestra, config: str) -> list[dict[str, Any]]:
    """Runs that a schedule made and that have begun, the first one first."""
    found = orchestra.ask("flow_runs/filter", sort="EXPECTED_START_TIME_ASC")
    found = [run for run in found if run["auto_scheduled"] and run["parameters"].get("config") == config]
    return [run for run in found if run["state_type"] != "SCHEDULED"]


def test_a_parameter_that_does_not_fit_is_refused_before_a_run_exists(orchestra: Orchestra) -> None:
    before = orchestra.ask("flow_runs/count")
    said = orchestra.prefect("deployment", "run", "post-train/local", "-p", "overrides=train.epoch=2", code=1)
    assert "Validation failed for field 'overrides'" in said
    orchestra.prefect("deployment", "run", "post-train/local", "-p", "confg=x", code=1)
    assert orchestra.ask("flow_runs/count") == before


@pytest.mark.full
def test_one_stage_of_a_run_is_a_deployment_of_its_own(orchestra: Orchestra, place: Workspace) -> None:
    file = place.write("counting.toml", COUNTING)
    run = create_run(load_pipeline(file, [f"pipeline.output_dir={place.path}/outputs"], all_kinds()))
    for name in ("first", "second_half"):
        flow_run = orchestra.begin("stage/local", run=str(run.path), name=name)
        assert orchestra.wait_for(flow_run, "COMPLETED", 60)["name"] == f"counting {run.id} {name}"
        assert orchestra.task_states(flow_run) == {name: "Completed"}
    assert read_result(run.stage_path("second_half"))["metrics"] == {"count": 6}  # type: ignore[index]


def test_a_cancelled_run_saves_a_checkpoint_and_resume_completes_it(orchestra: Orchestra, place: Workspace) -> None:
    config = write(place, RELEASED)
    flow_run = orchestra.run("post-train/local", f"config={config}", "run_id=cancelled")
    wait_for_steps(place, "cancelled")
    orchestra.post(f"flow_runs/{flow_run}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
    orchestra.wait_for(flow_run, "CANCELLED", 90)
    expect_gone(flow_run, 15)
    stage = place.path / "outputs" / "cancelled" / "stages" / "left"
    state = read_state(stage)
    saved = json.loads((stage / "checkpoint.json").read_text())["step"]
    assert (state.state, state.failures, state.checkpoint_step) == ("stopped", 0, saved)
    assert read_result(stage) is None
    log = (stage / "logs" / "attempt_1.log").read_text().splitlines()
    assert set(filter(None, log)) & set(orchestra.messages(flow_run)), "a line of the worker in the log of the run"

    release(place)
    place.cosmos("resume", "outputs/cancelled")
    both = {"name": {"any_": ["released cancelled"]}}
    [resumed, _] = orchestra.ask("flow_runs/filter", flow_runs=both, sort="START_TIME_DESC")
    assert resumed["state_type"] == "COMPLETED", "the command uses the server that it is given"
    assert orchestra.task_states(resumed["id"]) == {"left": "Completed", "right": "Completed"}
    assert read_result(stage) is not None
    assert read_state(stage).attempt == 2
    assert (stage / "visits.txt").read_text() == f"start 0\nstart {saved}\n"
    place.expect_quiet()


@pytest.mark.full
def test_a_worker_that_is_terminated_leaves_nothing_running_and_resume_completes_the_run(
    orchestra: Orchestra, place: Workspace
) -> None:
    config = write(place, RELEASED)
    flow_run = orchestra.begin("post-train/local", config=config, run_id="lost")
    wait_for_steps(place, "lost")
    worker = orchestra.ensure_worker()
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=180)
    expect_gone(flow_run, 60)
    stages = place.path / "outputs" / "lost" / "stages"
    saved = {name: json.loads((stages / name / "checkpoint.json").read_text())["step"] for name in ("left", "right")}
    release(place)
    place.cosmos("resume", "outputs/lost")
    for name, reached in saved.items():
        assert reached >= 5
        assert (stages / name / "visits.txt").read_text() == f"start 0\nstart {reached}\n"
        assert (stages / name / "out.txt").read_text() == str(reached)
    place.expect_quiet()


def test_a_flow_run_that_died_before_it_began_is_begun_again_by_resume_and_shows_curves_and_cards(
    orchestra: Orchestra, place: Workspace
) -> None:
    config = write(place, IN_PLACE)
    orchestra.ensure_worker()
    [deployment] = orchestra.ask("deployments/filter", flows={"name": {"any_": ["post-train"]}})
    dead = {"parameters": {"config": config, "run_id": "Late_1"}, "state": {"type": "CRASHED", "message": "no server"}}
    flow_run = orchestra.post(f"deployments/{deployment['id']}/create_flow_run", dead)
    said = place.cosmos("resume", "Late_1").stdout
    assert said == f"run Late_1 has not begun: its flow run {flow_run['name']} is scheduled again on work pool local\n"
    found = orchestra.flow_run(flow_run["id"])
    assert (found["state_type"], found["name"]) == ("COMPLETED", "counting Late_1")
    assert read_result(place.path / "outputs/Late_1/stages/second_half")["metrics"] == {"count": 6}  # type: ignore[index]
    assert orchestra.task_states(found["id"]) == {"first": "Completed", "second_half": "Completed"}
    artifacts = orchestra.artifacts(found["id"])
    parts = ("progress", "metrics", "curves", "card")
    wanted = {f"counting-{stage}-{part}" for stage in ("first", "second-half") for part in parts}
    assert artifacts.keys() == wanted | {"counting-run"}
    assert {artifacts[key]["type"] for key in wanted if key.endswith("card")} == {"markdown"}
    assert artifacts["counting-first-progress"]["data"] == 100
    table = json.loads(artifacts["counting-second-half-metrics"]["data"])
    assert [(line["step"], line["loss"]) for line in table] == [(n, 1 / n) for n in range(1, 7)]
    head, _, image = artifacts["counting-first-curves"]["data"].partition(",")
    assert head == "data:image/png;base64" and base64.b64decode(image).startswith(b"\x89PNG")
    assert "| count | 4 |" in artifacts["counting-first-card"]["data"]
    assert "| second_half | custom | done |" in artifacts["counting-run"]["data"]


def test_retrying_a_failed_flow_run_continues_the_failed_stage_and_goes_on_to_its_end_though_its_worker_is_killed(
    orchestra: Orchestra, place: Workspace
) -> None:
    text = IN_PLACE.replace("steps = 6", "steps = 6, crash_at = 3")
    config = write(place, text.replace('after = "first"', 'after = "first"\nretries = 0') + LAST)
    flow_run = orchestra.begin("post-train/local", config=config, run_id="retried")
    orchestra.wait_for(flow_run, "FAILED", 120)
    # Its worker would take the end of the first attempt's process for that of the second, and call it crashed.
    wait_until(lambda: not processes_below(Path(flow_run)), 60, "the first attempt's process has ended")
    orchestra.prefect("flow-run", "retry", flow_run)
    wait_for_steps(place, "retried", "left")
    worker = orchestra.ensure_worker()
    worker.kill()
    worker.wait(timeout=180)
    release(place)
    assert orchestra.wait_for(flow_run, "COMPLETED", 120)["run_count"] == 2
    stages = place.path / "outputs" / "retried" / "stages"
    visits = {name: (stages / name / "visits.txt").read_text() for name in ("first", "second_half", "left")}
    assert visits == {"first": "start 0\n", "second_half": "start 0\nstart 3\n", "left": "start 0\n"}
    assert len(list((place.path / "outputs").glob("*/pipeline.toml"))) == 1, "the retry made no run of its own"
    expect_gone(flow_run, 15)


@pytest.mark.full
def test_the_ghost_of_a_killed_attempt_confuses_nobody_after_a_retry_in_the_ui(
    orchestra: Orchestra, place: Workspace
) -> None:
    config = write(place, RELEASED)
    flow_run = orchestra.begin("post-train/local", config=config, run_id="ghost")
    wait_for_steps(place, "ghost")
    for pid in processes_below(Path(flow_run)):
        os.kill(pid, signal.SIGKILL)
    orchestra.wait_for(flow_run, "CRASHED", 60)
    release(place)
    again = {"type": "SCHEDULED", "name": "AwaitingRetry", "message": "Retry from the UI"}  # what its button sends
    orchestra.post(f"flow_runs/{flow_run}/set_state", {"state": again, "force": True})
    orchestra.wait_for(flow_run, "COMPLETED", 120)
    rows = orchestra.ask("task_runs/filter", flow_runs={"id": {"any_": [flow_run]}})
    assert len(rows) == 4 and "RUNNING" in {row["state_type"] for row in rows}, "the server keeps the killed attempts"
    stages = place.path / "outputs" / "ghost" / "stages"
    assert all(len((stages / name / "visits.txt").read_text().splitlines()) == 2 for name in ("left", "right"))
    said = place.cosmos("status", "outputs/ghost").stdout
    assert said.count("done") >= 2 and "running" not in said
    assert place.cosmos("reap").stdout == "nothing is left over\n"
    expect_gone(flow_run, 15)


@pytest.mark.full
def test_retraining_waits_for_a_person_and_publishes_what_is_approved(orchestra: Orchestra, place: Workspace) -> None:
    config = write(place, NIGHTLY)
    place.write("outputs/rows.jsonl", '{"accuracy": 0.5}\n')
    flow_run = orchestra.begin("retrain/local", config=config, approve=True)
    wait_until(lambda: orchestra.flow_run(flow_run)["state_name"] == "Suspended", 120, "it waits for a person")
    expect_gone(flow_run, 30)
    assert not (place.path / "outputs" / "published").exists()
    orchestra.post(f"flow_runs/{flow_run}/resume", {"run_input": {"publish": True}})
    assert orchestra.wait_for(flow_run, "COMPLETED", 120)["state_name"] == "Completed"
    assert (place.path / "outputs" / "published" / "latest").exists()
    [run] = (place.path / "outputs").glob("2*")
    assert read_state(run / "stages" / "learn").attempt == 1, "what was trained before is not trained again"
