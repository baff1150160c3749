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
_MAX_LITERAL_CHARACTERS = 1 << 20  # longest text for `_parse_literal`, which needs 100 times its memory


def decode_conversation(cell: Any, location: str = "") -> Any:
    """Decode a conversation in a column's value `cell` to a list of turns, if it is stored as text, or as the pairs of
    turns of ms-swift; return any other value unchanged. Raise DataError, which names `location`, if a text that begins
    like turns cannot be decoded; if `location` is empty, return such a text unchanged."""
    if isinstance(cell, list) and cell and all(isinstance(e, dict) and e.keys() in _TURN_PAIR_KEYS for e in cell):
        is_assistant_role = "assistant".__eq__  # sort the user's turn first: columnar formats may have sorted the keys
        return [{"role": role, "content": pair[role]} for pair in cell for role in sorted(pair, key=is_assistant_role)]
    if not isinstance(cell, str) or not re.match(r"\s*\[\s*\{", cell):
        return cell
    decoded_turns = parse_json(cell)
    if decoded_turns is None and len(cell) <= _MAX_LITERAL_CHARACTERS:
        decoded_turns = _parse_literal(cell)
    if location and _TURN_LIST_START_REGEX.match(cell) and not is_turn_list(decoded_turns):
        end_of_cell_text = " ".join(cell[-40:].split())
        remedy = "spreadsheets cut a cell after 32,767 characters; write JSON Lines"
        raise DataError(f"{location}: turns that end with {end_of_cell_text!r} cannot be decoded, {remedy}")
    return decoded_turns if is_turn_list(decoded_turns) else cell


def is_turn_list(cell: Any) -> bool:
    """Return whether a value is a list of turns: every element has a role, and at least one element has a content."""
    has_all_roles = isinstance(cell, list) and all(isinstance(turn, dict) and _ROLE_KEYS & turn.keys() for turn in cell)
    return has_all_roles and any(_CONTENT_KEYS & turn.keys() for turn in cell)


def decode_history(cell: Any, location: str) -> list[dict[str, Any]]:
    """Convert a value of Alpaca's column `history` to turns. Raise DataError if the value is not a list of pairs of
    prompt and response, or such a list as JSON."""
    turn_pairs = parse_json(cell) if isinstance(cell, str) and cell.strip() else cell or []
    if not isinstance(turn_pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in turn_pairs):
        raise DataError(f"{location}: column 'history' holds {str(cell)[:40]!r}; write [[prompt, response], ...]")
    role_pair = ("user", "assistant")
    return [{"role": role, "content": text} for pair in turn_pairs for role, text in zip(role_pair, pair, strict=True)]


def _parse_literal(python_literal: str) -> Any:
    """Return the value of a Python literal; NumPy's form without commas between dictionaries is allowed. Return None if
    the text is no literal."""
    try:
        literal_tokens = [token.string for token in tokenize.generate_tokens(StringIO(python_literal.strip()).readline)]
        adjacent_token_pairs = pairwise([*filter(str.strip, literal_tokens), ""])
        return ast.literal_eval(" ".join("}," if pair == ("}", "{") else pair[0] for pair in adjacent_token_pairs))
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        return None
