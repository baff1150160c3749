"""A stage of two ranks as a user runs it: its weights, its interruption, and what a kill leaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cosmos_core.run.files import read_json
from cosmos_core.run.progress import read_metrics
from tests.conftest import DEMOS, Workspace, processes_below, wait_until

PIPELINE = """
[pipeline]
name = "ranks"
threads = 1
grace_seconds = 20

[policy]
model_max_length = 32
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
max_num_steps = STEPS
epoch = 1000
train_batch_per_replica = 9
train_policy = { type = "sft", mini_batch = 3, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 1000 }

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"
arguments = { train_rows = 64, heldout_rows = 16, hidden_size = 64, layers = 2 }
""".replace("DEMOS", str(DEMOS))
STAGE = """
[[pipeline.stages]]
name = "NAME"
kind = "sft"
after = ["task"]
model = "stage:task"
data = "stage:task"
overrides.policy.parallelism.dp_shard_size = SIZE
"""
RL = f"""
[[pipeline.stages]]
name = "prompts"
kind = "prepare"
after = ["task"]
model = "stage:task"
data = "stage:task"
overrides.train.train_policy = {{ type = "grpo" }}
overrides.rollout = {{ max_response_length = 5 }}

[[pipeline.stages]]
name = "rl"
kind = "rl"
after = ["prompts"]
model = "stage:task"
data = "stage:prompts"

[pipeline.stages.overrides]
policy.parallelism.dp_shard_size = 2
rollout = {{ backend = "BACKEND", n_generation = 4, batch_size = 3, max_response_length = 5 }}

[pipeline.stages.overrides.train]
train_batch_per_replica = 24
train_policy = {{ type = "grpo", mini_batch = 3, reward_function = "{Path(__file__).with_name("reward.py")}:variety" }}
"""
STAGES = ("one", "two", "layers")


def text(steps: int, **sizes: int) -> str:
    stages = [STAGE.replace("NAME", name).replace("SIZE", str(size)) for name, size in sizes.items()]
    return PIPELINE.replace("STEPS", str(steps)) + "".join(stages)


def run_of(workspace: Workspace) -> Path:
    return max(path for path in (workspace.path / "outputs").iterdir() if (path / "stages").is_dir())


def parse_step(workspace: Workspace, name: str) -> int:
    progress = read_json(run_of(workspace) / "stages" / name / "progress.json")
    return int(progress["step"]) if isinstance(progress, dict) else 0


@pytest.mark.full
def test_two_ranks_export_the_model_that_one_exports(workspace: Workspace) -> None:
    stages = STAGE.replace("NAME", "layers").replace("dp_shard_size = SIZE", "pp_size = 2")
    workspace.write("p.toml", text(4, one=1, two=2) + stages)
    workspace.cosmos("run", "p.toml")
    folder = run_of(workspace) / "stages"
    one, *others = [load_file(folder / f"{name}/safetensors/step_4/model.safetensors") for name in STAGES]
    for other in others:
        assert one.keys() == other.keys()
        for name, weight in one.items():
            torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6, msg=name)
    assert not processes_below(workspace.path)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["hf", "vllm"])
def test_each_of_two_ranks_generates_with_an_engine_of_its_own_and_learns(workspace: Workspace, backend: str) -> None:
    """What further meshes generate, and a validation on ranks, is in `test_rollouts.py`."""
    if backend == "vllm":
        pytest.importorskip("vllm")
    workspace.write("p.toml", text(2).replace("hidden_size = 64", "hidden_size = 128") + RL.replace("BACKEND", backend))
    workspace.cosmos("run", "p.toml")
    lines = read_metrics(run_of(workspace) / "stages/rl/metrics.jsonl")
    assert [(line["step"], line["rollout/version_lag"]) for line in lines] == [(1, 0), (2, 0)]
    assert all(line["rollout/logprob_difference_max"] < 1e-4 for line in lines), "a rank has other weights"
    assert any(line["reward/std"] > 0 for line in lines)
    assert load_file(run_of(workspace) / "stages/rl/safetensors/step_2/model.safetensors")
    assert not processes_below(workspace.path)


def started(workspace: Workspace) -> Any:
    """A training on two ranks that has taken a few steps."""
    workspace.write("p.toml", text(100_000, two=2))
    flow = workspace.start("run", "p.toml")
    wait_until(lambda: any(workspace.path.glob("outputs/*/stages")), 60, "a run")
    wait_until(lambda: parse_step(workspace, "two") >= 3, 240, "a few steps")
    return flow


def kill(workspace: Workspace, flow: Any) -> None:
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    wait_until(lambda: not processes_below(workspace.path), 30, "no process is left")


@pytest.mark.full
def test_two_ranks_that_are_asked_to_stop_leave_what_one_goes_on_from(workspace: Workspace) -> None:
    flow = started(workspace)
    flow.send_signal(signal.SIGTERM)
    assert flow.wait() == 75
    first = run_of(workspace)
    (saved,) = (int(path.name.removeprefix("step_")) for path in (first / "stages/two/checkpoints").iterdir())
    assert saved >= 3
    wait_until(lambda: not processes_below(workspace.path), 30, "no process is left")
    smaller = ("--set", "two.policy.parallelism.dp_shard_size=1", "--set", "two.train.resume=true")
    flow = workspace.start("run", "p.toml", *smaller)
    wait_until(lambda: run_of(workspace) != first and parse_step(workspace, "two") > saved, 240, "one rank")
    kill(workspace, flow)
    steps = [line["step"] for line in read_metrics(run_of(workspace) / "stages/two/metrics.jsonl")]
    assert steps[: saved + 1] == list(range(1, saved + 2))


@pytest.mark.full
def test_two_ranks_end_with_their_killed_flow(workspace: Workspace) -> None:
    kill(workspace, started(workspace))
