"""Tools and calls of them in a row: as OpenAI and ShareGPT write them, in the form that chat templates read."""

from __future__ import annotations

import json
from typing import Any

from cosmos_core.errors import DataError


def read_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """Return what the column `tools` says of the tools that may be called, a list or its JSON; None: nothing.

    Raises:
        DataError: it is no list of objects.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        found = parsed(tools)
        tools = [tools] if found is None and tools.strip() not in {"", "null"} else found
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: column 'tools' holds {str(tools)[:40]!r}; write a list of objects, or leave it out")
    return tools


def calls_of(text: Any) -> list[Any] | None:
    """Return the calls that a ShareGPT `function_call` writes as JSON; None: it is something else."""
    found = parsed(text)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return with_objects([{"type": "function", "function": call} for call in calls])


def with_objects(calls: Any) -> Any:
    """Return tool calls whose arguments are the object that a string of theirs says, as OpenAI's interface has it:
    chat templates write them as JSON, and would put the string into quotes."""
    return _with_arguments(calls, _as_object)


def with_texts(calls: Any) -> Any:
    """Return tool calls whose arguments are JSON texts, for chat templates that put them together with other texts."""
    return _with_arguments(
        calls, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )


def in_python(calls: Any, text: str) -> bool:
    """Return whether a rendering has arguments as Python writes them: so does a chat template that expects texts."""
    functions = [
        call.get("function", call) for call in (calls if isinstance(calls, list) else ()) if isinstance(call, dict)
    ]
    found = [function.get("arguments") for function in functions if isinstance(function, dict)]
    return any(arguments and isinstance(arguments, dict) and str(arguments) in text for arguments in found)


def _with_arguments(calls: Any, change: Any) -> Any:
    return [_with_argument(call, change) for call in calls] if isinstance(calls, list) else calls


def _with_argument(call: Any, change: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _with_argument(function, change)}
    return {**call, "arguments": change(call["arguments"])} if "arguments" in call else call


def _as_object(value: Any) -> Any:
    """Return the object that a text says, none of its keys where it is empty; any other value as it is."""
    if not isinstance(value, str):
        return value
    found = parsed(value) if value.strip() else {}
    return found if isinstance(found, dict) else value


def parsed(text: Any) -> Any:
    """Return the value of a JSON text; None: it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def without_nulls(value: Any) -> Any:
    """Return a value as it was written: Arrow gives each object every key that any row has, with None for what it
    lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value
