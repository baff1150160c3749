"""Decoding of conversations that a column does not store as turns: JSON text in CSV files, the Python notation that
pandas writes for lists and arrays, and pairs of texts in Alpaca's `history`."""

import ast
import re
import tokenize
from io import StringIO
from itertools import pairwise
from typing import Any

from cosmos_core.data.tool_calls import parse_json
from cosmos_core.errors import DataError

_ROLE_KEYS, _CONTENT_KEYS = {"role", "from"}, {"content", "value", "tool_calls", "function_call"}
_TURN_LIST_START_REGEX = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
_TURN_PAIR_KEYS = ({"human", "assistant"}, {"user", "assistant"})
_MAX_LITERAL_CHARACTERS = 1 << 20  # longer literals are not parsed: the parser needs 100 times their memory


def decode_conversation(value: Any, location: str = "") -> Any:
    """Decode a conversation that is stored as text, or as the pairs of turns of ms-swift; return any other value
    unchanged. Raise DataError if a text that begins like turns cannot be decoded; without a `location` such a text is
    returned unchanged."""
    if isinstance(value, list) and value and all(isinstance(e, dict) and e.keys() in _TURN_PAIR_KEYS for e in value):
        is_last = "assistant".__eq__  # columnar formats may have put it first
        return [{"role": role, "content": pair[role]} for pair in value for role in sorted(pair, key=is_last)]
    if not isinstance(value, str) or not re.match(r"\s*\[\s*\{", value):
        return value
    turns = parse_json(value)
    if turns is None and len(value) <= _MAX_LITERAL_CHARACTERS:
        turns = _parse_literal(value)
    if location and _TURN_LIST_START_REGEX.match(value) and not is_turn_list(turns):
        text = " ".join(value[-40:].split())
        remedy = "spreadsheets cut a cell after 32,767 characters; write JSON Lines"
        raise DataError(f"{location}: turns that end with {text!r} cannot be decoded, {remedy}")
    return turns if is_turn_list(turns) else value


def is_turn_list(value: Any) -> bool:
    """Return whether a value is a list of turns: every element has a role, and at least one element has a content."""
    has_roles = isinstance(value, list) and all(isinstance(turn, dict) and _ROLE_KEYS & turn.keys() for turn in value)
    return has_roles and any(_CONTENT_KEYS & turn.keys() for turn in value)


def decode_history(value: Any, location: str) -> list[dict[str, Any]]:
    """Return the turns of Alpaca's column `history`, pairs of prompt and response or their JSON, or raise DataError."""
    turn_pairs = parse_json(value) if isinstance(value, str) and value.strip() else value or []
    if not isinstance(turn_pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in turn_pairs):
        raise DataError(f"{location}: column 'history' holds {str(value)[:40]!r}; write [[prompt, response], ...]")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in turn_pairs for role, text in zip(roles, pair, strict=True)]


def _parse_literal(text: str) -> Any:
    """Return the value of a Python literal, even without commas between dictionaries, as NumPy writes it; else None."""
    try:
        tokens = [token.string for token in tokenize.generate_tokens(StringIO(text.strip()).readline)]
        token_pairs = pairwise([*filter(str.strip, tokens), ""])
        return ast.literal_eval(" ".join("}," if pair == ("}", "{") else pair[0] for pair in token_pairs))
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
