"""GRPO teaches a policy that guesses to ask a tool: a task of two turns, from almost nothing to above 80 %."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

SEEDS = (1, 2, 3)
MOST_BEFORE, LEAST_AFTER = 10.0, 80.0
_TASK = Path(__file__).with_name("tool_task.py")
_SFT = """epoch = 10, train_batch_per_replica = 128, \
train_policy = { type = "sft", mini_batch = 128, conversation_column_name = "messages" }"""
PIPELINE = f"""
[pipeline]
name = "tools"
threads = 1

[policy]
model_max_length = 64
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
seed = 1

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "{_TASK}:make"
arguments = {{ asking = 1.0 }}

[[pipeline.stages]]
name = "guesses"
kind = "custom"
entry = "{_TASK}:make"
arguments = {{ asking = 0.04 }}

[[pipeline.stages]]
name = "asks"
kind = "sft"
after = ["task"]
model = "stage:task"
data = "stage:task"
overrides.train = {{ max_num_steps = 320, optm_lr = 2e-3, optm_warmup_steps = 80, {_SFT} }}

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = ["asks", "guesses"]
model = "stage:asks"
data = "stage:guesses"
overrides.train = {{ max_num_steps = 60, optm_lr = 5e-4, optm_warmup_steps = 5, {_SFT} }}

[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["sft", "task"]
model = "stage:sft"
data = "stage:task"

[pipeline.stages.overrides.train]
max_num_steps = 60
epoch = 4
train_batch_per_replica = 256
optm_lr = 3e-4
optm_warmup_steps = 5
train_policy = {{ type = "grpo", reward_function = "exact_match", mini_batch = 128, dataloader_seed = SEED }}

[pipeline.stages.overrides.rollout]
seed = SEED
n_generation = 8
batch_size = 32
max_response_length = 40
multi_turn_config = {{ enable = true, enable_tools = true, tools = ["{_TASK}:add"], max_assistant_turns = 2 }}

[pipeline.stages.overrides.validation]
enable = true
val_before_train = true
freq = 20
batch_size = 200
"""


def prove(folder: Path) -> Proof:
    """Train once a seed; the supervised stages before are those of the first run."""
    began = time.monotonic()
    rows, met = [], True
    workspace = Workspace(folder)
    for seed in SEEDS:
        run_began = time.monotonic()
        file = workspace.write(f"tools_{seed}.toml", PIPELINE.replace("SEED", str(seed)))
        workspace.cosmos("run", str(file), timeout=3600)
        curve = demo.curves(workspace, "grpo")
        measured = [line for line in curve if "validation/accuracy" in line]
        before, after = (100 * measured[i]["validation/accuracy"] for i in (0, -1))
        difference = max(float(line[demo.DIFFERENCE]) for line in curve if demo.DIFFERENCE in line)
        met = met and before <= MOST_BEFORE and after >= LEAST_AFTER and difference < demo.LARGEST_DIFFERENCE
        rows.append([
            seed, f"{before:.1f} %", f"**{after:.1f} %**", f"{measured[-1]['validation/turns']:.2f}",
            f"{difference:.1e}", f"{time.monotonic() - run_began:.0f} s",
        ])  # fmt: skip
        logger.info("seed %d: %s", seed, " | ".join(map(str, rows[-1])))
    return Proof(
        title="GRPO teaches to ask a tool",
        is_met=met,
        claim=(
            f"A policy that guesses sums, {MOST_BEFORE:.0f} % or fewer of its greedy responses right, learns to ask "
            f"a tool for them and to say what it said: above {LEAST_AFTER:.0f} %. The log-probabilities of engine and "
            f"trainer differ by less than {demo.LARGEST_DIFFERENCE:g} in each sampled token, behind a tool too."
        ),
        commands=["python -m tests.acceptance tools"],
        body=table(["seed", "before", "after", "turns", "log-prob difference", "wall time"], rows),
        seconds=time.monotonic() - began,
    )
