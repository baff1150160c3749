"""Trainings of pretrained models, against transformers and PEFT on the same files. Random weights hide much: they have
no likely token, no tied head that matters, no template of their own."""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cosmos_core.data import prepare
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.setup import run
from tests.conftest import Workspace, wait_until
from tests.effects.change import recipe, stage_of
from tests.real.rows import load, loss_of, question, write_rows

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SFT: dict[str, Any] = {
    "train.train_policy.type": "sft", "train.param_dtype": "float32", "train.train_batch_per_replica": 8,
    "train.train_policy.mini_batch": 4, "train.optm_lr": 1e-5, "train.optm_warmup_steps": 0, "train.max_num_steps": 1,
    "policy.model_max_length": 96, "validation.enable": True, "validation.val_before_train": True,
    "train.train_policy.dataset.test_size": 4,
}  # fmt: skip
FEW = {
    "train.train_batch_per_replica": 4, "train.train_policy.mini_batch": 2, "train.train_policy.dataset.test_size": 2,
}  # fmt: skip
"""All of six rows."""
LAST_NORM = {"policy.freeze_pattern": ["embed_tokens", "layers"]}
"""Trains a vector: the loss is that of all weights, and the checkpoint is small."""
CHAT = {"train.train_policy.conversation_column_name": "messages"}
LORA = {"policy.lora": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear"}}
SAME_LOSS = 5e-5


def trained(
    folder: Path, model: Path, kind: str, settings: dict[str, Any], count: int = 12
) -> tuple[Path, list[dict[str, Any]]]:
    """Prepare rows and train on them; the stage and its metrics."""
    dataset = {"train.train_policy.dataset.name": str(write_rows(folder / "rows.jsonl", kind, count))}
    config = recipe({**SFT, **settings, **dataset})
    prepare.run(stage_of(folder / "rows", config, kind="prepare", model=model))
    stage = stage_of(folder / "train", config, model=model, data=folder / "rows/data")
    stage.save()
    run(stage)
    return stage.path, read_metrics(stage.path / "metrics.jsonl")


def value(lines: list[dict[str, Any]], key: str, step: int) -> float:
    return next(float(line[key]) for line in lines if line["step"] == step and key in line)


@pytest.mark.parametrize(
    ("name", "kind", "column"),
    [
        ("smollm2", "chat", CHAT),
        pytest.param("gemma3", "text", {"train.train_policy.conversation_column_name": "text"}, marks=pytest.mark.full),
    ],
)
def test_the_first_loss_and_the_held_out_loss_are_those_of_transformers(
    name: str, kind: str, column: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    model = request.getfixturevalue(name)
    _, lines = trained(tmp_path, model, kind, {**LAST_NORM, **FEW, **column}, count=6)
    network = load(model)
    for key, step, split in (("loss", 1, "train"), ("validation/loss", 0, "validation")):
        expected = loss_of(model, open_sequences(tmp_path / "rows/data", split), network)
        assert value(lines, key, step) == pytest.approx(expected, abs=SAME_LOSS)


@pytest.mark.full
def test_a_merged_adapter_is_what_peft_makes_of_it(smollm2: Path, tmp_path: Path) -> None:
    settings = {**CHAT, **LORA, "train.optm_lr": 1e-3, "train.max_num_steps": 3, "train.epoch": 3}
    stage, lines = trained(tmp_path, smollm2, "chat", settings)
    export = stage / "safetensors/step_3"
    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    merged = PeftModel.from_pretrained(base, export / "lora").merge_and_unload().state_dict()
    found = load_file(export / "model.safetensors")
    assert found.keys() <= merged.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, merged[key], rtol=0, atol=1e-6, msg=key)
    held_out = loss_of(export, open_sequences(tmp_path / "rows/data", "validation"))
    assert value(lines, "validation/loss", 3) == pytest.approx(held_out, abs=SAME_LOSS)
    assert held_out < value(lines, "validation/loss", 0)


@pytest.mark.full
def test_the_first_loss_of_dpo_is_ln_2(smollm2: Path, tmp_path: Path) -> None:
    settings = {**LAST_NORM, "train.train_policy.trainer_type": "dpo"}
    _, lines = trained(tmp_path, smollm2, "pairs", settings)
    assert value(lines, "loss", 1) == pytest.approx(math.log(2), abs=1e-6)


def write_recipe(workspace: Workspace, model: Path, policy: str, rest: str) -> None:
    workspace.write(
        "recipe.toml",
        f'[policy]\nmodel_name_or_path = "{model}"\nmodel_max_length = 96\n'
        '[train]\nparam_dtype = "float32"\noptm_lr = 1e-5\noptm_warmup_steps = 0\nepoch = 4\n'
        f"train_batch_per_replica = 4\nckpt = {{ enable_checkpoint = true, save_freq = 1 }}\n{policy}\n{rest}",
    )


def digest(workspace: Workspace) -> str:
    [file] = workspace.stage("export").glob("safetensors/*/model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.full
def test_a_training_that_was_killed_and_resumed_exports_the_same_bytes(smollm2: Path, workspace: Workspace) -> None:
    write_rows(workspace.path / "rows.jsonl", "chat")
    policy = '[train.train_policy]\ntype = "sft"\nmini_batch = 4\nconversation_column_name = "messages"\n'
    policy += 'dataset.name = "rows.jsonl"\ndataset.test_size = 4\n'
    write_recipe(workspace, smollm2, policy, "[validation]\nenable = true\n")
    steps = ("--set", "train.max_num_steps=4")
    workspace.cosmos("run", "recipe.toml", *steps, "--set", "pipeline.output_dir=undisturbed/outputs")
    whole = Workspace(workspace.path / "undisturbed")
    flow = workspace.start("run", "recipe.toml", *steps)
    wait_until(lambda: workspace.is_past("sft", 2), 120, "step 2")
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait()
    workspace.expect_quiet()
    assert "died at " in workspace.cosmos("status").stdout
    workspace.cosmos("resume")
    assert digest(workspace) == digest(whole)
    [export] = workspace.stage("export").glob("safetensors/*")
    held_out = loss_of(export, open_sequences(workspace.stage("prepare") / "data", "validation"))
    lines = read_metrics(workspace.stage("sft") / "metrics.jsonl")
    assert value(lines, "validation/loss", 4) == pytest.approx(held_out, abs=SAME_LOSS)


@pytest.mark.full
def test_vllm_and_the_trainer_agree_about_every_token(smollm2: Path, workspace: Workspace) -> None:
    rows = [{"prompt": question(country), "answer": "x"} for country in ("France", "Peru", "Kenya", "Cuba")]
    workspace.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    workspace.write("reward.py", "def short(completion, reference):\n    return -len(completion) / 100\n")
    policy = '[train.train_policy]\ntype = "grpo"\nmini_batch = 4\nprompt_column_name = "prompt"\n'
    policy += 'response_column_name = "answer"\nreward_function = "reward.py:short"\ndataset.name = "rows.jsonl"\n'
    rollout = '[rollout]\nbackend = "vllm"\nn_generation = 4\nbatch_size = 1\nmax_response_length = 24\n'
    write_recipe(workspace, smollm2, policy, rollout)
    workspace.cosmos("run", "recipe.toml", "--set", "train.max_num_steps=2")
    lines = read_metrics(workspace.stage("rl") / "metrics.jsonl")
    [name] = {key for line in lines for key in line if key.endswith("logprob_difference_max")}
    assert [value(lines, name, step) < 1e-3 for step in (1, 2)] == [True, True]


@pytest.mark.full
def test_a_base_model_without_a_chat_template_is_told_by_check(gemma3: Path, workspace: Workspace) -> None:
    assert not (gemma3 / "chat_template.jinja").exists()
    write_rows(workspace.path / "rows.jsonl", "chat")
    policy = '[train.train_policy]\ntype = "sft"\nconversation_column_name = "messages"\ndataset.name = "rows.jsonl"\n'
    write_recipe(workspace, gemma3, policy, "")
    assert "chat template" in workspace.cosmos("check", "recipe.toml", code=64).stderr
