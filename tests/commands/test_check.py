"""`cosmos check` of rows behind a model that another stage makes, and of what each row teaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import InProcess
from tests.unit.data_tokenizers import CHATML
from tests.unit.tiny_model import save_tiny_model

PIPELINE = """
[policy]
model_name_or_path = "model"
model_max_length = 64
[rollout]
max_response_length = 8
[train]
train_batch_per_replica = 2
train_policy = { type = "sft", dataset = { name = "rows.jsonl" } }
[[pipeline.stages]]
name = "rows"
kind = "prepare"
[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "rows"
data = "stage:rows"
[[pipeline.stages]]
name = "prompts"
kind = "prepare"
after = "sft"
model = "stage:sft"
overrides.train.train_policy = { type = "grpo", dataset = { name = "prompts.jsonl" } }
overrides.policy.model_name_or_path = "elsewhere"
"""


def test_rows_behind_a_model_that_is_not_made_yet_are_looked_at_with_the_one_it_descends_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = InProcess(tmp_path, monkeypatch, capsys)
    save_tiny_model(workspace.path / "model")
    (workspace.path / "model" / "chat_template.jinja").write_text(CHATML)
    workspace.write("pipeline.toml", PIPELINE)
    workspace.write("rows.jsonl", 2 * (json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n"))
    workspace.write("prompts.jsonl", 2 * '{"frage": "1+1="}\n')
    done = workspace.cosmos("check", "pipeline.toml", code=64)
    assert "prompts.jsonl:1: no prompt among the columns frage" in done.stderr
    workspace.write("prompts.jsonl", 2 * '{"prompt": "1+1=", "answer": "2"}\n')
    said = workspace.cosmos("check", "pipeline.toml", "--show", "1").stdout
    assert "(looked at with the model that stage 'rows' starts from)" not in said
    assert "prompts: Qwen3ForCausalLM" in said
    assert "(looked at with the model that stage 'sft' starts from)" in said
    few = workspace.cosmos("check", "pipeline.toml", "--set", "train.train_batch_per_replica=4", code=64).stderr
    assert "stage 'sft': the data set has 2 rows, fewer than one batch of 4" in few.replace("\n", " ")
    lines = said.splitlines()
    shown = lines[lines.index("rows.jsonl:1:") :]
    assert shown[2] == "  learned: '2<|im_end|>'" and lines.count("rows.jsonl:2:") == 0
    assert "  reference: '2'" in lines
