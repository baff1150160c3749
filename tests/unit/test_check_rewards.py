"""`cosmos check` calls each reward on real rows: what would be wrong with every completion is said before a run."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image
from transformers import Qwen2Config

from cosmos_core.config.capabilities import unique_notices
from cosmos_core.data.images import open_image
from cosmos_core.data.kinds.prompts import PromptsKind
from cosmos_core.errors import ConfigError, RewardError
from cosmos_core.rollout.registry import check_engine
from cosmos_core.run.stage import CHECKED_PROMPTS_FILE
from cosmos_core.train.check import check_rewards, run
from cosmos_core.train.check_rewards import make_test_groups, read_first_prompts
from cosmos_core.train.measure import open_rewards
from tests.conftest import Workspace
from tests.effects.change import GRPO, recipe, stage_of
from tests.unit.data_tokenizers import CHATML
from tests.unit.test_config_load import GRPO as GRPO_TOML
from tests.unit.test_config_load import load
from tests.unit.tiny_model import save_tiny_model

ROW = {"text": "2 + 3?", "reference": "5", "metadata": {"prompt": "2 + 3?", "answer": "5"}}


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards have one process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


def looked_at(folder: Path, code: str) -> list[str]:
    (folder / "mine.py").write_text(code)
    rewards = {"reward_function": {f"{folder}/mine.py:f": 1.0, "exact_match": 0.0}, "reward_timeout_seconds": 1}
    settings = {**GRPO, **{f"train.train_policy.{key}": value for key, value in rewards.items()}}
    stage = stage_of(folder / "stage", recipe(settings), kind="rl")
    (stage.path / CHECKED_PROMPTS_FILE).write_text(json.dumps({"train": [ROW]}))
    return check_rewards(stage)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("def f(completion): print(completion)", "returned nothing"),
        pytest.param("def f(completion): return 'good'", "returned a str", marks=pytest.mark.full),
        ("def f(completions, **kwargs): return [1.0]", "returned 1 values for 2 completions"),
        ("def f(completion, solution): return 1.0", r"nothing is called 'solution' \(columns of the row: prompt, ans"),
        ("def f(completion, reference): return 1 / (len(reference) - 1) if completion == '5' else {}['a']", "KeyError"),
        ("def f(completion):\n    import time\n    time.sleep(99)", "not done in 1 s"),
        pytest.param("def f(text, answer): return 1.0", "no parameter is the completion", marks=pytest.mark.full),
    ],
)
def test_a_reward_that_scores_nothing_is_refused(code: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=reason):
        looked_at(tmp_path, code)


def test_a_reward_is_tried_on_the_images_of_prompts(tmp_path: Path) -> None:
    buffer = BytesIO()
    Image.new("RGB", (5, 3), "red").save(buffer, "png")
    schema = PromptsKind().make_schema(tmp_path)
    image = {"path": None, "content": buffer.getvalue(), "sha256": sha256(buffer.getvalue()).hexdigest()}
    values = {"prompt_ids": [1], "prompt_text": "p", "reference": "5", "metadata": "{}", "images": [image]}
    table = pa.Table.from_pylist([{**dict.fromkeys(schema.names, "row 1"), **values}], schema)
    (tmp_path / "data").mkdir()
    with pa.OSFile(str(tmp_path / "data" / "train.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(table)
    prompts = json.loads(json.dumps(read_first_prompts(tmp_path / "data")))
    [group] = make_test_groups(prompts, ["train"], recipe(GRPO).train.train_policy, None)
    [opened] = map(open_image, group.prompt.images)
    assert opened.size == (5, 3)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def f(completion, answer): return float(answer in completion)", ""),
        ("def f(completion): return float(completion)", "has no score for 1 of 2 made-up completions (f: ValueError"),
        ("def f(completions, **kw): return [None for c in completions]", "returned None for 2 of 2 completions"),
    ],
)
def test_a_reward_that_scores_some_is_mentioned(code: str, said: str, tmp_path: Path) -> None:
    [found] = looked_at(tmp_path, code)
    assert found.startswith(f"rewards {tmp_path}/mine.py:f, exact_match") and said in found
    assert (";" in found) == bool(said)


@pytest.mark.parametrize(
    ("key", "name", "code", "reason"),
    [
        ("hooks.pre_training_hook", "missing", "def f(): pass", r"mine\.py has no 'missing'"),
        ("train_policy.trainer_type", "f", "def f(): pass", "is no algorithm; it must be a subclass"),
        ("train_policy.trainer_type", "f", "def f(", r"cannot be imported: SyntaxError: .*mine\.py:1"),
    ],
)
def test_a_hook_or_an_algorithm_that_cannot_be_used_is_refused(
    key: str, name: str, code: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(code)
    settings = {**GRPO, f"train.{key}": f"{tmp_path}/mine.py:{name}"}
    with pytest.raises(ConfigError, match=reason):
        run(stage_of(tmp_path / "stage", recipe(settings), kind="rl"))


def test_the_command_calls_rewards_on_rows_that_another_stage_prepares(workspace: Workspace) -> None:
    (save_tiny_model(workspace.path / "model") / "chat_template.jinja").write_text(CHATML)
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1), "level": i} for i in range(8)]
    workspace.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    workspace.write("mine.py", "def g(completion, rank): return rank\n")
    workspace.write(
        "recipe.toml",
        'policy = { model_name_or_path = "model", model_max_length = 64 }\n'
        "rollout = { max_response_length = 8, n_generation = 2 }\n"
        'train.train_policy = { type = "grpo", reward_function = "mine.py:g", dataset.name = "rows.jsonl" }\n',
    )
    refused = workspace.cosmos("check", "recipe.toml", code=64)
    said = " ".join((refused.stdout + refused.stderr).split())
    assert "nothing is called 'rank' (columns of the row: prompt, answer, level)" in said


def test_a_filter_by_a_metric_of_no_reward_is_refused_before_the_run(tmp_path: Path) -> None:
    dapo = {**GRPO, "train.train_policy.variant": "dapo", "train.train_policy.reward_function": "exact_match"}
    for metric in ("exact_match", "exact_match/near", "exact"):
        settings = {**dapo, "train.train_policy.filter_reward_metric": metric}
        stage = stage_of(tmp_path / metric, recipe(settings), kind="rl")
        with pytest.raises(RewardError, match="'exact'; take of exact_match") if metric == "exact" else nullcontext():
            check_rewards(stage)


@pytest.mark.parametrize(
    ("algo", "rewards", "is_mentioned"),
    [
        ("maxrl", "{gsm8k=1.0, overlong=1.0}", True),
        ("maxrl", "{gsm8k=1.0, overlong=0.0}", False),
        ("grpo", "{gsm8k=1.0, overlong=1.0}", False),
    ],
)
def test_a_reward_below_zero_is_mentioned_where_it_would_end_the_run(
    algo: str, rewards: str, is_mentioned: bool, tmp_path: Path
) -> None:
    settings = (f"train.train_policy.algo='{algo}'", f"train.train_policy.reward_function={rewards}")
    notices = unique_notices(load(tmp_path, GRPO_TOML, *settings))
    assert any("below 0, which 'overlong' can give" in notice for notice in notices) == is_mentioned


def test_the_penalty_of_long_completions_has_its_defaults_in_a_validation_of_sft() -> None:
    sft = recipe({"rollout.max_response_length": 4})
    rows = {"train": [{"metadata": {}, "reference": "one two", "text": ""}]}
    groups = make_test_groups(rows, ["train"], sft.train.train_policy, None)
    with open_rewards(sft.reward_settings, {"overlong": 1.0}, lambda: None) as score:
        [scored] = score(groups)
    assert scored.scores[1].value == -3 / 4


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_a_model_that_vllm_has_no_more_is_refused_with_the_engine_that_has_it() -> None:
    config: Any = SimpleNamespace(architectures=["MllamaForConditionalGeneration"])
    with pytest.raises(ConfigError, match=r"'llama' is; set rollout\.backend = 'hf'"):
        check_engine("vllm", config, "llama")
    check_engine("hf", config, "llama")


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_heads_that_vllm_cannot_split_over_the_ranks_of_an_engine_are_refused() -> None:
    cases = ((14, 2, 4, True), (12, 2, 3, True), (12, 2, 4, False), (9, 3, 3, False))
    for heads, kv_heads, tp_size, is_refused in cases:
        config = Qwen2Config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=heads * 64)
        message = rf"^rollout.parallelism.tp_size = {tp_size}: .* {heads} attention heads and {kv_heads} key-value"
        with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
            check_engine("vllm", config, "qwen", tp_size=tp_size)
        check_engine("hf", config, "qwen", tp_size=tp_size)
