"""Conversion of tools and tool calls in rows, from the formats of OpenAI and ShareGPT to the form of chat templates."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_core.errors import DataError


def read_tools(row: dict[str, Any], location: str) -> list[Any] | None:
    """Return the descriptions of tools in a row's column `tools`, a list of objects or its JSON; None if the row has no
    tools. Descriptions without `type`, and those in the column `functions` (an older form of OpenAI's API), are
    converted to `{"type": "function", "function": description}`, which chat templates read. Raise DataError for other
    values."""
    tools = row.get("tools")
    if isinstance(tools, str):
        decoded_tools = parse_json(tools)
        tools = [tools] if decoded_tools is None and tools.strip() not in {"", "null"} else decoded_tools
    functions = row.get("functions")
    functions = parse_json(functions) if isinstance(functions, str) else functions
    if not tools and isinstance(functions, list) and all(isinstance(f, dict) and "name" in f for f in functions):
        tools = functions
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        problem = f"column 'tools' holds {str(tools)[:40]!r}"
        raise DataError(f"{location}: {problem}; write a list of objects, or leave it out")
    return [
        {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} if "name" in tool else tool
        for tool in tools
    ]


def pop_tool_calls(turn: dict[str, Any], location: str) -> dict[str, Any]:
    """Remove the tool calls of a turn, and return the field `tool_calls` with decoded arguments; empty if the turn has
    none. The calls are in `tool_calls` or in `function_call` (older OpenAI API), as objects or JSON. Raise
    DataError if `tool_calls` is not a list of objects, or `function_call` is no object."""
    calls = turn.pop("tool_calls", [])
    if called_function := turn.pop("function_call", None):
        calls = [parse_json(called_function) if isinstance(called_function, str) else called_function]
    decoded_calls = parse_json(calls) if isinstance(calls, str) else calls
    if not isinstance(decoded_calls, list) or not all(isinstance(call, dict) for call in decoded_calls):
        key, expected_form = ("function_call", "an object") if called_function else ("tool_calls", "a list of objects")
        problem = f"{key} holds {str(called_function or calls)[:40]!r}"
        raise DataError(f"{location}: {problem}; write {expected_form}, or leave it out")
    if called_function:
        decoded_calls = [{"type": "function", "function": call} for call in decoded_calls]
    return {"tool_calls": decode_arguments(decoded_calls)} if decoded_calls else {}


def parse_sharegpt_calls(text: Any) -> tuple[str, list[Any]] | None:
    """Return the thoughts (`<think>...</think>` or an empty text) and the tool calls in the text of a ShareGPT turn of
    the role `function_call`, which has the calls as JSON; None if the text has no calls."""
    if not isinstance(text, str):
        return None
    # Try the text after each </think>, because the arguments of a call may contain this tag.
    possible_starts = (0, *(match.end() for match in re.finditer("</think>", text)))
    starts_and_calls = ((i, calls_value) for i in possible_starts if (calls_value := parse_json(text[i:])) is not None)
    start_of_calls, calls_value = next(starts_and_calls, (0, None))
    calls = calls_value if isinstance(calls_value, list) else [calls_value]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return text[:start_of_calls], decode_arguments([{"type": "function", "function": call} for call in calls])


def decode_arguments(calls: list[Any]) -> list[Any]:
    """Return tool calls with their arguments as objects, decoded from the JSON strings of OpenAI's API. Chat templates
    serialise the arguments to JSON, and would quote a string."""
    return [_convert_arguments(call, _decode_object) for call in calls]


def encode_arguments(calls: list[Any]) -> list[Any]:
    """Return tool calls with their arguments as JSON strings, for chat templates that concatenate them with strings."""
    return [
        _convert_arguments(call, lambda a: a if isinstance(a, str) else json.dumps(a, ensure_ascii=False))
        for call in calls
    ]


def encode_arguments_in_turns(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the turns with tool-call arguments as JSON text, which the OpenAI API and a few chat templates expect."""
    return [
        {**turn, "tool_calls": encode_arguments(turn["tool_calls"])} if "tool_calls" in turn else {**turn}
        for turn in turns
    ]


def uses_python_notation(calls: list[Any], text: str) -> bool:
    """Return whether `text`, in which a chat template rendered tool calls, has their arguments as Python dicts. Such a
    template needs the arguments as JSON strings."""
    functions = [call.get("function", call) for call in calls]
    call_arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return any(arguments and isinstance(arguments, dict) and str(arguments) in text for arguments in call_arguments)


def _convert_arguments(call: dict[str, Any], convert_arguments_fn: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _convert_arguments(function, convert_arguments_fn)}
    return {**call, "arguments": convert_arguments_fn(call["arguments"])} if "arguments" in call else call


def _decode_object(object_or_json: Any) -> Any:
    """Decode the JSON object in a string, `{}` if the string is empty; return any other value unchanged."""
    if not isinstance(object_or_json, str):
        return object_or_json
    decoded_object = parse_json(object_or_json) if object_or_json.strip() else {}
    return decoded_object if isinstance(decoded_object, dict) else object_or_json


def parse_json(json_text: Any) -> Any:
    """Decode a JSON text; return None if it is not JSON."""
    try:
        return json.loads(json_text)
    except (TypeError, ValueError, RecursionError):
        return None


def remove_nulls(json_value: Any) -> Any:
    """Return a value without the keys with None in its objects: Arrow adds the keys of all rows to each object."""
    if isinstance(json_value, dict):
        return {key: remove_nulls(element) for key, element in json_value.items() if element is not None}
    return [remove_nulls(element) for element in json_value] if isinstance(json_value, list) else json_value
