"""A disk that is full when a checkpoint is written: one line, exit 1, and resume continues the checkpoint before."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from cosmos_core.run.manifest import read_result
from cosmos_core.run.progress import read_metrics
from tests.conftest import Workspace, wait_until

PIPELINE = """
[pipeline]
threads = 1
python = "PYTHON"

[train]
param_dtype = "float32"
compile = false

[policy]
model_max_length = 32
model_gradient_checkpointing = false

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "cosmos_core.data.arithmetic:make"
arguments = { train_rows = 256, heldout_rows = 16, hidden_size = 64, layers = 1 }

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"
retries = 0

[pipeline.stages.overrides.train]
max_num_steps = 600
epoch = 1000
train_batch_per_replica = 32
train_policy = { type = "sft", mini_batch = 32, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 50, max_keep = 2 }
"""


def limited_python(workspace: Workspace) -> Path:
    """An interpreter that cannot write files above 50 kB while the file `full` exists."""
    script = workspace.write(
        "python", f'#!/bin/bash\n[ -e "$COSMOS_WORKSPACE/full" ] && ulimit -f 50\nexec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


def test_the_run_fails_with_one_line_and_the_checkpoint_before_is_continued(workspace: Workspace) -> None:
    workspace.write("p.toml", PIPELINE.replace("PYTHON", str(limited_python(workspace))))
    flow = workspace.start("run", "p.toml")
    wait_until(lambda: workspace.is_past("sft", 120), 180, "training at step 120")
    flow.send_signal(signal.SIGTERM)
    assert flow.wait(timeout=60) == 75
    kept = sorted(path.name for path in (workspace.stage("sft") / "checkpoints").glob("step_*"))
    assert kept

    (workspace.path / "full").touch()
    done = workspace.cosmos("resume", code=1)
    lines = [line for line in done.stderr.splitlines() if "disk full while saving checkpoint" in line]
    assert lines, done.stderr
    assert "is intact" in lines[0]
    assert sorted(path.name for path in (workspace.stage("sft") / "checkpoints").iterdir()) == kept
    assert read_result(workspace.stage("sft")) is None

    (workspace.path / "full").unlink()
    workspace.cosmos("resume")
    assert read_metrics(workspace.stage("sft") / "metrics.jsonl")[-1]["step"] == 600
    workspace.expect_quiet()
