"""Small pipelines drawn at random: one of a few trunks that train, whose undisturbed results are soon known, and beside
it custom stages that misbehave, whose results are known without a run."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

from configs.demo.arithmetic import make
from tests.conftest import PROGRAMS, Workspace
from tests.effects.change import SFT, recipe, stage_of
from tests.programs.misbehaving import WAYS

SEED = 42
_HEAD = """
[pipeline]
name = "storm"
threads = 1
grace_seconds = 4

[policy]
model_name_or_path = "world/model"
model_max_length = 48
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
epoch = 1000
optm_warmup_steps = 0
seed = 42
"""
_SFT = """
[[pipeline.stages]]
name = "sft"
kind = "sft"

[pipeline.stages.overrides.train]
max_num_steps = STEPS
train_batch_per_replica = 16
optm_lr = 1e-3
train_policy = { type = "sft", mini_batch = 16, conversation_column_name = "messages", DATA }
ckpt = { enable_checkpoint = true, save_freq = FREQUENCY, max_keep = 3 }
"""
_LORA = """
[pipeline.stages.overrides.policy.lora]
r = 4
lora_alpha = 8
target_modules = "all-linear"
"""
_RANKS = "\n[pipeline.stages.overrides.policy.parallelism]\ndp_shard_size = 2\n"
_DPO = """
[[pipeline.stages]]
name = "dpo"
kind = "sft"

[pipeline.stages.overrides.train]
max_num_steps = STEPS
train_batch_per_replica = 8
optm_lr = 1e-3
train_policy = { type = "sft", trainer_type = "dpo", mini_batch = 8, dataset = { name = "pairs.jsonl" } }
ckpt = { enable_checkpoint = true, save_freq = FREQUENCY, max_keep = 3 }
"""
_GRPO = """
[[pipeline.stages]]
name = "grpo"
kind = "rl"
BEFORE

[pipeline.stages.overrides.train]
max_num_steps = STEPS
train_batch_per_replica = 32
optm_lr = 3e-4
train_policy = { type = "grpo", reward_function = "exact_match", kl_beta = 0.001, mini_batch = 32, DATA }
ckpt = { enable_checkpoint = true, save_freq = FREQUENCY, max_keep = 2 }

[pipeline.stages.overrides.rollout]
backend = "hf"
n_generation = 4
batch_size = 8
max_response_length = 4
"""
_EXPORT = """
[[pipeline.stages]]
name = "export"
kind = "export"
after = "sft"
model = "stage:sft"
"""
_SIDE = """
[[pipeline.stages]]
name = "NAME"
kind = "custom"
entry = "PROGRAMS/misbehaving.py:count"
env = ["LD_PRELOAD"]
retries = 8
AFTER
arguments = { steps = STEPS, ways = WAYS }
"""


def _steps(text: str, steps: int, frequency: int) -> str:
    text = text.replace("STEPS", str(steps)).replace("FREQUENCY", str(frequency))
    return text.replace("DATA", 'dataset = { name = "world/data" }')


TRUNKS = {
    "sft": _steps(_SFT, 120, 20),
    "sft, export": _steps(_SFT, 60, 15) + _EXPORT,
    "lora": _steps(_SFT, 100, 25) + _LORA,
    "dpo": _steps(_DPO, 60, 10),
    "grpo": _steps(_GRPO, 8, 2).replace("BEFORE", ""),
    "sft, grpo": _steps(_SFT, 40, 20) + _steps(_GRPO, 4, 1).replace("BEFORE", 'after = "sft"\nmodel = "stage:sft"'),
    "two ranks": _steps(_SFT, 12, 3) + _RANKS,
}
_WEIGHTS = {"two ranks": 1}
_OFTEN = 4


@dataclass(frozen=True)
class StormPipeline:
    """A pipeline and what is known of its results before it runs."""

    trunk: str
    ways: dict[str, tuple[str, ...]]
    """Of each custom stage beside the trunk."""
    steps: dict[str, int]

    @property
    def trained(self) -> list[str]:
        """Return the stages of the trunk."""
        return self.trunk.replace("two ranks", "sft").replace("lora", "sft").split(", ")

    def text(self, *, is_whole: bool = True) -> str:
        """Return the file; without the stages beside the trunk, for its undisturbed results."""
        return _HEAD + TRUNKS[self.trunk] + "".join(self._side(name) for name in self.ways if is_whole)

    def write(self, workspace: Workspace, world: Path, *, is_whole: bool = True) -> None:
        """Write `p.toml` and what it names, the model and rows of `world` among it."""
        workspace.write("p.toml", self.text(is_whole=is_whole))
        shutil.copytree(world, workspace.path / "world")
        pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(10, 74)]
        workspace.write("pairs.jsonl", "".join(json.dumps(pair) + "\n" for pair in pairs))

    def _side(self, name: str) -> str:
        text = _SIDE.replace("NAME", name).replace("STEPS", str(self.steps[name]))
        text = text.replace("WAYS", json.dumps(list(self.ways[name])))
        return text.replace("AFTER", f'after = "{self.trained[0]}"' if name == "late" else "").replace(
            "PROGRAMS", str(PROGRAMS)
        )


def make_world(folder: Path) -> Path:
    """Write the model and the rows that every pipeline begins with."""
    stage = stage_of(folder, recipe(SFT), kind="custom")
    make(stage, train_rows=400, heldout_rows=20, hidden_size=64, layers=1)
    return folder


def draw(random: Random, trunk: str = "") -> StormPipeline:
    """Draw a pipeline; of this trunk, where one is named."""
    names = [name for name in TRUNKS for _ in range(_WEIGHTS.get(name, _OFTEN))]
    trunk = trunk or random.choice(names)
    sides = random.choice([(), ("early",), ("late",), ("early", "late")])
    ways = {name: tuple(random.sample(sorted(WAYS), random.randint(0, 3))) for name in sides}
    return StormPipeline(trunk, ways, {name: random.randint(10, 60) for name in sides})
