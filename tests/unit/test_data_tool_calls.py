"""Tool calls and turns of weight 0 as tokens: what is written is learned once, and what is not to be said is not."""

from __future__ import annotations

import gzip
import json
from typing import Any

import datasets
import pytest

from cosmos_core.config.schema.dataset import DatasetConfig
from cosmos_core.data.conversation import conversation_tokens
from cosmos_core.data.messages import SkippedRow, read_conversation
from cosmos_core.data.rows import load_rows
from cosmos_core.data.tool_calls import read_tools
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


def sharegpt(arguments: Any) -> dict[str, Any]:
    value = json.dumps({"name": "weather", "arguments": arguments})
    return {"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": value}]}


def learned_of(row: dict[str, Any], template: str) -> list[str]:
    tokenizer = byte_tokenizer(template)
    return learned(tokenizer, *conversation_tokens(tokenizer, read_conversation(row, "row"), "row"))


@pytest.mark.parametrize("form", [openai, sharegpt])
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


@pytest.mark.parametrize(("arguments", "written"), [("", "{}"), ("{}", "{}"), ("Paris", '"Paris"'), ("[1]", '"[1]"')])
def test_no_arguments_are_an_empty_object_and_what_is_no_object_stays(arguments: str, written: str) -> None:
    assert learned_of(openai(arguments), AS_JSON) == [f"weather({written})<|im_end|>"]


@pytest.mark.parametrize("names", [("role", "content"), ("from", "value")])
def test_a_turn_of_weight_0_is_read_and_not_learned(names: tuple[str, str]) -> None:
    turns = [
        ("user", "q", {}),
        ("assistant", "BAD", {"weight": 0}),
        ("user", "r", {}),
        ("assistant", "a", {"weight": 1}),
    ]
    row = {"messages": [dict(zip(names, turn, strict=False)) | weight for *turn, weight in turns]}
    tokenizer = byte_tokenizer(CHATML)
    ids, mask = conversation_tokens(tokenizer, read_conversation(row, "row"), "row")
    assert learned(tokenizer, ids, mask) == ["a<|im_end|>"]
    assert "BAD<|im_end|>" in tokenizer.decode(ids)


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
