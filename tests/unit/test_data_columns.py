"""Columns that a recipe names and the rows do not have: said, and before anything else that is wrong."""

from __future__ import annotations

import json

import pytest

from cosmos_core.data.prepare import run
from cosmos_core.errors import DataError
from cosmos_core.train import check
from tests.unit.data_tokenizers import CHATML, byte_tokenizer
from tests.unit.test_data_prepare import RL_LENGTHS, make_stage, model, sft, write_rows
from tests.unit.tiny_model import save_tiny_model

__all__ = ["model"]


@pytest.mark.parametrize(("column", "told"), [("talk", "3 of 4"), ("messages", "3 of 3"), ("conversations", "")])
def test_a_named_column_that_is_not_there_is_told_and_the_usual_one_is_not(tmp_path, model, column, told):
    data = write_rows(tmp_path / "train.jsonl", 3)
    with open(data, "a") as file:
        file.write(
            json.dumps({"talk": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n"
        )
    dataset = {"name": str(data), "max_skipped_fraction": 0.5}
    policy = {"type": "sft", "conversation_column_name": column, "dataset": dataset}
    stage = make_stage(tmp_path / "s", model, {"train": {"train_policy": policy}})
    outcome = run(stage)
    notices = [notice for notice in outcome.info.get("notices", ()) if "conversation_column_name names" in notice]
    assert notices == [
        f"train: {told} rows have no column {column!r}, which train.train_policy.conversation_column_name names: "
        "they were read from another known column"
    ] * bool(told)


def test_a_named_column_of_text_beside_a_response_is_told(tmp_path, model):
    data = tmp_path / "train.jsonl"
    data.write_text('{"instruction": "Add.", "output": "3"}\n{"instruction": "Add."}\n')
    recipe = sft(data, conversation_column_name="instruction")
    assert run(make_stage(tmp_path / "s", model, recipe)).info["notices"] == [
        "train: 1 of 2 rows are learned as the text of column 'instruction' alone, and have a response in another "
        "column; leave train.train_policy.conversation_column_name out to learn that"
    ]


@pytest.mark.parametrize("policy", [{"type": "sft"}, {"type": "sft", "trainer_type": "dpo"}, {"type": "grpo"}])
def test_a_wrong_column_is_told_before_a_wrong_test_size(tmp_path, model, policy):
    data = tmp_path / "train.jsonl"
    data.write_text('{"x": "q", "y": "a"}\n' * 3)
    policy = {**policy, "dataset": {"name": str(data), "test_size": 3}}
    with pytest.raises(DataError, match=r"^train\.jsonl:1: no .* among the columns x, y"):
        run(make_stage(tmp_path / "s", model, {"train": {"train_policy": policy}, **RL_LENGTHS}))


def test_a_check_says_what_preparing_the_rows_would_say(tmp_path):
    save_tiny_model(tmp_path / "model")
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    policy = {"type": "sft", "conversation_column_name": "talk", "dataset": {"name": str(tmp_path / "train.jsonl")}}
    write_rows(tmp_path / "train.jsonl", 2)
    outcome = check.run(make_stage(tmp_path / "s", tmp_path / "model", {"train": {"train_policy": policy}}))
    assert "train: 2 of 2 rows have no column 'talk', which train.train_policy" in outcome.info["found"]
