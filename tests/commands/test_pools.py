"""Stages on other work pools, for real: a server, three process workers, and what becomes of children and parents."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.run.files import read_json
from cosmos_core.run.manifest import read_result
from cosmos_core.run.state import read_state
from cosmos_core.upload.artifact_store import ArtifactStore
from cosmos_core.upload.s3 import S3Target
from tests.commands.orchestra import ROOT, Orchestra
from tests.commands.separate_disks import STEPS, write_pipeline
from tests.conftest import Workspace, processes_below, wait_until
from tests.store import Proxy

TWO = """
[pipeline]
name = "two-pools"
threads = 1
grace_seconds = 10
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
work_pool = "cpu"
arguments = { steps = STEPS, seconds = 0.1 }

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "PROGRAMS/counting.py:count"
work_pool = "gpu"
after = "first"
arguments = { steps = 3 }
"""


POOLS = ("cpu", "gpu")


def write(place: Workspace, steps: int) -> str:
    text = TWO.replace("OUTPUTS", str(place.path / "outputs")).replace("STEPS", str(steps))
    return str(place.write("two.toml", text))


def child(run: Path, stage: str) -> dict[str, Any]:
    found = read_json(run / "stages" / stage / "pool.json")
    assert isinstance(found, dict)
    return found


def starts(run: Path, stage: str) -> list[int]:
    """Steps at which attempts of the program began."""
    lines = (run / "stages" / stage / "visits.txt").read_text().splitlines()
    return [int(line.removeprefix("start ")) for line in lines]


SERVED = """
[pipeline]
name = "served"
threads = 1
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "asks"
kind = "custom"
entry = "ROOT/tests/effects/program.py:scored"
reward_service = "OUTPUTS/rewards.toml"
reward_service_pool = "cpu"
"""


def test_a_reward_service_is_started_on_a_pool_for_a_stage_and_ends_with_it(
    orchestra: Orchestra, place: Workspace
) -> None:
    outputs = place.path / "outputs"
    place.write("outputs/rewards.toml", '[[reward_args]]\nreward_type = "exact_match"\n')
    config = place.write("served.toml", SERVED.replace("OUTPUTS", str(outputs)).replace("ROOT", str(ROOT)))
    flow_run = orchestra.begin("post-train/local", config=str(config), run_id="served")
    orchestra.wait_for(flow_run, "COMPLETED", 180)
    result = read_result(outputs / "served" / "stages" / "asks")
    assert result is not None and result["info"]["value"] == 1.0
    all_serving = orchestra.ask("flow_runs/filter", flows={"name": {"any_": ["reward-service"]}})
    serving = max(all_serving, key=lambda each: each["created"])  # a try before this one had its own
    assert serving["work_pool_name"] == "cpu"
    orchestra.wait_for(serving["id"], "COMPLETED", 60)
    blocks = orchestra.ask("block_documents/filter", block_types={"slug": {"any_": ["cosmos-reward-service"]}})
    assert not [block["name"] for block in blocks if block["name"].startswith("run-")]
    noted = json.loads((outputs / "served" / "stages" / "asks" / "reward_service.json").read_text())
    assert noted["services"][0]["status"] == "ok"


def step(run: Path) -> int:
    found = read_json(run / "stages" / "first" / "checkpoint.json")
    return int(found["step"]) if isinstance(found, dict) else 0


def pids_of(flow_run: str) -> list[int]:
    """Processes of a child, its worker's aside: they have its id in their environment."""
    return [pid for pid, command in processes_below(Path(flow_run)).items() if "worker start" not in command]


@pytest.mark.full
def test_a_child_that_is_cancelled_ends_its_parent_and_a_parent_that_dies_finds_its_child_again(
    orchestra: Orchestra, place: Workspace
) -> None:
    parent = place.start("run", write(place, 250), "--run-id", "orphans")
    run = place.path / "outputs" / "orphans"
    wait_until(lambda: step(run) > 3, 120, "the first stage trains")
    cancelled = child(run, "first")
    orchestra.prefect("flow-run", "cancel", cancelled["flow_run"])
    assert parent.wait(120) != 0
    assert (
        "is not complete; continue it with: cosmos resume outputs/orphans" in (place.path / "command.log").read_text()
    )
    assert child(run, "first") == cancelled, "nothing was begun again"

    parent, stood = place.start("resume", "orphans"), step(run)
    wait_until(lambda: step(run) > stood, 120, "the first stage goes on")
    before = child(run, "first")
    assert before["attempt"] == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    place.cosmos("resume", "orphans", timeout=200)
    assert child(run, "first") == before, "the same child was followed to its end"
    assert len(starts(run, "first")) == 2 and starts(run, "first")[1] > 3, "it went on from its checkpoint"
    assert read_state(run / "stages" / "second").state == "done"


@pytest.mark.full
def test_a_parent_that_is_cancelled_cancels_its_child_which_saves(orchestra: Orchestra, place: Workspace) -> None:
    flow_run = orchestra.begin("post-train/local", config=write(place, 3000), run_id="cancelled")
    run = place.path / "outputs" / "cancelled"
    wait_until(lambda: step(run) > 3, 120, "the first stage trains")
    own = child(run, "first")["flow_run"]
    orchestra.prefect("flow-run", "cancel", flow_run)
    orchestra.wait_for(flow_run, "CANCELLED", 60)
    wait_until(lambda: orchestra.flow_run(own)["state_type"] == "CANCELLED", 60, "the child is cancelled")
    wait_until(lambda: not pids_of(own), 30, "its processes are gone")
    state = read_state(run / "stages" / "first")
    assert state.state == "stopped" and state.failures == 0
    assert json.loads((run / "stages" / "first" / "checkpoint.json").read_text())["step"] > 3


def test_a_pool_without_a_deployment_is_one_line(orchestra: Orchestra, place: Workspace) -> None:
    write(place, 3)
    done = place.cosmos("run", "two.toml", "--set", "first.work_pool=tpu", code=64)
    assert "work_pool = 'tpu': the server has no deployment stage/tpu; add one like stage/cpu" in done.stderr


def weights(orchestra: Orchestra, run: str) -> dict[str, str]:
    """Digests of the model, on the machine that trained it to its end."""
    result = read_result(orchestra.machine("gpu") / run / "stages" / "sft")
    assert result is not None
    return {file["path"]: file["sha256"] for file in result["outputs"] if file["path"].endswith(".safetensors")}


def run_apart(orchestra: Orchestra, place: Workspace, name: str, *, is_disturbed: bool) -> Path:
    """Run the pipeline to its end. Disturbed, the training waits after step 8 until a checkpoint is stored, and then
    the machine that trains dies with its disk; the next one has nothing but the store."""
    gate = place.path / "open"
    if is_disturbed:
        gate.unlink(missing_ok=True)
    else:
        gate.touch()
    flow_run = orchestra.begin("post-train/local", config=write_pipeline(place, name), run_id=name)
    run = place.path / "outputs" / name
    if is_disturbed:
        saved = ArtifactStore(f"s3://models/{name}")
        wait_until(lambda: stored_steps(orchestra, saved, name), 180, "a checkpoint is stored", pause=0.3)
        for pid in pids_of(child(run, "sft")["flow_run"]):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(orchestra.machine("gpu"))
        gate.touch()
    orchestra.wait_for(flow_run, "COMPLETED", 240)
    assert len((run / "stages" / "sft" / "metrics.jsonl").read_text().splitlines()) == STEPS
    return run


def test_machines_that_share_no_disk_bring_a_pipeline_to_its_end_though_one_dies_with_its_own(
    orchestra: Orchestra, place: Workspace, s3: Proxy
) -> None:
    name = place.path.name  # a try before this one had its own
    run = run_apart(orchestra, place, name, is_disturbed=True)
    states = {stage.name: read_state(stage).state for stage in (run / "stages").iterdir()}
    assert states == dict.fromkeys(("task", "sft-data", "sft", "gate", "publish"), "done")
    events = [json.loads(line) for line in (run / "stages/sft/events.jsonl").read_text().splitlines()]
    assert [each["detail"].partition("_")[0] for each in events if each["event"] == "fetched"] == ["step"]
    assert (run / "report.html").is_file()
    assert not list(run.glob("stages/*/safetensors/**/*.safetensors")), "no weights where none are read"
    assert "publish" not in {path.name for path in orchestra.machine("gpu").glob(f"{name}/stages/*")}
    assert len(weights(orchestra, name)) == 1
    assert S3Target(f"models/{name}/published").published() is not None


@pytest.mark.full
def test_a_machine_that_dies_with_its_disk_changes_no_weight(orchestra: Orchestra, place: Workspace, s3: Proxy) -> None:
    run_apart(orchestra, place, "alone", is_disturbed=False)
    undisturbed = weights(orchestra, "alone")
    shutil.rmtree(orchestra.machine("gpu"))  # what was made there would be reused
    run_apart(orchestra, place, "empty", is_disturbed=True)
    assert weights(orchestra, "empty") == undisturbed


def stored_steps(orchestra: Orchestra, saved: ArtifactStore, run: str) -> list[str]:
    """Names of the checkpoints that are stored of the training that runs on the machine of the pool `gpu`."""
    path = orchestra.machine("gpu") / run / "stages" / "sft"
    found = read_json(path / "fingerprint.json")
    return saved.open_checkpoints(found["value"], path).list_names() if isinstance(found, dict) else []


GROWING = """
from prefect import flow
from tasks import configure_run, custom, upload

@flow
def growing(store: str, run_id: str, enough: float = 2.0):
    configure_run(artifact_store=store, threads=1)
    model = custom("PROGRAMS/growing.py:grow", work_pool="cpu")
    while model.metrics["size"] < enough:
        model = custom("PROGRAMS/growing.py:grow", model=model, work_pool="gpu")
    upload(model, target=f"{store}/published")
"""


@pytest.mark.full
def test_a_flow_in_python_is_deployed_and_its_stages_run_on_pools_that_share_no_disk(
    orchestra: Orchestra, place: Workspace, s3: Proxy
) -> None:
    name, local = place.path.name, orchestra.machine("local")
    place.write("growing.py", GROWING)
    orchestra.prefect("--no-prompt", "deploy", "growing.py:growing", "-n", "mine", "-p", "local", cwd=place.path)
    flow_run = orchestra.run("growing/mine", f"store=s3://models/{name}", f"run_id={name}")
    assert orchestra.wait_for(flow_run, "COMPLETED", 180)["name"] == f"growing {name}"
    run = local / name
    pools = {
        stage: orchestra.flow_run(child(run, stage)["flow_run"])["work_pool_name"] for stage in ("custom", "custom-2")
    }
    assert pools == {"custom": "cpu", "custom-2": "gpu"}
    assert not (run / "stages" / "custom" / "model").exists(), "the flow's machine has only the model that it publishes"
    assert (orchestra.machine("gpu") / name / "stages" / "custom-2" / "model" / "size.txt").read_text() == "2"
    assert S3Target(f"models/{name}/published").published() is not None
    shown = place.cosmos("status", name, "--output-dir", str(local)).stdout
    assert all(stage in shown for stage in ("custom-2", "upload")) and f"growing  {name}  done" in shown
