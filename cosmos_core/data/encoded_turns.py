"""Conversations that a column holds as text: JSON, as in CSV files, or Python's notation, as pandas writes lists."""

import ast
import re
from typing import Any

from cosmos_core.data.tool_calls import parse_json

_MAX_LITERAL_LENGTH = 1 << 20  # Python's parser needs about a hundred times the memory of its text


def decode_conversation(value: Any) -> Any:
    """Decode a conversation that is stored as text; return any other value unchanged."""
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    turns = parse_json(value)
    if turns is None and len(value) <= _MAX_LITERAL_LENGTH:
        turns = _parse_literal(value)
    is_conversation = turns and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return turns if is_conversation else value


def _parse_literal(text: str) -> Any:
    """Return the value of a Python literal; None if the text is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
