"""A pipeline for machines that share no disk, whose training waits at a gate that the test opens."""

from __future__ import annotations

from tests.conftest import DEMOS, Workspace

SEPARATE_DISKS = """
[pipeline]
name = "separate-disks"
threads = 1
grace_seconds = 10
output_dir = "OUTPUTS"
artifact_store = "STORE"

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
arguments = { train_rows = 400, heldout_rows = 20, hidden_size = 32 }
work_pool = "cpu"

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"
work_pool = "gpu"

[pipeline.stages.overrides.train]
epoch = 1000
max_num_steps = 30
train_batch_per_replica = 16
optm_lr = 3e-3
train_policy = { type = "sft", mini_batch = 16, conversation_column_name = "messages" }
ckpt = { enable_checkpoint = true, save_freq = 3, max_keep = 2 }

[[pipeline.stages]]
name = "export"
kind = "export"
after = "sft"
model = "stage:sft"
work_pool = "cpu"

[[pipeline.stages]]
name = "gate"
kind = "gate"
after = "sft"
require = ["loss > 0"]

[[pipeline.stages]]
name = "publish"
kind = "upload"
after = ["gate", "export"]
model = "stage:export"
target = "STORE/published"
work_pool = "cpu"
""".replace("DEMOS", str(DEMOS))


STEPS = 12
WAIT = """
import time
from pathlib import Path

def wait(stage, report_data):
    while report_data["current_step"] > 8 and not Path("PLACE/open").exists():
        time.sleep(0.05)
"""


def write_pipeline(place: Workspace, name: str) -> str:
    """Write the pipeline without the stage that exports again, and of fewer steps; its path."""
    place.write("hooks.py", WAIT.replace("PLACE", str(place.path)))
    hooks = f'hooks = {{ pre_training_step_hook = "{place.path}/hooks.py:wait" }}'
    before, _, after = SEPARATE_DISKS.partition('[[pipeline.stages]]\nname = "export"')
    text = f"{before}[[pipeline.stages]]{after.partition('[[pipeline.stages]]')[2]}".replace("export", "sft")
    text = (
        text.replace("max_num_steps = 30", f"max_num_steps = {STEPS}")
        .replace("OUTPUTS", str(place.path / "outputs"))
        .replace("STORE", f"s3://models/{name}")
    )
    return str(place.write("separate_disks.toml", text.replace("\nckpt =", f"\n{hooks}\nckpt =")))
