"""What a row means: a conversation to learn, or a prompt with its reference answer.

Understood are OpenAI (`role`, `content`) and ShareGPT (`from`, `value`) turns, plain text, and two columns such as
`question` and `answer`. Nothing is rendered or tokenised here (`conversation.py`).
"""

from __future__ import annotations

import json
from typing import Any

from cosmos_core.errors import DataError

Row = dict[str, Any]
Message = dict[str, Any]
"""`role` and `content`, and what else a chat template may read (`tool_calls`, `reasoning_content`, ...)."""

_CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "text")
_PAIR_COLUMNS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"))
_PROMPT_COLUMNS = ("prompt", "question", "problem", "conversations", "messages")
_REFERENCE_COLUMNS = ("answer", "response", "solution", "result")
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant",
}  # fmt: skip


def read_conversation(row: Row, where: str, column: str = "", system_prompt: str = "") -> list[Message] | str:
    """The conversation of a row; a string is plain text, which has no turns.

    Args:
        row: one row of a data set.
        where: its place, for messages.
        column: looked at first; a row without it may have another of the known columns.
        system_prompt: put first when there is no system turn.

    Raises:
        DataError: no known column, an empty conversation, an unknown role, or content that is not text.
    """
    found = next((c for c in (column, *_CONVERSATION_COLUMNS) if row.get(c) is not None), None)
    if found is not None and isinstance(row[found], str):
        if not row[found]:
            raise DataError(f"{where}: column {found!r} is an empty text; remove the row")
        return row[found]
    if found is not None:
        return _with_system(_turns(row[found], found, where), system_prompt)
    for question, answer in _PAIR_COLUMNS:
        if row.get(question) is not None and row.get(answer) is not None:
            asked, answered = _as_turns(row, question, "user", where), _as_turns(row, answer, "assistant", where)
            return _with_system(asked + answered, system_prompt)
    raise DataError(
        f"{where}: no conversation among the columns {_columns(row)}; "
        "set train.train_policy.conversation_column_name, or name a column messages, text, or prompt and response"
    )


def read_prompt(
    row: Row, where: str, prompt_column: str = "", response_column: str = "", system_prompt: str = ""
) -> tuple[list[Message], str]:
    """The prompt of a row as turns, and its reference answer ("" when there is none).

    A prompt that is a conversation ends before its last assistant turn when that comes last; that turn is the
    reference where no column holds one.

    Raises:
        DataError: a named column is missing, no column looks like a prompt, or the prompt is empty.
    """
    for key, name in (("prompt_column_name", prompt_column), ("response_column_name", response_column)):
        if name and row.get(name) is None:
            raise DataError(f"{where}: no column {name!r} (train_policy.{key}); the row has {_columns(row)}")
    column = prompt_column or next((c for c in _PROMPT_COLUMNS if row.get(c) is not None), "")
    if not column:
        raise DataError(
            f"{where}: no prompt among the columns {_columns(row)}; set train.train_policy.prompt_column_name"
        )
    turns = _with_system(_as_turns(row, column, "user", where), system_prompt)
    return _ask(turns, _reference(row, response_column), where)


def read_held_out(row: Row, where: str, column: str = "", system_prompt: str = "") -> tuple[list[Message], str]:
    """Prompt and reference answer of a row that is made to be learned: ask what the last assistant turn answers.

    Raises:
        DataError: the row is plain text, or not a conversation.
    """
    conversation = read_conversation(row, where, column, system_prompt)
    if isinstance(conversation, str):
        raise DataError(
            f"{where}: plain text has no prompt to answer; give validation.dataset conversations, "
            "or leave validation.reward_function empty to measure the loss"
        )
    return _ask(conversation, _reference(row, ""), where)


def _ask(turns: list[Message], reference: str | None, where: str) -> tuple[list[Message], str]:
    if turns and turns[-1]["role"] == "assistant":
        reference = turns[-1]["content"] if reference is None else reference
        turns = turns[:-1]
    if not any(turn["role"] == "user" for turn in turns):
        raise DataError(f"{where}: a prompt without a user turn; there is nothing to answer")
    return turns, reference or ""


def _reference(row: Row, column: str) -> str | None:
    column = column or next((c for c in _REFERENCE_COLUMNS if row.get(c) is not None), "")
    if not column:
        return None
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_turns(row: Row, column: str, role: str, where: str) -> list[Message]:
    value = row[column]
    return [{"role": role, "content": value}] if isinstance(value, str) else _turns(value, column, where)


def _turns(value: Any, column: str, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{where}: column {column!r} holds {str(value)[:40]!r}; a conversation is a list of turns")
    if not value:
        raise DataError(f"{where}: column {column!r} is an empty conversation; remove the row")
    return [_turn(turn, f"{where}, turn {number} of {column!r}") for number, turn in enumerate(value, start=1)]


def _turn(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {str(turn)[:40]!r} is not a turn; write role and content, or from and value")
    # Arrow gives each turn every key that any turn has, with None for what it lacks.
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn.get("role", turn.get("from"))
    if role not in _ROLES:
        raise DataError(f"{where}: unknown role {role!r}; known: {', '.join(_ROLES)}")
    if "role" not in turn:
        return {"role": _ROLES[role], "content": _content(turn.get("value"), where)}
    content = _content(turn.get("content", "" if "tool_calls" in turn else None), where)
    return {**turn, "role": _ROLES[role], "content": content}


def _content(content: Any, where: str) -> str:
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: content {str(content)[:40]!r} is not text; this version learns from text alone")
    return content


def _with_system(turns: list[Message], system_prompt: str) -> list[Message]:
    if not system_prompt or any(turn["role"] in {"system", "developer"} for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def _columns(row: Row) -> str:
    return ", ".join(row) or "(none)"
