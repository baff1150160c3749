"""A real SFT -> GRPO -> export chain, killed twice and resumed, ends with the bits of one that was left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.run.files import read_json, sha256
from cosmos_core.run.manifest import read_result
from cosmos_core.run.progress import read_metrics
from tests.conftest import DEMOS, Workspace, wait_until
from tests.faults.test_kill import targets

pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("own_server")

# The demo without its measuring stages and with the smallest steps; `rollout.backend` is left at its default, vLLM.
PIPELINE = """
[pipeline]
name = "short-demo"
threads = 1
grace_seconds = 5

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
arguments = { train_rows = 2000, heldout_rows = 20 }

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"

[pipeline.stages.overrides.train]
epoch = 10
max_num_steps = 150
train_batch_per_replica = 32
optm_lr = 3e-3
train_policy = { type = "sft", mini_batch = 32, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 10, max_keep = 2 }

[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["sft", "task"]
model = "stage:sft"
data = "stage:task"

[pipeline.stages.overrides.train]
max_num_steps = 16
train_batch_per_replica = 64
optm_lr = 3e-4
train_policy = { type = "grpo", reward_function = "exact_match", kl_beta = 0.001, mini_batch = 32 }
ckpt = { enable_checkpoint = true, save_freq = 2, max_keep = 2 }

[pipeline.stages.overrides.rollout]
n_generation = 8
batch_size = 8
max_response_length = 8

[pipeline.stages.overrides.validation]
enable = true
freq = 5
batch_size = 20

[[pipeline.stages]]
name = "export"
kind = "export"
after = "grpo"
model = "stage:grpo"
""".replace("DEMOS", str(DEMOS))
TRAINED = ("sft", "grpo")
FINISHED_BEFORE = ("task", "sft-data")
PATIENCE_SECONDS = 240.0


def is_saved(workspace: Workspace, stage: str, step: int) -> bool:
    """Whether the checkpoint of `step`, or a later one, is whole."""
    if not list((workspace.path / "outputs").glob("2*")):
        return False
    progress = read_json(workspace.stage(stage) / "progress.json")
    return isinstance(progress, dict) and (progress["checkpoint_step"] or 0) >= step


def kill_after_checkpoint(workspace: Workspace, flow: subprocess.Popen[str], what: str, stage: str, step: int) -> float:
    """`kill -9` in the middle of a stage's training; when that was, in seconds since 1970."""
    wait_until(
        lambda: is_saved(workspace, stage, step) or flow.poll() is not None,
        PATIENCE_SECONDS,
        f"checkpoint of step {step} in {stage}",
    )
    assert flow.poll() is None, (workspace.path / "command.log").read_text()
    for pid in targets(workspace, flow, what):
        os.kill(pid, signal.SIGKILL)
    killed = time.time()
    assert flow.wait() == -signal.SIGKILL
    workspace.expect_quiet(15)
    assert read_result(workspace.stage(stage)) is None, "the kill came in the middle of the stage"
    return killed


def figures(stage: Path) -> list[dict[str, Any]]:
    """What a stage measured, without what a clock measured."""
    lines = read_metrics(stage / "metrics.jsonl")
    return [
        {k: v for k, v in line.items() if k.partition("/")[0] not in {"time", "throughput", "memory"}} for line in lines
    ]


def steps_kept(stage: Path, killed: float) -> int:
    """How many of a stage's steps were taken before the kill and not again."""
    return sum(line["time"] < killed for line in read_metrics(stage / "metrics.jsonl"))


def weights(workspace: Workspace, stage: str) -> dict[str, str]:
    """sha256 of every file of safetensors of a stage, by its path below the stage."""
    folder = workspace.stage(stage)
    return {str(file.relative_to(folder)): sha256(file) for file in sorted(folder.glob("safetensors/**/*.safetensors"))}


@pytest.mark.full
def test_training_killed_in_sft_and_in_grpo_and_resumed_exports_the_bits_of_an_undisturbed_one(
    workspace: Workspace,
) -> None:
    reference, disturbed = Workspace(workspace.path / "reference"), Workspace(workspace.path / "disturbed")
    for each in (reference, disturbed):
        each.write("demo.toml", PIPELINE)
    undisturbed = reference.start("run", "demo.toml")

    flow = disturbed.start("run", "demo.toml")
    sft_killed = kill_after_checkpoint(disturbed, flow, "flow", "sft", 20)
    created = {name: read_result(disturbed.stage(name))["created"] for name in FINISHED_BEFORE}  # type: ignore[index]
    flow = disturbed.start("resume")
    grpo_killed = kill_after_checkpoint(disturbed, flow, "all", "grpo", 4)
    disturbed.cosmos("resume", timeout=PATIENCE_SECONDS)
    assert undisturbed.wait(timeout=PATIENCE_SECONDS) == 0, (reference.path / "command.log").read_text()

    for name in (*TRAINED, "export"):
        assert weights(disturbed, name) == weights(reference, name)
        assert weights(reference, name), f"{name} has weights to compare"
    for name in TRAINED:
        assert figures(disturbed.stage(name)) == figures(reference.stage(name))
    assert len(figures(reference.stage("grpo"))) == 16
    assert steps_kept(disturbed.stage("sft"), sft_killed) >= 20, "SFT continued from its checkpoint"
    assert steps_kept(disturbed.stage("grpo"), grpo_killed) >= 4, "GRPO continued from its checkpoint"
    for name, when in created.items():
        result = read_result(disturbed.stage(name))
        assert result is not None
        assert result["created"] == when, f"{name} was finished and is reused"
    workspace.expect_quiet()
