"""Recipes in the shapes of Cosmos-RL's public ones, two steps of each to the export: the keys, mesh, mode and algorithm
of one, with its sizes divided, a tiny model of its class and rows of its kind. Those of diffusion models are in
`faults/flow_cells.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3ForCausalLM
from typer.testing import CliRunner

from cosmos_core.cli import app
from cosmos_core.config.compose import load_pipeline
from cosmos_core.config.load import merge_tables
from cosmos_core.run.directory import create_run
from cosmos_core.run.progress import read_metrics
from tasks.kinds import all_kinds
from tasks.stage import run_stage
from tests import attempts
from tests.conftest import Workspace
from tests.effects.change import nested
from tests.unit.data_tokenizers import CHATML
from tests.unit.tiny_families import save_family
from tests.unit.tiny_vlms import picture, save_vlm

COMMON = """redis = "12800"
[train]
resume = false
epoch = 1
max_num_steps = 2
epsilon = 1e-6
optm_name = "AdamW"
optm_lr = 1e-6
optm_impl = "fused"
optm_weight_decay = 0.01
optm_betas = [ 0.9, 0.999,]
optm_warmup_steps = 20
optm_grad_norm_clip = 1.0
async_tp_enabled = false
compile = false
master_dtype = "bfloat16"
param_dtype = "bfloat16"
fsdp_reduce_dtype = "float32"
fsdp_offload = false
fsdp_reshard_after_forward = "default"
sync_weight_interval = 1
[policy]
model_name_or_path = "model"
model_gradient_checkpointing = true
[logging]
logger = ['console']
project_name = "cosmos_rl"
experiment_name = "None"
[train.ckpt]
enable_checkpoint = true
save_freq = 20
save_mode = "async"
[policy.parallelism]
n_init_replicas = 1
tp_size = 1
cp_size = 1
pp_size = 1
dp_shard_size = 1
dp_replicate_size = 1
"""
SFT = f"""{COMMON}
[train.train_policy]
type = "sft"
conversation_column_name = "conversation"
mini_batch = 2
dataset.name = "rows.jsonl"
"""
GRPO = f"""{COMMON}
[rollout]
backend = "hf"
gpu_memory_utilization = 0.7
enable_chunked_prefill = false
max_response_length = 12
n_generation = 4
batch_size = 2
quantization = "none"
[rollout.parallelism]
n_init_replicas = 1
tp_size = 1
pp_size = 1
[train.train_policy]
type = "grpo"
prompt_column_name = "question"
response_column_name = "answer"
reward_function = "gsm8k"
temperature = 0.9
epsilon_low = 0.2
epsilon_high = 0.2
kl_beta = 0.0
mu_iterations = 1
mini_batch = 2
min_filter_prefix_tokens = 1
dataset.name = "rows.jsonl"
"""
MESH, BATCH = "policy.parallelism", "train.train_batch_per_replica"
POLICY = "train.train_policy"
WIDE = "qwen3 with heads of 32"
DP2 = {f"{MESH}.dp_shard_size": 2}
SHORT = {"policy.model_max_length": 96, BATCH: 8}
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen2-5 tp1 sft": ("qwen2.5", SFT, {}),
    "qwen2-5 tp2 fsdp2 sft": ("qwen2.5", SFT, {**DP2, f"{MESH}.tp_size": 2}),
    "qwen2-5 pp2 cp2 sft": ("qwen2.5", SFT, {f"{MESH}.pp_size": 2, f"{MESH}.cp_size": 2}),
    "mistral fsdp4 sft": ("mistral", SFT, {f"{MESH}.dp_shard_size": 4}),
    "gpt-oss fsdp4 sft": ("gpt-oss", SFT, {f"{MESH}.dp_shard_size": 4}),
    "qwen3-moe fsdp2 tp2 sft": ("qwen3-moe", SFT, {**DP2, f"{MESH}.tp_size": 2}),
    "deepseek-v3 fsdp cp2 ep4 sft": ("deepseek-v3", SFT, {**DP2, f"{MESH}.cp_size": 2, f"{MESH}.ep_size": 4}),
    "gemma3 vlm fsdp2 sft": ("gemma3-vlm", SFT, {**DP2, f"{POLICY}.conversation_column_name": "messages"}),
    "qwen2-5 tp1 grpo, parts of groups": ("qwen2.5", GRPO, {BATCH: 2, "rollout.max_response_length": 96}),
    "qwen2-5 fsdp2 grpo, completions as long as the sequence": ("qwen2.5", GRPO, {
        **DP2, "rollout.max_response_length": 96, "rollout.parallelism.n_init_replicas": 2}),
    "qwen2-5 fsdp2 cp2 grpo": ("qwen2.5", GRPO, {**DP2, f"{MESH}.cp_size": 2}),
    "qwen3 fsdp2 tp2 grpo, compiled, rollouts in fp8": (WIDE, GRPO, {
        **DP2, f"{MESH}.tp_size": 2, "train.compile": True, "rollout.backend": "vllm", "rollout.quantization": "fp8"}),
    "qwen2-5 disaggregated grpo": ("qwen2.5", GRPO, {**DP2, "mode": "disaggregated"}),
    "qwen3 colocated separated grpo, engine of two": (WIDE, GRPO, {
        **DP2, "mode": "colocated_separated", "rollout.backend": "vllm", "rollout.parallelism.tp_size": 2}),
    "phi4 fsdp2 grpo": ("phi4", GRPO, {**DP2, "rollout.sampling_config.top_k": 10}),
    "qwen3 tp2 grpo, parts of groups": ("qwen3", GRPO, {
        f"{MESH}.tp_size": 2, BATCH: 2, "rollout.n_generation": 16, "rollout.max_response_length": 96}),
    "qwen3 tp2 grpo, fp8": ("qwen3", GRPO, {f"{MESH}.tp_size": 2, "train.fp8.enable_fp8": True}),
    "qwen3 fsdp2 distilled, engine of four": (WIDE, GRPO, {
        **DP2, "rollout.backend": "vllm", "rollout.parallelism.tp_size": 4, "distillation.enable": True,
        "distillation.model_name_or_path": "model", f"{POLICY}.loss_type": "token-sum"}),
    "qwen3-moe tp2 grpo, parts of groups": ("qwen3-moe", GRPO, {
        f"{MESH}.tp_size": 2, BATCH: 2, "rollout.n_generation": 8, "train.deterministic": True}),
    "gpt-oss fsdp2 grpo, on policy": ("gpt-oss", GRPO, {**DP2, f"{POLICY}.on_policy": True}),
    "deepseek-v3 fsdp cp2 ep4 grpo": ("deepseek-v3", GRPO, {**DP2, f"{MESH}.cp_size": 2, f"{MESH}.ep_size": 4}),
}  # fmt: skip
"""Family of the model, recipe, and settings. vLLM on CPU takes heads of 32 features and more."""
EVERYDAY = {"qwen2-5 tp1 grpo, parts of groups"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.full) for name in SHAPES]
)
def test_a_recipe_of_this_shape_trains_two_steps_and_exports(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, text, settings = SHAPES[name]
    is_visual = family == "gemma3-vlm"
    (save_vlm if is_visual else save_family)("qwen3" if family == WIDE else family, workspace.path / "model")
    if family == WIDE:
        config = AutoConfig.from_pretrained(workspace.path / "model")
        config.head_dim = 32
        Qwen3ForCausalLM(config).save_pretrained(workspace.path / "model")
    if not is_visual:
        (workspace.path / "model/chat_template.jinja").write_text(CHATML)
    _write_rows(workspace.path, is_visual=is_visual)
    workspace.write("recipe.toml", text)
    workspace.write("shape.toml", tomli_w.dumps(merge_tables(nested(SHORT), nested(settings))))
    monkeypatch.chdir(workspace.path)
    planned = CliRunner().invoke(app, ["plan", "recipe.toml", "shape.toml"])
    assert planned.exit_code == 0 and "train" in planned.output, planned.output
    run = create_run(load_pipeline(Path("recipe.toml"), (), all_kinds(), [Path("shape.toml")]))
    if name in EVERYDAY:
        attempts.use(monkeypatch)
    for stage in run.pipeline.stages:
        run_stage(run, stage.name)  # what the flow of `cosmos run` calls, without a server
    kind = "sft" if text == SFT else "rl"
    metrics = read_metrics(workspace.stage(kind) / "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2] and all(math.isfinite(line["loss"]) for line in metrics)
    [exported] = (workspace.stage("export") / "safetensors").iterdir()
    load = AutoModelForImageTextToText if is_visual else AutoModelForCausalLM
    assert load.from_pretrained(exported).num_parameters() > 0
    assert len(list((workspace.stage(kind) / "checkpoints").iterdir())) == 1


def _write_rows(folder: Path, *, is_visual: bool) -> None:
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    row: dict[str, Any] = {"question": "1+1?", "answer": "so 2\n#### 2", "conversation": turns}
    if is_visual:
        picture(0).save(folder / "a.png")
        shown = [{"type": "image"}, {"type": "text", "text": "What?"}]
        row = {"messages": [{"role": "user", "content": shown}, turns[1]], "images": ["a.png"]}
    (folder / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 32)
