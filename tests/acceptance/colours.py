"""GRPO teaches a vision-language model to look: the reward depends on the image, which no text tells."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path

from PIL import Image

from tests.acceptance import demo
from tests.acceptance.page import Proof, table
from tests.conftest import Workspace
from tests.unit.tiny_vlms import PARTS, save_vlm

logger = logging.getLogger(__name__)

SEEDS = (1, 2, 3)
COLOURS = {"R": (220, 20, 20), "G": (20, 200, 40), "B": (30, 30, 220), "Y": (220, 220, 30)}
CEILING = 100 / len(COLOURS)
"""Points of the best response that does not depend on the image."""
LEAST_AFTER = 2 * CEILING
PIPELINE = """
[pipeline]
name = "colours"
threads = 1

[policy]
model_name_or_path = "model"
model_max_length = 64
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
seed = SEED
optm_warmup_steps = 0

[[pipeline.stages]]
name = "sft"
kind = "sft"

[pipeline.stages.overrides.train]
max_num_steps = 40
epoch = 10
optm_lr = 3e-3
train_batch_per_replica = 64
train_policy = { type = "sft", mini_batch = 64, dataset = { name = "rows/guesses.jsonl" } }

[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["sft"]
model = "stage:sft"

[pipeline.stages.overrides.train]
max_num_steps = 120
epoch = 20
optm_lr = 2e-3
train_batch_per_replica = 128

[pipeline.stages.overrides.train.train_policy]
type = "grpo"
reward_function = "exact_match"
mini_batch = 64
dataloader_seed = SEED
dataset = { name = "rows/train.jsonl" }

[pipeline.stages.overrides.rollout]
backend = "hf"
n_generation = 8
batch_size = 16
max_response_length = 4

[pipeline.stages.overrides.validation]
enable = true
val_before_train = true
freq = 40
batch_size = 80
dataset = { name = "rows/held_out.jsonl" }
"""


def write(folder: Path) -> None:
    """Write a random model, and pictures of one colour each with noise; the rows of the first training guess it."""
    save_vlm("llava", folder / "model", PARTS)
    rows = folder / "rows"
    rows.mkdir()
    chance = random.Random(0)
    for name, count in (("guesses", 256), ("train", 256), ("held_out", 80)):
        lines = []
        for i in range(count):
            letter = list(COLOURS)[i % len(COLOURS)]
            pixel = tuple(max(0, min(255, value + chance.randint(-15, 15))) for value in COLOURS[letter])
            Image.new("RGB", (16, 16), pixel).save(rows / f"{name}_{i}.png")
            row = {"prompt": "Which?", "answer": letter, "image": f"{name}_{i}.png"}
            guess = {"prompt": "Which?", "response": chance.choice(list(COLOURS)), "image": f"{name}_{i}.png"}
            lines.append(json.dumps(guess if name == "guesses" else row) + "\n")
        (rows / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def prove(folder: Path) -> Proof:
    """Train once a seed."""
    began = time.monotonic()
    rows, met = [], True
    workspace = Workspace(folder)
    write(folder)
    for seed in SEEDS:
        run_began = time.monotonic()
        file = workspace.write(f"colours_{seed}.toml", PIPELINE.replace("SEED", str(seed)))
        workspace.cosmos("run", str(file), timeout=3600)
        curve = demo.curves(workspace, "grpo")
        measured = [100 * line["validation/accuracy"] for line in curve if "validation/accuracy" in line]
        difference = max(float(line[demo.DIFFERENCE]) for line in curve if demo.DIFFERENCE in line)
        met = met and measured[-1] >= LEAST_AFTER and difference < demo.LARGEST_DIFFERENCE
        rows.append([
            seed, f"{measured[0]:.1f} %", f"**{measured[-1]:.1f} %**", f"{difference:.1e}",
            f"{time.monotonic() - run_began:.0f} s",
        ])  # fmt: skip
        logger.info("seed %d: %s", seed, " | ".join(map(str, rows[-1])))
    return Proof(
        title="GRPO teaches to look at images",
        is_met=met,
        claim=(
            f"A tiny LLaVA that guesses which of {len(COLOURS)} colours it is shown learns to look, by rewards alone: "
            f"at least {LEAST_AFTER:.0f} % of greedy responses to held-out images, where the best text alone has "
            f"{CEILING:.0f} %. The log-probabilities of engine and trainer differ by less than "
            f"{demo.LARGEST_DIFFERENCE:g} in every sampled token."
        ),
        commands=["python -m tests.acceptance colours"],
        body=table(["seed", "before", "after", "log-prob difference", "wall time"], rows),
        seconds=time.monotonic() - began,
    )
