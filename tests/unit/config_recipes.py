"""Valid configurations that together set every table of the schema, to be tried and mutated."""

from __future__ import annotations

import tempfile
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from cosmos_core.config.compose import load_pipeline
from tasks.kinds import all_kinds

CONFIGS = Path(__file__).parents[2] / "configs"
WRITTEN = {
    "sft": """
redis = "12800"
mode = "disaggregated"

[policy]
model_name_or_path = "org/model"
model_max_length = 1024
trainable_map = { "model.visual" = false }
freeze_pattern = ["^visual"]

[policy.parallelism]
tp_size = 2
dp_shard_size = -1

[policy.lora]
r = 4
target_modules = ["q_proj", "v_proj"]
alpha_pattern = { "v_proj" = 2.0 }
r_pattern = { "v_proj" = 2 }
init_lora_weights = "gaussian"

[train]
epoch = 2
output_dir = "./outputs"
optm_lr = { global = 1e-5, "model.visual" = 1e-6 }
optm_impl = ["fused", "foreach"]
optm_betas = [0.9, 0.95]
optm_warmup_steps = 0.1
optm_decay_type = "cosine"
train_batch_per_replica = 8
seed = 7
signal_to_handle = ["SIGUSR1"]
validation_step = 5

[train.fp8]
enable_fp8 = true

[train.fp4]
enable_fp4 = false

[train.ckpt]
enable_checkpoint = true
upload_s3 = "final"
s3_bucket = "bucket"

[train.train_policy]
type = "sft"
mini_batch = 4
dataset = { name = "org/rows", split = ["train"], test_size = 0.1 }
conversation_column_name = "messages"

[train.train_policy.clean]
decontaminate_against = [{ name = "org/benchmark", split = ["test"] }]

[validation]
enable = true

[validation.dataset]
name = "org/held-out"

[logging]
logger = ["console", "wandb"]

[profiler]
enable_profiler = true

[profiler.sub_profiler_config]
do_profile = true
rank_filter = [0, 1]

[custom]
free = { as = [1, "bird"] }
""",
    "kto": """
[policy]
model_name_or_path = "org/model"

[train]
train_batch_per_replica = 16

[train.train_policy]
type = "sft"
trainer_type = "kto"
dataset = { name = "org/labelled" }
kto = { desirable_weight = 1.5 }
""",
    "grpo": """
[policy]
model_name_or_path = "org/model"

[train]
train_batch_per_replica = 16
sync_weight_interval = 2

[train.train_policy]
type = "grpo"
variant = "dapo"
reward_function = { exact_match = 1.0, "mine.py:score" = 0.5 }
filter_reward_metric = "reward"
dataset.name = "org/prompts"
epsilon_high = 0.28
use_remote_reward = true
clip_ratio_c = 3.0

[train.train_policy.overlong_reward]
enable_overlong_penalty = true

[train.train_policy.remote_reward]
scale = 2.0
reward_fns = [{ name = "taste", weight = 0.5 }, { name = "order", score_key = "a+b" }]

[rollout]
backend = "vllm_async"
mode = "async"
n_generation = 8
val_batch_size = 4

[rollout.parallelism]
tp_size = 2

[rollout.sampling_config]
top_p = 0.9

[rollout.multi_turn_config]
enable = true

[rollout.async_config]
max_concurrent_requests = 20

[validation]
reward_function = ["exact_match"]

[validation.remote_reward]
reward_fns = [{ name = "taste" }]
""",
    "diffusion": """
[policy]
model_name_or_path = "org/images"
is_diffusers = true

[policy.diffusers]
inference_size = [480, 832]
timestep_fraction = 0.5
weighting_scheme = "mode"

[policy.diffusers.sample]
solver = "dpm2"
deterministic_sampling = true

[policy.diffusers.tokenizer]
chunk_duration = 93

[policy.diffusers.lora]
r = 2

[train.train_policy]
type = "grpo"
trainer_type = "diffusion_nft"
reward_function = "aesthetic"

[train]
train_batch_per_replica = 24
non_text = true

[rollout]
backend = "diffusion_nft_rollout"
n_generation = 12
""",
    "distillation": """
[distillation]
enable = true
model_name_or_path = "org/teacher"
top_k = 4

[distillation.parallelism]
dp_shard_size = 4

[train]
train_batch_per_replica = 16

[train.train_policy]
temperature = 1.0
""",
    "vla": """
[vla]
vla_type = "openvla-oft"
max_steps = 512

[train.train_policy]
type = "grpo"
trainer_type = "grpo_vla"

[rollout]
backend = "vla"
""",
    "pipeline": """
[pipeline]
name = "chain"
threads = 1
grace_seconds = 5.0

[train]
train_batch_per_replica = 16

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "json:loads"
arguments = { depth = { of = [1, 2] } }
timeout = "12h"

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
overrides.train = { epoch = 2, train_policy = { type = "sft", mini_batch = 4 } }

[[pipeline.stages]]
name = "grpo"
kind = "rl"
after = ["sft"]
model = "stage:sft"
retries = 3
overrides.train.train_policy = { type = "grpo", kl_beta = 0.1 }

[[pipeline.stages]]
name = "gate"
kind = "gate"
after = ["grpo"]
require = ["validation/reward >= 0.6", "validation/reward >= published"]

[[pipeline.stages]]
name = "out"
kind = "upload"
after = ["gate", "grpo"]
model = "stage:grpo"
target = "somewhere"
""",
}


@cache
def valid_configurations() -> dict[str, dict[str, Any]]:
    """By name: those above, some with every key spelt out, and the files of the repository."""
    found = {name: tomllib.loads(text) for name, text in WRITTEN.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "written.toml")
        for name in ("sft", "grpo"):
            file.write_text(WRITTEN[name])
            found[f"{name} in full"] = load_pipeline(file, [], all_kinds()).as_toml()
    for file in sorted(CONFIGS.rglob("*.toml")):
        found[str(file.relative_to(CONFIGS))] = _anywhere(tomllib.loads(file.read_text(encoding="utf-8")), file.parent)
    return found


def _anywhere(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same configuration for a file in another folder."""
    for stage in values.get("pipeline", {}).get("stages", []):
        if "recipe" in stage:
            stage["recipe"] = str(folder / stage["recipe"])
    if "extends" in values:
        bases = values["extends"]
        values["extends"] = [str(folder / base) for base in ([bases] if isinstance(bases, str) else bases)]
    return values
