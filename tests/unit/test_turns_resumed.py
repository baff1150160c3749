"""A training on conversations with tools, stopped and resumed, ends with the bits of the uninterrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.demo import arithmetic
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import prepare
from cosmos_core.run.progress import read_metrics
from cosmos_core.train.setup import train
from tests.unit.test_train import make_stage
from tests.unit.trainers import curve, train_until

TOOLS = '''
from cosmos_core.tools.base import tool

@tool
def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first.
        b: The second.
    """
    if a == 3:
        raise ValueError("not three")
    return a + b
'''
REWARD = """
def talks(completion, reference, turns):
    return len(turns) + len(set(completion)) / 100
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random policy that writes a whole call with one of twenty tokens, each of which ends its turn."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "reward.py").write_text(REWARD)
    tokenizer = arithmetic.make_tokenizer()
    tokenizer.add_tokens([
        f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 1}}}}</tool_call>' for a in range(20)
    ])  # fmt: skip
    model = arithmetic.make_model(tokenizer, hidden_size=32, layers=1, seed=0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(len(tokenizer) - 20, len(tokenizer))]
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"question": f"{i}+{i}=", "answer": str(2 * i)} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def recipe() -> Recipe:
    values: dict[str, Any] = {
        "policy": {"model_max_length": 64, "model_gradient_checkpointing": False},
        "train": {
            "param_dtype": "float32", "compile": False, "optm_lr": 3e-3, "optm_warmup_steps": 1,
            "train_batch_per_replica": 8, "max_num_steps": 2, "ckpt": {"enable_checkpoint": True, "save_freq": 1},
            "train_policy": {
                "type": "grpo", "reward_function": "reward.py:talks", "mini_batch": 4,
                "dataset": {"name": "rows.jsonl"},
            },
        },
        "rollout": {
            "backend": "hf", "n_generation": 4, "batch_size": 2, "max_response_length": 44,
            "multi_turn_config": {
                "enable": True, "enable_tools": True, "tools": ["tools.py:add"], "max_assistant_turns": 3,
            },
        },
    }  # fmt: skip
    return Recipe.model_validate(values)


def test_stopped_and_resumed_ends_with_the_same_bits_and_the_same_curve(task: Path) -> None:
    prepare.run(make_stage(task / "data", "prepare", recipe(), task / "model"))
    data = task / "data" / "data"
    whole = make_stage(task / "whole", "rl", recipe(), task / "model", data)
    expected = train(whole)
    train_until(make_stage(task / "cut", "rl", recipe(), task / "model", data), 1)
    resumed = make_stage(task / "cut", "rl", recipe(), task / "model", data)
    found = train(resumed).adapter.model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.adapter.model.state_dict().items())
    assert curve(resumed) == curve(whole)
    lines = read_metrics(whole.path / "metrics.jsonl")
    assert all(line["completion/turns"] > 1.2 and line["completion/tool_calls"] > 0.2 for line in lines)
    assert any(line["completion/tool_errors"] > 0 for line in lines)
    assert all(line["rollout/logprob_difference_max"] < 1e-4 for line in lines)
