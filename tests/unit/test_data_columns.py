"""Columns that a recipe names and the rows do not have: said, and before anything else that is wrong."""

from __future__ import annotations

import json

import pytest

from cosmos_core.config.schema.recipe import Recipe
from cosmos_core.data import quick_check
from cosmos_core.data.kinds.pairs import open_pairs
from cosmos_core.data.kinds.prompts import open_prompts
from cosmos_core.data.kinds.sequences import open_sequences
from cosmos_core.data.prepare import run
from cosmos_core.errors import DataError
from cosmos_core.run.files import read_json
from cosmos_core.train import check
from tests.unit.data_tokenizers import CHATML, byte_tokenizer, learned
from tests.unit.test_data_prepare import RL_LENGTHS, grpo, make_stage, model, sft, write_rows
from tests.unit.tiny_model import save_tiny_model

__all__ = ["model"]


@pytest.mark.parametrize(("column", "told"), [("talk", "3 of 4"), ("messages", "3 of 3"), ("conversations", "")])
def test_a_named_column_that_is_not_there_is_told_and_the_usual_one_is_not(tmp_path, model, column, told):
    data = write_rows(tmp_path / "train.jsonl", 3)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    with open(data, "a") as file:
        file.write(json.dumps({"talk": talk}) + "\n")
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


@pytest.mark.parametrize("method", [sft, grpo])
def test_a_text_that_a_template_has_rendered_before_is_told_and_plain_text_is_not(tmp_path, model, method):
    rendered = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    rows = [{"prompt": rendered, "completion": "2"}, {"prompt": "1+2?", "completion": "3", "note": "<|im_end|>"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(make_stage(tmp_path / "s", model, method(tmp_path / "a.jsonl"))).info["notices"] == [
        "train: 1 of 2 rows have the token that ends a turn in a text, which the chat template renders once more; give "
        "turns, or the words of one turn alone"
    ]
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": f"{rendered}2<|im_end|>"}) + "\n")
    assert "notices" not in run(make_stage(tmp_path / "t", model, sft(tmp_path / "b.jsonl"))).info


def test_a_reference_that_ends_like_a_turn_is_not_rendered(tmp_path, model):
    rows = [
        {"prompt": "1+1?", "answer": "2<|im_end|>"},
        {"prompt": "1+2?", "solution": [{"from": "gpt", "value": "3"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "notices" not in run(make_stage(tmp_path / "s", model, grpo(tmp_path / "a.jsonl"))).info


@pytest.mark.parametrize("policy", [{"type": "sft"}, {"type": "sft", "trainer_type": "dpo"}, {"type": "grpo"}])
def test_a_wrong_column_is_told_before_a_wrong_test_size(tmp_path, model, policy):
    data = tmp_path / "train.jsonl"
    data.write_text('{"x": "q", "y": "a"}\n' * 3)
    policy = {**policy, "dataset": {"name": str(data), "test_size": 3}}
    with pytest.raises(DataError, match=r"^train\.jsonl:1: no .* among the columns x, y"):
        run(make_stage(tmp_path / "s", model, {"train": {"train_policy": policy}, **RL_LENGTHS}))


def tiny_model(folder, **policy):
    """A model with a template, and a stage that prepares rows for steps of two."""
    save_tiny_model(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(CHATML)
    recipe = (grpo if policy.pop("is_rl", False) else sft)(folder / "rows", **policy)
    recipe["train"]["train_batch_per_replica"] = 2
    return recipe


def test_a_check_says_what_preparing_the_rows_would_say(tmp_path):
    recipe = tiny_model(tmp_path, conversation_column_name="talk")
    write_rows(tmp_path / "rows" / "train.jsonl", 2)
    outcome = check.run(make_stage(tmp_path / "s", tmp_path / "model", recipe))
    assert "train: 2 of 2 rows have no column 'talk', which train.train_policy" in outcome.info["found"]


FRAGEN = "Frage,Antwort,Quelle\nWas ist 1+1?,Es ist 2.,Buch\nWas ist 2+2?,Es ist 4.,Buch\n"


def test_columns_of_ones_own_are_a_prompt_and_its_response_whatever_else_the_row_has(tmp_path, model):
    (tmp_path / "a.csv").write_text(FRAGEN)
    others = {"text": "t", "messages": [{"role": "user", "content": "x"}], "answer": "y", "prompt": "z"}
    row = {**others, "Frage": "Was ist 1+1?", "Antwort": "Es ist 2."}
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    for name in ("a.csv", "b.jsonl"):
        recipe = sft(tmp_path / name, prompt_column_name="Frage", response_column_name="Antwort")
        run(make_stage(tmp_path / "s", model, recipe))
        ids, mask = open_sequences(tmp_path / "s" / "data", "train")[0]
        tokenizer = byte_tokenizer(CHATML)
        assert learned(tokenizer, ids.tolist(), mask.tolist()) == ["Es ist 2.<|im_end|>"]
        assert "<|im_start|>user\nWas ist 1+1?<|im_end|>" in tokenizer.decode(ids)
        said = read_json(tmp_path / "s" / "data" / "statistics.json")["train"]
        assert said["unread_columns"] == (["Quelle"] if name == "a.csv" else sorted(others))


def test_rewards_of_held_out_rows_see_all_columns_beside_the_two_that_are_learned(tmp_path, model):
    row = {"problem": "1+1?", "thoughts": "It is 2.", "answer": "2", "level": 3}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 4)
    names = {"prompt_column_name": "problem", "response_column_name": "thoughts", "dataset": {"test_size": 1}}
    validation = {"enable": True, "reward_function": "exact_match"}
    run(make_stage(tmp_path / "s", model, {**sft(tmp_path / "a.jsonl", **names), "validation": validation}))
    [prompt] = open_prompts(tmp_path / "s" / "data", "validation")
    assert prompt.metadata == {**row, "prompt": "1+1?", "response": "It is 2."}


def test_columns_of_ones_own_are_a_pair_of_responses(tmp_path, model):
    row = {"Frage": "Was?", "gut": "Ja.", "schlecht": "Nein.", "chosen": "x", "prompt": "y", "rejected": "z"}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    names = {"prompt_column_name": "Frage", "chosen_column_name": "gut", "rejected_column_name": "schlecht"}
    run(make_stage(tmp_path / "s", model, sft(tmp_path / "a.jsonl", trainer_type="dpo", **names)))
    pairs, tokenizer = open_pairs(tmp_path / "s" / "data", "train"), byte_tokenizer(CHATML)
    found = [learned(tokenizer, *(each.tolist() for each in rows[0])) for rows in (pairs.chosen, pairs.rejected)]
    assert found == [["Ja.<|im_end|>"], ["Nein.<|im_end|>"]]
    assert "user\nWas?<|im_end|>" in tokenizer.decode(pairs.chosen[0][0])


@pytest.mark.parametrize(
    ("policy", "told"),
    [
        ({"prompt_column_name": "q"}, "name both columns, or neither"),
        ({"prompt_column_name": "q", "response_column_name": "a", "conversation_column_name": "c"}, "leave one out"),
        ({"trainer_type": "dpo", "prompt_column_name": "q", "conversation_column_name": "c"}, "leave one out"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(policy, told):
    with pytest.raises(ValueError, match=told):
        Recipe.model_validate(sft("a.csv", **policy))


def test_a_column_that_is_named_and_missing_is_told_by_the_first_look_and_by_preparing(tmp_path, model):
    (tmp_path / "a.csv").write_text(FRAGEN)
    recipe = sft(tmp_path / "a.csv", prompt_column_name="Frage", response_column_name="Antwort ")
    for program in (quick_check.run, run):
        message = r"a\.csv:2: no column 'Antwort ', which the recipe names; the row has Frage"
        with pytest.raises(DataError, match=message):
            program(make_stage(tmp_path / "s", model, recipe))


def test_a_check_names_the_columns_that_nothing_reads_and_rows_of_plain_text(tmp_path):
    recipe = tiny_model(tmp_path, conversation_column_name="Frage")
    (tmp_path / "rows").mkdir()
    numbered = "".join(f",{line}\n" for line in FRAGEN.splitlines())  # as pandas writes its index
    (tmp_path / "rows" / "train.csv").write_text(numbered.replace("\n,", "\n7,"))
    found = check.run(make_stage(tmp_path / "s", tmp_path / "model", recipe)).info["found"]
    assert "100% of them learned, 2 rows of plain text in which no token is masked" in found
    assert "columns that nothing reads: (unnamed), Antwort, Quelle" in found
    line = '{"messages": [{"role": "user", "content": "q"}], "prompt": "p", "answer": "a"}\n'
    (tmp_path / "rows" / "train.csv").unlink()
    (tmp_path / "rows" / "train.jsonl").write_text(line * 2)
    recipe = tiny_model(tmp_path, is_rl=True)
    found = check.run(make_stage(tmp_path / "t", tmp_path / "model", recipe)).info["found"]
    assert "columns that only rewards can read: messages" in found


@pytest.mark.parametrize(
    "policy", [{"is_rl": True, "bypass_reward": True, "reward_function": "exact_match"}, {"is_rl": False}]
)
def test_a_check_knows_that_the_rewards_of_validation_read_columns(tmp_path, policy):
    recipe = tiny_model(tmp_path, **policy)
    for name in ("rows", "held-out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"prompt": "p", "answer": "a", "level": 1}\n' * 2)
    rewards = {} if policy["is_rl"] else {"reward_function": "exact_match"}
    recipe["validation"] = {"enable": True, "dataset": {"name": str(tmp_path / "held-out")}, **rewards}
    found = check.run(make_stage(tmp_path / "s", tmp_path / "model", recipe)).info["found"]
    assert "columns that nothing reads: level; validation" in found
    assert "columns that only rewards can read: level" in found


def test_a_test_size_leaves_the_reading_of_rows_to_a_data_packer(tmp_path, model):
    (tmp_path / "packer.py").write_text(
        "class Packer:\n    def sft_process_sample(self, row):\n"
        "        return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"{i}", "a": "4"}) + "\n" for i in range(6)))
    dataset = {"name": str(tmp_path / "rows.jsonl"), "test_size": 2}
    policy = {"type": "sft", "data_packer": f"{tmp_path}/packer.py:Packer", "dataset": dataset}
    outcome = run(make_stage(tmp_path / "s", model, {"train": {"train_policy": policy}}))
    assert (outcome.metrics["data/train_rows"], outcome.metrics["data/validation_rows"]) == (4.0, 2.0)


def test_a_first_row_that_cannot_be_read_is_skipped_with_a_test_size_too(tmp_path, model):
    turns = [{"role": "boss", "content": "q"}, {"role": "assistant", "content": "a"}]
    good = [{**turns[0], "role": "user"}, turns[1]]
    rows = [{"messages": turns}, *[{"messages": good}] * 9]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = {"name": str(tmp_path / "rows.jsonl"), "test_size": 2, "max_skipped_fraction": 0.9}
    outcome = run(make_stage(tmp_path / "s", model, {"train": {"train_policy": {"type": "sft", "dataset": dataset}}}))
    assert outcome.metrics["data/train_rows"] + outcome.metrics["data/validation_rows"] == 9.0
