"""Tool calls and turns of weight 0 as tokens: what is written is learned once, and what is not to be said is not."""

from __future__ import annotations

import gzip
import json
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data.conversation import tokenise_conversation
from cosmos_core.data.messages import SkippedRow, read_conversation
from cosmos_core.data.rendering import RefusedRow
from cosmos_core.data.rows import load_rows
from cosmos_core.data.tool_calls import parse_sharegpt_calls, read_tools
from cosmos_core.errors import DataError
from tests.unit.data_tokenizers import CHATML, byte_tokenizer, learned

CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}(ARGUMENTS){% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AS_JSON = CALLS.replace("ARGUMENTS", "{{ call.function.arguments | tojson }}")  # as Qwen2.5 and Llama 3.1
AS_ITEMS = CALLS.replace("ARGUMENTS", "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}")
AS_TEXT = CALLS.replace("ARGUMENTS", "{{ '' + call.function.arguments }}")  # as DeepSeek
AS_IT_IS = CALLS.replace("ARGUMENTS", "{{ call.function.arguments }}")
ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "It is sunny."}


def openai(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}


def openai_before_tools(arguments: Any) -> dict[str, Any]:
    call = {"name": "weather", "arguments": arguments}
    return {"messages": [ASKED, {"role": "assistant", "content": None, "function_call": call}]}


def older_call_as_json(arguments: Any) -> dict[str, Any]:
    first, called = openai_before_tools(arguments)["messages"]
    return {"messages": [first, {**called, "function_call": json.dumps(called["function_call"])}]}


def calls_as_json(arguments: Any) -> dict[str, Any]:
    first, called = openai(arguments)["messages"]
    return {"messages": [first, {**called, "tool_calls": json.dumps(called["tool_calls"])}]}


def sharegpt_with_calls(arguments: Any) -> dict[str, Any]:
    _, called = openai(arguments)["messages"]
    return {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "tool_calls": called["tool_calls"]}]}


def sharegpt(arguments: Any) -> dict[str, Any]:
    value = json.dumps({"name": "weather", "arguments": arguments})
    return {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": value}]}


def learned_of(row: dict[str, Any], template: str) -> list[str]:
    return learned_turns(template, read_conversation(row, "row"))


def learned_turns(template: str, turns: Any) -> list[str]:
    tokenizer = byte_tokenizer(template)
    return learned(tokenizer, *tokenise_conversation(tokenizer, turns, "row"))


@pytest.mark.parametrize(
    "form", [openai, sharegpt, sharegpt_with_calls, openai_before_tools, older_call_as_json, calls_as_json]
)
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
@pytest.mark.parametrize(
    ("template", "written"),
    [
        (AS_JSON, '{"city": "Paris"}'),
        (AS_ITEMS, "city=Paris"),
        (AS_TEXT, '{"city": "Paris"}'),
        (AS_IT_IS, '{"city": "Paris"}'),
    ],
)
def test_arguments_are_learned_as_they_are_called(form: Any, arguments: Any, template: str, written: str) -> None:
    assert learned_of(form(arguments), template) == [f"weather({written})<|im_end|>"]


@pytest.mark.parametrize("thoughts", ["", "<think>It says </think> here.</think>"])
def test_arguments_may_hold_the_tag_that_ends_thoughts(thoughts: str) -> None:
    call = {"name": "say", "arguments": {"text": "a</think>b"}}
    expected = thoughts, [{"type": "function", "function": call}]
    assert parse_sharegpt_calls(f"{thoughts}{json.dumps(call)}") == expected


@pytest.mark.parametrize("text", ["[]", "f(x)", '["f"]', '{"name": "f"}', None])
def test_a_turn_of_calls_that_holds_none_is_text(text: str | None) -> None:
    assert parse_sharegpt_calls(text) is None


@pytest.mark.parametrize(("arguments", "written"), [("", "{}"), ("{}", "{}"), ("Paris", '"Paris"'), ("[1]", '"[1]"')])
def test_no_arguments_are_an_empty_object_and_what_is_no_object_stays(arguments: str, written: str) -> None:
    assert learned_of(openai(arguments), AS_JSON) == [f"weather({written})<|im_end|>"]


def test_a_turn_whose_list_of_calls_is_empty_calls_nothing() -> None:
    for calls in ({"tool_calls": []}, {"function_call": ""}):
        assert read_conversation({"messages": [ASKED, {**ANSWERED, **calls}]}, "row") == [ASKED, ANSWERED]
        with pytest.raises(SkippedRow, match="without an assistant turn to learn"):
            learned_of({"messages": [ASKED, {**ANSWERED, "content": None, **calls}]}, AS_JSON)
    with pytest.raises(DataError, match=r"turn 2 of 'messages': function_call holds 'f\(x\)'; write an object"):
        read_conversation({"messages": [ASKED, {**ANSWERED, "function_call": "f(x)"}]}, "row")


def test_tools_that_the_template_leaves_out_are_refused_unless_a_turn_describes_them() -> None:
    tools, tokenizer = [{"type": "function", "function": {"name": "look_up"}}], byte_tokenizer(CHATML)
    with pytest.raises(RefusedRow, match="with `tools` that the chat template leaves out"):
        tokenise_conversation(tokenizer, [ASKED, ANSWERED], "row", tools)
    told = {"role": "system", "content": json.dumps(tools)}
    assert learned(tokenizer, *tokenise_conversation(tokenizer, [told, ASKED, ANSWERED], "row", tools))


def test_a_conversation_of_weight_0_has_nothing_to_learn() -> None:
    with pytest.raises(SkippedRow, match="without an assistant turn to learn"):
        learned_of({"messages": [ASKED, {**ANSWERED, "weight": 0}]}, CHATML)


def test_marks_of_a_template_that_are_not_its_turns_leave_no_turn_out() -> None:
    # The number of turns comes first, so that no beginning of the conversation is a beginning of the whole.
    template = (
        "{{ messages | length }}{% generation %}{% for m in messages %}({{ m.content }}){% endfor %}{% endgeneration %}"
    )
    turns = [ASKED, {**ANSWERED, "weight": 0}, ANSWERED]
    with pytest.raises(DataError, match=r"^row: weight = 0 leaves out a turn, and the chat template marks it together"):
        learned_of({"messages": turns}, template)


SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
    "unit": {"type": ["string", "null"], "default": None, "enum": ["c", None]}}}}}  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".parquet", ".csv"])
def test_a_null_that_was_written_in_the_schema_of_a_tool_is_kept_and_one_of_arrow_is_not(
    tmp_path: Any, suffix: str
) -> None:
    path, other = tmp_path / f"a{suffix}", {**SCHEMA, "function": {**SCHEMA["function"], "strict": True}}
    rows = [{"prompt": "q", "tools": [SCHEMA]}, {"prompt": "q", "tools": [other]}]
    if suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif suffix == ".csv":
        path.write_text("prompt,tools\nq," + '"' + json.dumps([SCHEMA]).replace('"', '""') + '"\n')
    else:
        text = json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
        (gzip.open if suffix.endswith("gz") else open)(path, "wt").write(text)
    (_, first), *_ = load_rows(DatasetConfig(name=str(path)))
    found = read_tools(first, "row")
    assert found is not None and "strict" not in found[0]["function"]
    if suffix != ".parquet":
        assert found == [SCHEMA]


def test_a_call_of_the_older_form_has_the_arguments_that_it_was_written_with(tmp_path: Any) -> None:
    rows = [openai_before_tools({"city": "Paris"}), openai_before_tools({"days": 1})]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [read_conversation(row, where) for where, row in load_rows(DatasetConfig(name=str(tmp_path / "a.parquet")))]
    assert [turns[1]["tool_calls"][0]["function"]["arguments"] for turns in found] == [{"city": "Paris"}, {"days": 1}]


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_system_developer_or_tool_turn_that_the_template_leaves_out_is_refused(role: str) -> None:
    without = CHATML.replace("in messages %}", "in messages if m.role in ['user', 'assistant'] %}")
    turns = [ASKED, {"role": role, "content": "It rains in Oslo"}, ANSWERED]
    assert "in Oslo" in byte_tokenizer(CHATML).decode(tokenise_conversation(byte_tokenizer(CHATML), turns, "row")[0])
    with pytest.raises(RefusedRow, match=f"with a {role} turn that the chat template leaves out"):
        tokenise_conversation(byte_tokenizer(without), turns, "row")


def test_a_tools_text_that_the_template_writes_as_json_is_not_left_out() -> None:
    as_json = CHATML.replace("{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}")
    turns = [ASKED, {"role": "tool", "content": '{"at": "Tromsø",\n"sky": "<grey>"}\n'}, ANSWERED]
    assert learned_turns(as_json, turns)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_the_last_turn_that_the_template_leaves_out_are_refused(key: str) -> None:
    shows = CHATML.replace("{{ m.content }}", "{{ m.KEY if loop.last }}{{ m.content }}".replace("KEY", key))
    turns = [ASKED, {**ANSWERED, key: "so it is\n"}]
    assert "so it is" in "".join(learned_turns(shows, turns * 2))
    with pytest.raises(RefusedRow, match=f"with `{key}` that the chat template leaves out"):
        tokenise_conversation(byte_tokenizer(CHATML), turns, "row")
    assert learned_turns(CHATML, [*turns, ASKED, ANSWERED])
