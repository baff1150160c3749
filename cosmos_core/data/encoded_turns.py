"""Conversations that a column holds in other forms than turns: as JSON, as in CSV files, or in Python's notation, as
pandas writes lists and arrays, or as Alpaca's `history`."""

import ast
import re
import tokenize
from io import StringIO
from itertools import pairwise
from typing import Any

from cosmos_core.data.tool_calls import parse_json
from cosmos_core.errors import DataError

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


def decode_history(value: Any, location: str) -> list[dict[str, Any]]:
    """Return the turns of Alpaca's column `history`: pairs of a question and its answer, or their JSON.

    Raises:
        DataError: the value has another form.
    """
    pairs = parse_json(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError(f"{location}: column 'history' holds {str(value)[:40]!r}; write [[prompt, response], ...]")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)]


def _parse_literal(text: str) -> Any:
    """Return the value of a Python literal, which may lack the commas between dictionaries, as NumPy writes them; None
    if the text is none."""
    try:
        tokens = [token.string for token in tokenize.generate_tokens(StringIO(text.strip()).readline)]
        neighbours = pairwise([*filter(str.strip, tokens), ""])
        return ast.literal_eval(" ".join("}," if pair == ("}", "{") else pair[0] for pair in neighbours))
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
