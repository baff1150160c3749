"""Preference rows as pairs of token sequences: which forms are understood, what is learned, what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cosmos_core.data.kinds.pairs import PreferencePairs, open_pairs
from cosmos_core.data.messages import SkippedRow
from cosmos_core.data.preferences import read_preference
from cosmos_core.data.prepare import run
from cosmos_core.errors import DataError, ModelError
from cosmos_core.run.files import read_json
from cosmos_core.run.stage import Stage
from tests.effects.change import SFT, recipe, stage_of
from tests.unit.data_tokenizers import CHATML, FORGETS_THOUGHTS, LLAMA3, MISTRAL, byte_tokenizer, learned, unlearned

Row = dict[str, Any]
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "mistral": MISTRAL, "forgets thoughts": FORGETS_THOUGHTS}


def user(content: str) -> Row:
    return {"role": "user", "content": content}


def assistant(content: str) -> Row:
    return {"role": "assistant", "content": content}


def stage(path: Path, rows: list[Row], template: str = CHATML, **policy: Any) -> Stage:
    byte_tokenizer(template).save_pretrained(path / "model")
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        **SFT, "train.train_policy.trainer_type": "dpo", "train.train_policy.dataset.name": str(path / "rows.jsonl"),
        "policy.model_max_length": 64, **{f"train.train_policy.{key}": value for key, value in policy.items()},
    }  # fmt: skip
    return stage_of(path / "prepare", recipe(settings), kind="prepare", model=path / "model")


def pairs_of(path: Path, rows: list[Row], template: str = CHATML, **policy: Any) -> PreferencePairs:
    made = stage(path, rows, template, **policy)
    run(made)
    return open_pairs(made.path / "data", "train")


def answers(pairs: PreferencePairs, template: str = CHATML) -> list[list[str]]:
    """Of each pair what is learned of the chosen and of the rejected sequence, each in one run."""
    tokenizer = byte_tokenizer(template)
    found = []
    for i in range(len(pairs)):
        runs = [learned(tokenizer, ids.tolist(), mask.tolist()) for ids, mask in (pairs.chosen[i], pairs.rejected[i])]
        assert all(len(run) == 1 for run in runs)
        found.append([run[0] for run in runs])
    return found


FORMS: dict[str, Row] = {
    "texts": {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
    "turns": {"prompt": [user("2+2?")], "chosen": [assistant("4")], "rejected": [assistant("5")]},
    "a prompt of turns, answers as texts": {"prompt": [user("2+2?")], "chosen": "4", "rejected": "5"},
    "the prompt in the answers": {"chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")]},
    "the prompt in the answers and beside them": {
        "prompt": "2+2?", "chosen": [user("2+2?"), assistant("4")], "rejected": [user("2+2?"), assistant("5")],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "2+2?"}], "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "other columns": {"question": "2+2?", "chosen": "4", "rejected": "5"},
    "LLaMA-Factory, in one column": {"instruction": "2+2?", "input": "", "output": ["4", "5"]},
    "Argilla": {"input": "2+2?", "chosen": "4", "rejected": "5"},
    "ms-swift": {"messages": [user("2+2?"), assistant("4")], "rejected_response": "5"},
    "ms-swift, two conversations": {
        "messages": [user("2+2?"), assistant("4")], "rejected_messages": [user("2+2?"), assistant("5")],
    },
    "ms-swift, texts": {"query": "2+2?", "response": "4", "rejected_response": "5"},
    "turns and their answers": {"messages": [user("2+2?")], "chosen": [assistant("4")], "rejected": "5"},
    "a file of several forms": {"prompt": "", "messages": [], "question": "2+2?", "chosen": "4", "rejected": "5"},
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_a_row_gives_the_same_pair(tmp_path: Path, name: str) -> None:
    pairs = pairs_of(tmp_path, [*FORMS.values()], TEMPLATES[name])
    for sequences in (pairs.chosen, pairs.rejected):
        found = {form: [part.tolist() for part in sequences[i]] for i, form in enumerate(FORMS)}
        assert found == dict.fromkeys(FORMS, found["texts"])
    chosen, rejected = answers(pairs, TEMPLATES[name])[0]
    assert "4" in chosen and "5" not in chosen and "5" in rejected and "2+2" not in chosen + rejected


@pytest.mark.parametrize("template", [CHATML, ""])
def test_a_prompt_that_plain_texts_repeat_is_learned_once_and_a_greeting_is_none(tmp_path: Path, template: str) -> None:
    head = "\n\nHuman: 2+2?\n\nAssistant:"
    rows = [
        {"prompt": head, "chosen": f"{head} 4.", "rejected": f"{head} Five."},
        {"prompt": "Hi", "chosen": "Hi!", "rejected": "Hide."},
    ]
    pairs = pairs_of(tmp_path, rows, template)
    assert byte_tokenizer(template).decode(pairs.chosen[0][0]).count("Human") == 1
    found = [[text.removesuffix("<|im_end|>").strip() for text in texts] for texts in answers(pairs, template)]
    assert found == [["4.", "Five."], ["Hi!", "Hide."]]


def test_a_system_prompt_without_a_chat_template_is_refused_and_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no chat template; set policy\.chat_template"):
        pairs_of(tmp_path, [{"prompt": "p", "chosen": "a", "rejected": "b"}], "", system_prompt="Be brief.")


def test_an_answer_is_learned_with_its_end_and_earlier_answers_are_not(tmp_path: Path) -> None:
    said = [user("hi"), assistant("Hello."), user("2+2?")]
    rows = [{"chosen": [*said, assistant("It is 4.")], "rejected": [*said, assistant("5")]}]
    pairs = pairs_of(tmp_path, rows, system_prompt="Add.")
    assert answers(pairs) == [["It is 4.<|im_end|>", "5<|im_end|>"]]
    ids, mask = pairs.chosen[0]
    head, _ = unlearned(byte_tokenizer(CHATML), ids.tolist(), mask.tolist())
    assert head == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_of_several_turns_is_learned_whole(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2?", "chosen": [assistant("4"), user("sure?"), assistant("Yes.")], "rejected": "5"}]
    pairs = pairs_of(tmp_path, rows)
    ids, mask = pairs.chosen[0]
    assert learned(byte_tokenizer(CHATML), ids.tolist(), mask.tolist()) == ["4<|im_end|>", "Yes.<|im_end|>"]


def test_plain_texts_share_their_beginning_and_end_with_the_end_token(tmp_path: Path) -> None:
    head = "\n\nHuman: 2+2?\n\nAssistant: "
    pairs = pairs_of(tmp_path, [{"chosen": f"{head}4.", "rejected": f"{head}Five."}])
    tokenizer = byte_tokenizer(CHATML)
    for (ids, mask), text in ((pairs.chosen[0], "4."), (pairs.rejected[0], "Five.")):
        assert tokenizer.decode(ids.tolist()) == f"{head}{text}<|im_end|>"
        assert "".join(learned(tokenizer, ids.tolist(), mask.tolist())).strip() == f"{text}<|im_end|>"


def test_plain_texts_beside_an_empty_prompt_have_none(tmp_path: Path) -> None:
    rows = [{"prompt": empty, "chosen": "it is 4", "rejected": "it is 5"} for empty in (None, "")]
    rows.append({"prompt": "2+2?", "chosen": "it is 4", "rejected": "it is 5"})
    made = stage(tmp_path, rows, **{"dataset.max_skipped_fraction": 1.0})
    run(made)
    assert len(open_pairs(made.path / "data", "train").chosen) == 1


def test_long_answers_are_cut_and_the_pair_is_counted_once(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "c" * 90, "rejected": "r"}, {"prompt": "p", "chosen": "a", "rejected": "b"}]
    made = stage(tmp_path, rows)
    run(made)
    pairs = open_pairs(made.path / "data", "train")
    assert len(pairs.chosen[0][0]) == 64 > len(pairs.rejected[0][0])
    said = read_json(made.path / "data" / "statistics.json")["train"]
    lengths = [len(rows[i][0]) for i in range(2) for rows in (pairs.chosen, pairs.rejected)]
    labels = sum(int(rows[i][1].sum()) for i in range(2) for rows in (pairs.chosen, pairs.rejected))
    counts = {"kind": "pairs", "rows": 2, "truncated_rows": 1, "tokens": sum(lengths), "label_tokens": labels}
    assert {name: said[name] for name in counts} == counts
    assert said["length"]["max"] == lengths[0] + lengths[1]


def test_pairs_with_nothing_to_compare_are_counted_by_reason_with_the_first_place(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
        {"prompt": "p", "chosen": "a", "rejected": " "},
        {"chosen": [user("p"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        {"prompt": " ", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "x" * 80 + "a", "rejected": "x" * 80 + "b"},
        {"chosen": [user("p"), assistant("a")], "rejected": [user("p"), assistant("a")]},
        {"prompt": "p", "chosen": "a", "rejected": "b\ud800"},
    ]
    made = stage(tmp_path, rows)
    outcome = run(made)
    assert (outcome.metrics["data/train_rows"], outcome.metrics["data/train_skipped_rows"]) == (1, 7)
    assert read_json(made.path / "data" / "statistics.json")["train"]["skipped"] == {
        "with equal chosen and rejected": {"rows": 2, "first": "rows.jsonl:2"},
        "with an empty answer": {"rows": 1, "first": "rows.jsonl:3"},
        "whose chosen and rejected answer different prompts": {"rows": 1, "first": "rows.jsonl:4"},
        "without a prompt": {"rows": 1, "first": "rows.jsonl:5"},
        "with equal chosen and rejected up to policy.model_max_length": {"rows": 1, "first": "rows.jsonl:6"},
        "with half a character (a lone surrogate)": {"rows": 1, "first": "rows.jsonl:8"},
    }


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "no 'rejected' among the columns prompt, chosen"),
        ({"prompt": "p", "chosen": None, "rejected": "b"}, "no 'chosen' among"),
        ({"chosen": "a", "rejected": "b"}, "begin differently, and there is no column `prompt`"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "no prompt among the columns chosen, rejected"),
        ({"prompt": [user("p"), assistant("a")], "chosen": "a", "rejected": "b"}, "ends with an assistant turn"),
        (
            {"prompt": "p", "chosen": [user("other"), assistant("a")], "rejected": [user("other"), assistant("b")]},
            "column 'prompt' says 'p' and `chosen` begins with 'other'; give one prompt",
        ),
        ({"prompt": "p", "chosen": [{**assistant("a"), "weight": 0}], "rejected": "b"}, "weight = 0 in `chosen` or"),
        ({"prompt": "p", "chosen": 4, "rejected": "b"}, "column 'chosen' holds '4'"),
        ({"prompt": "p", "chosen": [{"role": "robot", "content": "a"}], "rejected": "b"}, "unknown role 'robot'"),
    ],
)  # fmt: skip
def test_a_row_of_a_wrong_form_is_an_error_that_names_its_line(row: Row, message: str) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as caught:
        read_preference(row, "rows.jsonl:2")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not isinstance(caught.value, SkippedRow)


def test_a_system_turn_that_both_completions_begin_with_stands_before_the_prompt_of_a_column() -> None:
    system = {"role": "system", "content": "s"}
    row = {"prompt": "p", "chosen": [system, assistant("a")], "rejected": [system, assistant("b")]}
    assert read_preference(row, "x") == ([system, user("p")], [assistant("a")], [assistant("b")])


def test_the_named_column_is_the_prompt() -> None:
    row = {"prompt": "p", "ask": "q", "chosen": "a", "rejected": "b"}
    assert read_preference(row, "x", "ask").prompt == [user("q")]
    assert read_preference(row, "x").prompt == [user("p")]


def test_an_input_is_the_prompt_although_both_texts_begin_alike() -> None:
    row = {"system": "s", "input": "p", "chosen": "The answer is 4", "rejected": "The answer is 5"}
    chosen, rejected = [assistant(row["chosen"])], [assistant(row["rejected"])]
    assert read_preference(row, "x") == ([{"role": "system", "content": "s"}, user("p")], chosen, rejected)


@pytest.mark.parametrize("rejected", ["No idea.", [assistant("No idea.")]])
def test_a_rejected_response_of_ms_swift_replaces_all_that_follows_the_last_turn_of_the_user(rejected: Any) -> None:
    said = [user("hi"), assistant("Hello."), user("2+2?")]
    call = {"name": "add", "arguments": {"a": 2, "b": 2}}
    calls = [{"role": "tool_call", "content": json.dumps(call)}, {"role": "tool_response", "content": "4"}]
    row = {"messages": [*said, *calls, assistant("It is 4.")], "rejected_response": rejected}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    chosen = [calling, {"role": "tool", "content": "4"}, assistant("It is 4.")]
    assert read_preference(row, "x") == (said, chosen, [assistant("No idea.")])
    system = {"role": "system", "content": "Say hello."}
    without_user = {"messages": [system, assistant("Hello.")], "rejected_response": rejected}
    assert read_preference(without_user, "x") == ([system], [assistant("Hello.")], [assistant("No idea.")])


def test_nothing_that_is_said_before_a_completion_is_left_out() -> None:
    system, earlier = {"role": "system", "content": "s"}, [user("hi"), assistant("Hello.")]
    both = {"chosen": [user("p "), assistant("a")], "rejected": [user("p "), assistant("b")]}

    def prompt(row: Row) -> Any:
        found = read_preference(row, "x", system_prompt="of the recipe")
        assert (found.chosen, found.rejected) == ([assistant("a")], [assistant("b")])
        return found.prompt

    assert prompt({"prompt": [system, user("p")], **both}) == [system, user("p")]
    assert prompt({"prompt": [system, *earlier, user("p")], **both}) == [system, *earlier, user("p")]
    longer = {name: [system, *earlier, *turns] for name, turns in both.items()}
    assert prompt({"prompt": "p", **longer}) == prompt({"prompt": "hi", **longer}) == [system, *earlier, user("p ")]
    assert prompt({"prompt": " ", **both}) == prompt(both) == [{**system, "content": "of the recipe"}, user("p ")]
    text = {"chosen": "a", "rejected": "b"}
    assert prompt({"system": "s", "question": "p", **text}) == [system, user("p")]
    assert prompt({"instruction": "p", "input": "x", **text})[1:] == [user("p\n\nx")]
