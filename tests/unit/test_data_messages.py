"""Rows of every known form become the same turns, and wrong ones an error that names the row."""

from __future__ import annotations

import json
import pickle
from datetime import date
from decimal import Decimal

import numpy as np
import pytest

from cosmos_core.data.media_rows import find_reference_response
from cosmos_core.data.messages import (
    ColumnTrackingRow,
    SkippedRow,
    get_turn_texts,
    propose_merged_turns,
    read_conversation,
    read_held_out_prompt,
    read_plain_texts,
    read_prompt,
)
from cosmos_core.data.preferences import read_preference
from cosmos_core.data.tool_calls import read_tools
from cosmos_core.errors import DataError

ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "be brief"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED]},
        {"conversation": SHAREGPT},
        {"messages": str([ASKED, ANSWERED])},  # as pandas writes a list to CSV
        {"messages": str(np.array([ASKED, ANSWERED]))},  # as pandas writes what it has read from parquet
        {"instruction": "", "input": "q", "output": "a"},
        {"conversations": SHAREGPT},
        {"system": "", "conversation": [{"assistant": "a", "human": "q"}]},
        {"mine": [ASKED, ANSWERED], "messages": [ASKED]},
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [ASKED], "completion": [ASKED, ANSWERED]},
        {"instruction": "q", "output": "a", "history": []},
        {"question": "q", "answer": "a"},
        {"question": "q", "response": "a"},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "context": None, "response": "a", "category": "open_qa"},
        {"input": "q", "output": "a"},
        {"prompt": "q", "answer": "a"},
        {"messages": None, "question": "q", "answer": "a"},
        {"mine": "", "text": " ", "messages": [], "prompt": "", "completion": "b", "question": "q", "answer": "a"},
        {"messages": [{"role": "user", "value": "q"}, {"from": "gpt", "content": "a"}]},
        {"messages": [ASKED, {**ANSWERED, "content": [{"type": "output_text", "text": "a"}]}]},
        {"messages": [{**ASKED, "tool_calls": None}, {**ANSWERED, "content": [{"type": "text", "text": "a"}]}]},
        {"messages": [{"role": "user", "content": "q", "from": None}, {"role": None, "from": "gpt", "value": "a"}]},
    ],
)
def test_known_forms_become_the_same_turns(row):
    assert read_conversation(row, "row", "mine") == [ASKED, ANSWERED]


def test_what_an_instruction_is_about_stands_behind_it():
    asked = {"role": "user", "content": "Add.\n\n1 2"}
    for name in ("input", "context"):
        row = {"instruction": "Add.", name: "1 2"}
        assert read_conversation({**row, "output": "a"}, "row") == [asked, ANSWERED]
        assert read_prompt(row, "row", "instruction") == ([asked], "")
        named = ColumnTrackingRow({**row, "output": "a"}, {"prompt": "instruction", "response": "output"}, "row")
        assert read_plain_texts(named, "rows:1", ("prompt",), ("response",)) == ["Add.\n\n1 2", "a"]
        assert (read_conversation(named, "row"), named.unread_columns) == ([asked, ANSWERED], [])


def test_a_system_column_without_text_is_not_read():
    row = ColumnTrackingRow({"system": ["S"], "instruction": "q", "input": [], "output": "a"}, {}, "row")
    assert (read_conversation(row, "row"), row.unread_columns) == ([ASKED, ANSWERED], ["system"])


@pytest.mark.parametrize("context", [["a document"], {}, {"title": None}])
def test_what_only_a_reward_reads_beside_an_instruction_is_no_error_and_counts_as_unread(context):
    row = ColumnTrackingRow({"instruction": "q", "context": context, "output": "a"}, {}, "row")
    assert (read_conversation(row, "row"), row.unread_columns) == ([ASKED, ANSWERED], ["context"])
    prompt = ColumnTrackingRow({"instruction": "q", "context": context}, {"prompt": "instruction"}, "row")
    assert read_prompt(prompt, "row", "prompt") == ([ASKED], "")


def test_the_history_of_an_instruction_precedes_it_and_repeated_turns_are_read_once():
    said = say("u:1", "a:2", "u:q", "a:a")
    for history in ([["1", "2"]], '[["1", "2"]]'):
        row = {"instruction": "q", "history": history}
        assert read_conversation({**row, "output": "a"}, "row") == said
        assert read_prompt(row, "row", "instruction") == (said[:3], "")
    for history in ("1", ["1"], [["1"]], {"1": "2"}, 7):
        with pytest.raises(DataError, match=r"^row: .*history"):
            read_conversation({"instruction": "q", "history": history, "output": "a"}, "row")
    with pytest.raises(DataError, match=r"^row: content '3' is not text"):
        read_conversation({"instruction": "q", "history": [[3, "2"]], "output": "a"}, "row")
    unlearned = [said[0], {**said[1], "weight": 0}, *said[2:]]
    for repeated in (0, 2, 3):
        assert read_conversation({"prompt": said[:3], "completion": said[repeated:]}, "row") == unlearned
    assert read_conversation({"prompt": said[:1], "completion": said[1:]}, "row") == said


@pytest.mark.parametrize("column", ["system", "system_prompt"])
def test_a_column_for_the_system_is_its_turn_unless_there_is_one(column):
    said, own = {column: "be brief"}, {"role": "system", "content": "own"}
    for row in ({"conversations": SHAREGPT}, {"messages": [ASKED, ANSWERED]}, {"question": "q", "response": "a"}):
        assert read_conversation({**row, **said}, "row", "", "of the recipe") == [SYSTEM, ASKED, ANSWERED]
    assert read_prompt({"prompt": "q", "answer": "a", **said}, "row", "", "", "of the recipe") == ([SYSTEM, ASKED], "a")
    owned = {"messages": [own, ASKED, ANSWERED], **said}
    assert read_conversation(owned, "row", "", "of the recipe") == owned["messages"]
    assert read_conversation({"messages": [ASKED, ANSWERED], column: " "}, "row", "", "be brief")[0] == SYSTEM


def test_an_unknown_pair_is_not_told_to_name_one_column():
    with pytest.raises(DataError) as caught:
        read_conversation({"task": "q", "output": "a"}, "row")
    assert str(caught.value) == (
        "row: no conversation among the columns task, output; set train.train_policy.prompt_column_name "
        "and response_column_name"
    )


@pytest.mark.parametrize("turn", [{**ANSWERED, "weight": 0.5}, {"from": "gpt", "value": "a", "weight": "0"}])
def test_a_turn_is_learned_or_not(turn):
    with pytest.raises(DataError, match=r"^row, turn 2 of 'messages': weight = 0.*; a turn is learned \(1\) or not"):
        read_conversation({"messages": [ASKED, turn]}, "row")


def test_a_missing_input_of_a_table_is_no_number():
    row = {"instruction": "Double 5.", "input": float("nan"), "output": "10"}
    assert [turn["content"] for turn in read_conversation(row, "row")] == ["Double 5.", "10"]


def test_what_a_template_may_read_beside_role_and_content_is_kept():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert read_conversation({"messages": [ASKED, call]}, "row")[1] == {**call, "content": ""}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [ASKED, {"from": "claude", "value": "x"}]}, "a.jsonl:4, turn 2 of 'messages': unknown role 'cla"),
        ({"messages": ["hi"]}, "a.jsonl:4, turn 1 of 'messages': 'hi' is not a turn"),
        ({"messages": {"role": "user"}}, "a.jsonl:4: column 'messages' holds .* write text, or a list of turns"),
        ({"prompt": "q", "answer": 4}, "a.jsonl:4: column 'answer' holds '4'; write text"),
        (
            {"instruction": "Double it.", "input": 5, "output": "10"},
            "a.jsonl:4: column 'input' holds '5'; write it as text",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, "turn 1 of 'messages': content '3' is not text; write it as"),
        ({"messages": [{"role": None, "content": "x"}]}, "unknown role None; known"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content .* is not text"),
        *[
            ({"messages": [{"role": "user", "content": [{"type": kind, "text": ""}]}]}, "content .* is not text")
            for kind in ("image", "video", "reasoning", "audio")
        ],
        *[
            (
                {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": calls}]},
                "turn 2 of 'messages': tool_calls holds .*; write a list",
            )
            for calls in ("f(x)", '{"name": "f"}', {}, ["f"])
        ],
        ({"prompt": "q", "label": 1}, "a.jsonl:4: no conversation among the columns prompt, label; set train"),
        ({"prompt": None, "answer": ""}, r"4: no .* columns prompt \(null\), answer; fill the null, or set train"),
    ],
)
def test_a_row_that_is_no_conversation_is_an_error_that_names_it(row, message):
    with pytest.raises(DataError, match=message):
        read_conversation(row, "a.jsonl:4")


@pytest.mark.parametrize("row", [{"messages": []}, {"text": ""}, {"text": " \n"}])
def test_a_row_that_holds_nothing_is_skipped(row):
    with pytest.raises(SkippedRow, match=r"a\.jsonl:4: skipped, empty"):
        read_conversation(row, "a.jsonl:4")


def test_a_skipped_row_travels_between_processes():
    error = pickle.loads(pickle.dumps(SkippedRow("a.jsonl:4", "empty")))
    assert (str(error), error.reason) == ("a.jsonl:4: skipped, empty", "empty")


@pytest.mark.parametrize("mark", ["<image>\nWhat is this?", "What is this?\n<image>", " <video> "])
def test_a_turn_that_shows_an_image_is_an_error_that_says_what_this_version_learns_from(mark):
    row = {"image": "a.jpg", "conversations": [{"from": "human", "value": mark}, SHAREGPT[1]]}
    message = r"turn 1 of 'conversations': the turn shows an (image|video), and this version"
    with pytest.raises(DataError, match=message):
        read_conversation(row, "a.jsonl:4")
    with pytest.raises(DataError, match=r"a\.jsonl:4: the turn shows"):
        read_prompt({"prompt": mark}, "a.jsonl:4")


def test_an_image_mark_inside_a_sentence_is_a_word():
    turns = [{"role": "user", "content": "What is the <image> tag for?"}, ANSWERED]
    assert read_conversation({"messages": turns}, "row") == turns


def test_a_conversation_may_be_json_in_a_string_but_plain_text_stays_text():
    turns = json.dumps(SHAREGPT)
    assert read_conversation({"conversations": turns}, "row") == [ASKED, ANSWERED]
    assert read_prompt({"prompt": json.dumps([ASKED])}, "row") == ([ASKED], "")
    assert read_conversation({"text": turns}, "row") == turns
    assert read_conversation({"conversations": "[{not JSON"}, "row") == "[{not JSON"
    for cut in (turns[:-9], "[{'role': 'user', 'content': 'What is", '[{"role": "user"}]'):
        with pytest.raises(DataError, match=r"^row: turns that end with .* cannot be decoded, spreadsheets cut a cell"):
            read_conversation({"conversations": cut}, "row")
        with pytest.raises(DataError, match="cannot be decoded"):
            read_preference({"prompt": "q", "chosen": cut, "rejected": cut[:-1]}, "row")
    for text in ('[{"x": 1}]', '[{"name": "Ada", "role": "engineer"}]', '[{"from": "Rome", "to": "Oslo"}]'):
        answer = {"role": "assistant", "content": text}
        assert read_conversation({"prompt": "q", "response": text}, "row") == [ASKED, answer]


def say(*turns):
    """`u:hi` as a turn of the user."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


@pytest.mark.parametrize(
    ("turns", "merged", "folded"),
    [
        (["u:1", "u:2", "a:3", "a:4"], ["u:1\n\n2", "a:3\n\n4"], ["u:1\n\n2", "a:3\n\n4"]),
        (["s:x", "u:1", "a:2"], ["s:x", "u:1", "a:2"], ["u:x\n\n1", "a:2"]),
        (["s:x", "s:y", "u:1", "a:2"], ["s:x\n\ny", "u:1", "a:2"], ["u:x\n\ny\n\n1", "a:2"]),
        (["u:1", "a:2", "s:x", "u:3"], ["u:1", "a:2", "s:x", "u:3"], ["u:1", "a:2", "u:x\n\n3"]),
        (["u:1", "t:2", "t:3"], ["u:1", "t:2", "t:3"], ["u:1", "t:2", "t:3"]),
    ],
)
def test_turns_are_put_together_so_that_roles_alternate(turns, merged, folded):
    before = say(*turns)
    assert list(propose_merged_turns(before)) == [say(*merged), say(*folded)]
    assert before == say(*turns)


def test_a_turn_with_more_than_words_is_not_put_together():
    call = {"role": "assistant", "content": "", "tool_calls": [{}]}
    assert next(propose_merged_turns([call, *say("a:1")])) == [call, *say("a:1")]


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"prompt": "q", "answer": "a"}, "a"),
        ({"question": "q", "solution": 7}, "7"),
        ({"problem": "q", "result": ["x", "é"]}, '["x", "é"]'),
        ({"prompt": [ASKED], "response": "a"}, "a"),
        ({"conversations": SHAREGPT}, "a"),
        ({"messages": [ASKED, ANSWERED], "answer": "b"}, "b"),
        ({"prompt": "q"}, ""),
        ({"query": "q", "ground_truth": "7"}, "7"),
        ({"prompt": "", "messages": [], "question": "q", "answer": "", "solution": "7"}, "7"),
        ({"prompt": [ASKED], "reward_model": {"style": "rule", "ground_truth": "7"}}, "7"),
        ({"prompt": [ASKED], "reward_model": {"ground_truth": ["x"]}, "answer": None}, '["x"]'),
        ({"prompt": [ASKED], "reward_model": "rm-7b", "": "0"}, ""),
    ],
)
def test_prompts_and_references_are_found_in_the_documented_columns(row, reference):
    assert read_prompt(row, "row") == ([ASKED], reference)


def test_named_columns_win_and_the_system_prompt_is_put_first():
    row = {"prompt": "no", "answer": "no", "mine": "q", "gold": "a"}
    assert read_prompt(row, "row", "mine", "gold", "be brief") == ([SYSTEM, ASKED], "a")


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"prompt": "q"}, ("mine", ""), r"r: no column 'mine' \(train_policy.prompt_column_name\); the row has prompt"),
        ({"prompt": "q"}, ("", "gold"), r"r: no column 'gold' \(train_policy.response_column_name\)"),
        (
            {"q": "q", "a": None}, ("q", "a"),
            r"r: column 'a' \(train_policy.response_column_name\) is null; fill it, or leave the row out",
        ),
        ({"x": "q"}, ("", ""), "r: no prompt among the columns x; set train.train_policy.prompt_column_name"),
    ],
)  # fmt: skip
def test_a_row_without_a_prompt_is_an_error(row, columns, message):
    with pytest.raises(DataError, match=message):
        read_prompt(row, "r", *columns)


@pytest.mark.parametrize("row", [{"messages": [ANSWERED]}, {"prompt": ""}, {"question": " "}])
def test_a_row_with_nothing_to_answer_is_skipped(row):
    with pytest.raises(SkippedRow, match="r: skipped, without a user turn to answer"):
        read_prompt(row, "r")


@pytest.mark.parametrize("answer", [Decimal("1.5"), date(2020, 1, 2), b"4"])
def test_a_reference_that_json_does_not_know_is_an_error(answer):
    with pytest.raises(DataError) as caught:
        read_prompt({"prompt": "q", "answer": answer}, "a.parquet row 0")
    said = f"a.parquet row 0: column 'answer' holds {str(answer)!r}, no JSON; write it as text"
    assert str(caught.value) == said


def test_a_held_out_conversation_is_asked_up_to_its_last_answer():
    row = {"messages": [ASKED, ANSWERED, ASKED, {"role": "assistant", "content": "last"}]}
    assert read_held_out_prompt(row, "row", "", "be brief") == ([SYSTEM, ASKED, ANSWERED, ASKED], "last")
    assert read_held_out_prompt({"question": "q", "answer": "a"}, "row") == ([ASKED], "a")
    assert read_held_out_prompt({"prompt": [ASKED], "response": [ANSWERED]}, "row") == ([ASKED], "a")
    assert read_prompt({"prompt": "q", "response": SHAREGPT[1:]}, "row") == ([ASKED], "a")
    edges = [{"from": "A", "to": "B"}]
    assert read_prompt({"prompt": "q", "solution": edges}, "row") == ([ASKED], json.dumps(edges))
    with pytest.raises(DataError, match="row: plain text has no prompt to complete"):
        read_held_out_prompt({"text": "hello"}, "row")


def test_roles_of_sharegpt_are_mapped_and_a_function_call_is_a_tool_call():
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [("human", "q"), ("function_call", json.dumps(call)), ("observation", "1"), ("bing", "a"), ("bard", "b")]
    row = {"conversations": [{"from": role, "value": value} for role, value in turns]}
    assert read_conversation(row, "row") == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    plain = {"conversations": [{"from": "function_call", "value": "add(1)"}]}
    assert read_conversation(plain, "row") == [{"role": "assistant", "content": "add(1)"}]


@pytest.mark.parametrize(("user", "assistant"), [("User", "Assistant"), ("HUMAN", "AI"), ("prompter", "bot")])
def test_roles_of_other_programs_are_known_in_upper_and_lower_case(user: str, assistant: str) -> None:
    row = {"conversations": [{"from": user, "value": "q"}, {"from": assistant, "value": "a"}]}
    assert read_conversation(row, "row") == [ASKED, ANSWERED]
    assert read_prompt({"prompt": "q", "response": row["conversations"][1:]}, "row") == ([ASKED], "a")


def test_the_history_of_a_query_comes_before_it() -> None:
    row = {"query": "q", "response": "a", "history": [["x", "y"]], "system": SYSTEM["content"]}
    earlier = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert read_conversation(row, "row") == [SYSTEM, *earlier, ASKED, ANSWERED]


def test_calls_that_are_turns_of_their_own_belong_to_the_turn_of_the_assistant_before_them() -> None:
    names = ("look", "add")
    calls = [{"role": "tool_call", "content": json.dumps({"name": name, "arguments": {}})} for name in names]
    said = {"role": "assistant", "content": "I look."}
    results = [{"role": "tool_response", "content": "1"}, {"role": "tool_response", "content": "2"}]
    turns = read_conversation({"messages": [ASKED, said, *calls, *results, *calls[:1], ANSWERED]}, "row")
    called = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    told = [{"role": "tool", "content": text} for text in ("1", "2")]
    last = {"role": "assistant", "content": "", "tool_calls": called[:1]}
    assert turns == [ASKED, {**said, "tool_calls": called}, *told, last, ANSWERED]
    thought = {"role": "function_call", "content": f"<think>\nAdd.\n</think>\n\n{calls[1]['content']}"}
    thinking = {"role": "assistant", "content": "<think>\nAdd.\n</think>", "tool_calls": called[1:]}
    assert read_conversation({"messages": [ASKED, thought]}, "row") == [ASKED, thinking]
    assert read_conversation({"messages": [ASKED, said, thought]}, "row") == [ASKED, said, thinking]
    apart = read_conversation({"messages": [ASKED, {**said, "loss": False}, *calls]}, "row")
    assert [turn.get("weight", 1) for turn in apart[1:]] == [0, 1], "only one of them is learned"


def test_tools_are_a_list_or_its_json_with_the_nulls_that_were_written():
    described = {"name": "add", "parameters": {"a": {"type": "int", "default": None}}}
    tool = {"type": "function", "function": described}
    assert read_tools({"tools": [tool]}, "row") == [tool] == read_tools({"tools": json.dumps([tool])}, "row")
    for name, value in (("tools", [described]), ("tools", [{"type": "function", **described}]),
                        ("functions", [described]), ("functions", json.dumps([described]))):  # fmt: skip
        assert read_tools({name: value}, "row") == [tool], "as models are told of tools"
    assert read_tools({"functions": ["add"]}, "row") is None
    assert [read_tools(row, "row") for row in ({}, {"tools": None}, {"tools": []}, {"tools": ""})] == [None] * 4
    for wrong in ("add", ["add"], {"name": "add"}, "{"):
        with pytest.raises(DataError, match=r"^row: column 'tools' holds .*write a list of objects"):
            read_tools({"tools": wrong}, "row")


def test_a_python_literal_that_is_no_conversation_is_text() -> None:
    text = "[{'a': 1}]"
    assert read_conversation({"prompt": text, "response": "a"}, "row 1")[0]["content"] == text
    assert read_prompt({"prompt": "[{'role': 'user', 'content': unquoted}]"}, "row 1")[0][0]["content"].startswith("[{")


def test_a_video_is_no_image_for_a_model_that_reads_images() -> None:
    turn = {"role": "user", "content": [{"type": "video", "video": "a.mp4"}, {"type": "text", "text": "What?"}]}
    with pytest.raises(DataError, match=r"the part .*'video'.* is neither text nor an image"):
        read_conversation({"messages": [turn, ANSWERED]}, "row", with_images=True)


def test_an_image_part_with_null_in_the_keys_of_other_parts_has_no_text() -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what?", "image": None}]
    [turn], _ = read_prompt({"prompt": [{"role": "user", "content": parts}]}, "row 1", with_images=True)
    assert turn["content"] == [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert get_turn_texts(turn) == ["what?"]


@pytest.mark.parametrize(("row", "expected"), [({"reference": None, "answer": "7"}, "7"), ({"label": None}, "")])
def test_a_null_is_no_reference(row: dict[str, str | None], expected: str) -> None:
    assert find_reference_response(row, "") == expected
