"""Tools: user functions marked with `@tool` that the policy can call, and the text format of a tool call.

    @tool
    def add(a: int, b: int) -> int:
        \"\"\"Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        \"\"\"
        return a + b

The policy's prompt describes a tool by its signature and docstring, in the format of transformers' `get_json_schema`.
The policy writes calls in Hermes' format: `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>`.
The module `runner.py` makes the calls, in worker processes with deadlines.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_user_code

TOOLS_KEY = "rollout.multi_turn_config.tools"
_TOOL_ATTRIBUTE = "is_tool_of_a_policy"
_CALL_START_TAG, _CALL_END_TAG = "<tool_call>", "</tool_call>"
_REASONING_END_TAG = "</think>"
_MAX_TOOL_NAME_LENGTH = 60

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def tool(function: FunctionT) -> FunctionT:
    """Mark a function, which may be `async def`, as a tool that a policy can call."""
    setattr(function, _TOOL_ATTRIBUTE, True)
    return function


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call, parsed from a completion of the policy."""

    name: str
    """Name of the called function; empty: the call has no readable name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    """Reason why the tool cannot be called, as one line; empty: the text of the call is valid."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a tool call, or its error message, as text for the policy."""

    text: str
    is_error: bool = False


def load_tool(path: str) -> Callable[..., Any]:
    """Return the tool at the import path `module:function` or `path/file.py:function` of user code. Raise `ConfigError`
    if the function does not exist, cannot be imported or is not marked with `@tool`."""
    try:
        function = import_user_code(path)
    except ConfigError as error:
        raise ConfigError(f"{TOOLS_KEY}: {error}") from error
    if isinstance(function, type):
        raise ConfigError(f"{TOOLS_KEY}: {path!r} is a class; a tool is a function that is decorated with @tool")
    if not callable(function) or not getattr(function, _TOOL_ATTRIBUTE, False):
        raise ConfigError(f"{TOOLS_KEY}: {path!r} is no tool; decorate it: from cosmos_core.tools.base import tool")
    return function  # type: ignore[no-any-return]


def tool_paths_by_name(import_paths: Iterable[str]) -> dict[str, str]:
    """Return the import path of each tool by its function name; raise `ConfigError` if two tools have the same name."""
    path_by_tool_name: dict[str, str] = {}
    for path in import_paths:
        name = path.rpartition(":")[2]
        if name in path_by_tool_name:
            raise ConfigError(f"{TOOLS_KEY}: {path_by_tool_name[name]!r} and {path!r} have one name; rename a function")
        path_by_tool_name[name] = path
    return path_by_tool_name


def parse_tool_calls(turn_text: str) -> list[ToolCall]:
    """Return the tool calls of an assistant's turn in order, without calls inside the reasoning before `</think>`. A
    call that cannot be parsed is in the list with its error, so that the policy receives the error as a result."""
    tool_calls = []
    search_start = max(0, turn_text.rfind(_REASONING_END_TAG))
    while (call_start := turn_text.find(_CALL_START_TAG, search_start)) >= 0:
        tool_call, search_start = _parse_tool_call(turn_text, call_start + len(_CALL_START_TAG))
        tool_calls.append(tool_call)
    return tool_calls


def _parse_tool_call(turn_text: str, call_start_index: int) -> tuple[ToolCall, int]:
    """Return the tool call that begins at a position of a text, and the position after the call. The JSON parser
    determines the end of the call, because a string in the JSON can contain the end tag."""
    json_start = call_start_index + len(turn_text[call_start_index:]) - len(turn_text[call_start_index:].lstrip())
    try:
        decoded_call, end_of_json = _JSON_DECODER.raw_decode(turn_text, json_start)
        end_tag_index = end_of_json + len(turn_text[end_of_json:]) - len(turn_text[end_of_json:].lstrip())
        if not turn_text.startswith(_CALL_END_TAG, end_tag_index):
            has_end_tag = _CALL_END_TAG in turn_text[end_tag_index:]
            raise ValueError("more than one JSON value" if has_end_tag else f"no {_CALL_END_TAG} behind it")
        return _make_tool_call(decoded_call), end_tag_index + len(_CALL_END_TAG)
    except (ValueError, RecursionError) as error:
        parse_error = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        end_tag_index = turn_text.find(_CALL_END_TAG, call_start_index)
        call_end_index = len(turn_text) if end_tag_index < 0 else end_tag_index + len(_CALL_END_TAG)
        return ToolCall("", error=f"the tool call cannot be read: {parse_error}"), call_end_index


def _make_tool_call(json_call: Any) -> ToolCall:
    if not isinstance(json_call, dict) or not isinstance(json_call.get("name"), str):
        return ToolCall("", error='a tool call is {"name": "...", "arguments": {...}}')
    tool_name, call_arguments = json_call["name"][:_MAX_TOOL_NAME_LENGTH], json_call.get("arguments")
    if isinstance(call_arguments, str):  # decode arguments in OpenAI's format, which are JSON text
        call_arguments = _JSON_DECODER.decode(call_arguments) if call_arguments.strip() else {}
    call_arguments = {} if call_arguments is None else call_arguments
    if not isinstance(call_arguments, dict):
        return ToolCall(tool_name, error=f"arguments is a {type(call_arguments).__name__}; write an object")
    return ToolCall(tool_name, call_arguments)


def _refuse_json_constant(constant_name: str) -> Any:
    raise ValueError(f"{constant_name} is no JSON")


_JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_json_constant)
