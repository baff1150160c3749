"""Calls that a policy writes, however badly, and tools that hang, crash or lie: the policy is told, the run goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_core.errors import ConfigError
from cosmos_core.tools.base import ToolCall, parse_tool_calls
from cosmos_core.tools.runner import ToolRunner

TOOLS = '''
import asyncio, os, sys, time
from cosmos_core.tools.base import tool

@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

@tool
async def say(word: str) -> dict:
    """Say a word later.

    Args:
        word: What to say.
    """
    await asyncio.sleep(0.01)
    return {"said": word}

later = say

@tool
class Calculator:
    """Add."""

@tool
def act(how: str) -> str:
    """Behave badly.

    Args:
        how: In which way.
    """
    if how == "hang":
        while True:
            pass
    if how == "raise":
        raise KeyError("no such\\nthing")
    if how == "exit":
        os._exit(3)
    if how == "sys.exit":
        sys.exit("enough")
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "long":
        return "x" * (1 << 20)
    if how == "half":
        return "\\ud800"
    if how == "image":
        from PIL import Image
        return [Image.new("RGB", (2, 2))]
    if how == "markup":
        return type("Tag", (), {"__str__": lambda _: "<p>a fault at 0x0</p>"})()
    return os.environ.get(how, "not there")

def plain(a: int) -> int:
    """Is not marked."""
    return a

@tool
def silent(a):
    return a
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(TOOLS)
    return path


@pytest.fixture(scope="module")
def runner(file: Path) -> Iterator[ToolRunner]:
    paths = [f"{file}:{name}" for name in ("add", "later", "act")]
    with (
        pytest.MonkeyPatch.context() as patch,
        ToolRunner(paths, timeout_seconds=60, variable_names=["SHOWN"], num_workers=2) as opened,
    ):
        patch.setenv("SHOWN", "seen")
        patch.setenv("SERVICE_KEY", "abcdefgh")
        opened.close()  # the next call starts processes with the variables of this moment
        yield opened


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_calls_are_read_in_their_order_with_words_around_them() -> None:
    nested = call("add", '{"a": 1, "b": [2, {"c": null}]}')
    text = f"Let me see. {nested} and {call('later', '{}')}<|im_end|>"
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1, "b": [2, {"c": None}]}), ToolCall("later")]
    assert parse_tool_calls("No call, not even </tool_call>.") == []
    assert parse_tool_calls('<tool_call>{"name":"add"}</tool_call>') == [ToolCall("add")]
    assert parse_tool_calls(call("add", '"{\\"a\\": 1}"')) == [ToolCall("add", {"a": 1})]


def test_a_call_may_hold_its_own_marks() -> None:
    inner = '{"word": "</tool_call><tool_call>{}"}'
    expected = [ToolCall("later", {"word": "</tool_call><tool_call>{}"}), ToolCall("add")]
    assert parse_tool_calls(call("later", inner) + call("add", "{}")) == expected


def test_what_is_thought_of_is_not_called() -> None:
    assert parse_tool_calls(f"<think>{call('add', '{}')}</think>12") == []
    assert parse_tool_calls(f"<think>{call('add', '{}')}</think>{call('later', '{}')}") == [ToolCall("later")]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>{</tool_call>", "Expecting property name"),
        ("<tool_call></tool_call>", "Expecting value"),
        ("<tool_call>add(1, 2)</tool_call>", "Expecting value"),
        ('<tool_call>{"name": "add"}', "no </tool_call> behind it"),
        ('<tool_call>{"name": "add"} {"name": "add"}</tool_call>', "more than one JSON value"),
        ('<tool_call>["add"]</tool_call>', 'a tool call is {"name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'a tool call is {"name"'),
        (call("add", "[1, 2]"), "arguments is a list; write an object"),
        (call("add", '"not json"'), "Expecting value"),
        (call("add", '{"a": NaN}'), "NaN is no JSON"),
        (call("add", '{"a": ' + "9" * 5000 + "}"), "Exceeds the limit"),
        (call("add", "[" * 100_000), "nested too deeply"),
        ("<tool_call>" * 3, "Expecting value"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_read_says_why(text: str, error: str) -> None:
    calls = parse_tool_calls(text)
    assert calls and all(found.error and "\n" not in found.error for found in calls)
    assert error in calls[0].error


def test_tools_are_called_beside_each_other_and_answer_in_order(runner: ToolRunner) -> None:
    calls = [ToolCall("add", {"a": i, "b": 1}) for i in range(20)] + [ToolCall("later", {"word": "ä"})]
    results = runner.run_tool_calls(calls)
    assert [result.text for result in results] == [*(str(i + 1) for i in range(20)), '{"said": "ä"}']
    assert not any(result.is_error for result in results)
    assert runner.run_tool_calls([]) == []


def test_what_goes_wrong_is_the_text_of_its_call_alone(runner: ToolRunner) -> None:
    ways = ["raise", "exit", "sys.exit", "kill", "image", "markup"]
    calls = [ToolCall("act", {"how": how}) for how in ways]
    calls += [
        ToolCall("nobody"),
        ToolCall("", error="no JSON"),
        ToolCall("add", {"a": 1}),
        ToolCall("add", {"a": 1, "b": 1}),
    ]
    texts = [result.text for result in runner.run_tool_calls(calls)]
    assert texts[:6] == [
        "Error: KeyError: 'no such\\nthing'",
        "Error: its process exited with code 3",
        "Error: SystemExit: enough",
        "Error: its process was killed by signal 9",
        "Error: TypeError: it returned an object of type Image, which is neither text nor JSON",
        '"<p>a fault at 0x0</p>"',
    ]
    assert texts[6:8] == ["Error: there is no tool 'nobody'; there are: add, later, act", "Error: no JSON"]
    assert "missing 1 required positional argument: 'b'" in texts[8] and texts[9] == "2"


def test_a_call_that_hangs_is_ended(file: Path) -> None:
    with ToolRunner([f"{file}:act"], timeout_seconds=0.6, num_workers=1) as opened:
        [result] = opened.run_tool_calls([ToolCall("act", {"how": "hang"})])
    assert result.is_error and result.text == "Error: not done in 0.6 s"


def test_results_are_bounded_text_and_tools_see_no_secret(runner: ToolRunner) -> None:
    long, half, shown, secret = runner.run_tool_calls(
        [ToolCall("act", {"how": how}) for how in ("long", "half", "SHOWN", "SERVICE_KEY")]
    )
    assert len(long.text) == (1 << 16) + 3
    assert (half.text, shown.text, secret.text) == ("?", "seen", "not there")


def test_signature_and_docstring_are_what_a_template_is_told(runner: ToolRunner) -> None:
    add, later, _ = [schema["function"] for schema in runner.schemas()]
    assert later["name"] == "later", "as it is called, whatever its `__name__` is"
    assert (add["name"], add["description"]) == ("add", "Add two numbers.")
    assert add["parameters"]["required"] == ["a", "b"]
    assert add["parameters"]["properties"]["b"] == {"type": "integer", "description": "The second number."}


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["{}:nobody"], "has no 'nobody'"),
        (["{}:plain"], "is no tool; decorate it"),
        (["{}:Calculator"], "is a class; a tool is a function"),
        (["{}:add", "other.py:add"], "have one name; rename a function"),
        (["{}:silent"], "cannot be described: "),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_used_are_refused_by_name(paths: list[str], message: str, file: Path) -> None:
    with (
        pytest.raises(ConfigError, match=rf"rollout\.multi_turn_config\.tools: .*{message}"),
        ToolRunner([path.format(file) for path in paths], timeout_seconds=1, num_workers=1) as opened,
    ):
        opened.schemas()
