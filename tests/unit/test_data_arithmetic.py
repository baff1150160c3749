"""The demo's world: it loads as a real model does, its sums are right, and the seed decides every byte."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.demo.arithmetic import make
from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data.conversation import tokenise_conversation
from cosmos_core.errors import ConfigError
from cosmos_core.run.files import list_files_below, sha256
from cosmos_core.run.stage import Stage
from tests.effects.change import stage_of
from tests.unit.data_tokenizers import learned


def stage_at(path) -> Stage:
    return stage_of(path, Recipe(), kind="custom")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sums_are_right_disjoint_and_of_the_asked_size(tmp_path):
    outcome = make(stage_at(tmp_path / "make"), train_rows=300, heldout_rows=20)
    train, heldout = (read(tmp_path / "make" / "data" / f"{name}.jsonl") for name in ("train", "validation"))
    assert (len(train), len(heldout)) == (300, 20)
    for row in train + heldout:
        left, right = row["question"].removesuffix("=").split("+")
        assert len(left) == len(right) == 2 and row["answer"] == str(int(left) + int(right))
        assert [turn["content"] for turn in row["messages"]] == [row["question"], row["answer"]]
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}
    assert len({row["question"] for row in train}) == 300
    assert outcome.info == {"model": "model", "data": "data"} and outcome.outputs == ("model", "data")


def test_more_rows_than_sums_repeat_the_training_sums_only(tmp_path):
    make(stage_at(tmp_path / "make"), train_rows=200, heldout_rows=11, digits=1, hidden_size=8, layers=1)
    train = [row["question"] for row in read(tmp_path / "make" / "data" / "train.jsonl")]
    heldout = {row["question"] for row in read(tmp_path / "make" / "data" / "validation.jsonl")}
    assert len(set(train)) == 70 and train[:70] == train[70:140] and not heldout & set(train)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(tmp_path):
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(3)  # the state of the global generator must not matter, nor change
        before = torch.get_rng_state()
        make(stage_at(tmp_path / name), train_rows=50, heldout_rows=5, seed=seed)
        assert torch.equal(before, torch.get_rng_state())
        root = tmp_path / name
        digests.append(
            {str(f.relative_to(root)): sha256(f) for f in list_files_below(root) if f.name != "progress.json"}
        )
    assert digests[0] == digests[1]
    changed = {name for name in digests[0] if digests[0][name] != digests[2][name]}
    assert changed == {"model/model.safetensors", "data/train.jsonl", "data/validation.jsonl"}


def test_model_and_tokenizer_load_with_the_auto_classes_and_fit_each_other(tmp_path):
    make(stage_at(tmp_path / "make"), train_rows=5, heldout_rows=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "make" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "make" / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert 400_000 < sum(p.numel() for p in model.parameters()) < 500_000
    assert model.config.vocab_size == len(tokenizer) and model.config.eos_token_id == tokenizer.eos_token_id
    text = "system: 12+34=46, it's user's\nassistant? <|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    turns = [{"role": "user", "content": "47+38="}, {"role": "assistant", "content": "85"}]
    ids, mask = tokenise_conversation(tokenizer, turns, "row")
    assert learned(tokenizer, ids, mask) == ["85<|im_end|>"]
    assert tokenizer.decode(ids) == "<|im_start|>user\n47+38=<|im_end|>\n<|im_start|>assistant\n85<|im_end|>\n"
    assert len(ids) == 18


def test_impossible_arguments_are_configuration_errors(tmp_path):
    with pytest.raises(ConfigError, match="heldout_rows = 81 must be below the 81 sums of 1-digit numbers"):
        make(stage_at(tmp_path / "a"), heldout_rows=81, digits=1)
    with pytest.raises(ConfigError, match="hidden_size = 100 must be a multiple of 8"):
        make(stage_at(tmp_path / "b"), hidden_size=100)
