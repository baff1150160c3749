"""What a row means: a conversation to learn, or a prompt with its reference answer.

Understood are OpenAI (`role`, `content`) and ShareGPT or LLaVA (`from`, `value`) turns, plain text, and two columns
such as `question` and `answer`. Nothing is rendered or tokenised here (`conversation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant",
}  # fmt: skip
# At either end of a turn, where LLaVA puts it; in the middle of a sentence it is a word like any other.
_MEDIA_MARK = re.compile(r"\A\s*<(image|video)>|<(image|video)>\s*\Z")


class SkippedRow(DataError):
    """A row of the right form in which nothing is to be learned or answered: `prepare` counts `reason` and goes on."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: skipped, {self.reason}"


def read_conversation(row: Row, where: str, column: str = "", system_prompt: str = "") -> list[Message] | str:
    """The conversation of a row; a string is plain text, which has no turns.

    Args:
        row: one row of a data set.
        where: its place, for messages.
        column: looked at first; a row without it may have another of the known columns.
        system_prompt: put first when there is no system turn.

    Raises:
        DataError: no known column, an unknown role, or content that is not text.
        SkippedRow: an empty text or conversation.
    """
    found = next((c for c in (column, *_CONVERSATION_COLUMNS) if row.get(c) is not None), None)
    if found is not None:
        value = row[found] if found == "text" else _decoded(row[found])
        if not isinstance(value, str):
            return _with_system(_turns(value, found, where), system_prompt)
        if not value.strip():
            raise SkippedRow(where, "empty")
        return value
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
        DataError: a named column is missing, or no column looks like a prompt.
        SkippedRow: there is nothing to answer.
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
        SkippedRow: there is nothing to answer.
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
    if not any(turn["role"] == "user" and turn["content"].strip() for turn in turns):
        raise SkippedRow(where, "without a user turn to answer")
    return turns, reference or ""


def _reference(row: Row, column: str) -> str | None:
    column = column or next((c for c in _REFERENCE_COLUMNS if row.get(c) is not None), "")
    if not column:
        return None
    value = row[column]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_turns(row: Row, column: str, role: str, where: str) -> list[Message]:
    value = _decoded(row[column])
    return (
        [{"role": role, "content": _content(value, where)}] if isinstance(value, str) else _turns(value, column, where)
    )


def _decoded(value: Any) -> Any:
    """A conversation that a format without lists, such as CSV, holds as JSON; anything else as it is."""
    if not (isinstance(value, str) and re.match(r"\s*\[\s*\{", value)):
        return value
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return turns if all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns) else value


def _turns(value: Any, column: str, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{where}: column {column!r} holds {str(value)[:40]!r}; a conversation is a list of turns")
    if not value:
        raise SkippedRow(where, "empty")
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
    if mark := _MEDIA_MARK.search(content):
        raise DataError(
            f"{where}: the turn shows an {mark[1] or mark[2]}, and this version learns from text alone; take rows "
            f"without {mark[0].strip()}"
        )
    return content


def alternating(turns: list[Message]) -> Iterator[list[Message]]:
    """The turns in the forms that a chat template may accept when it refuses their roles, the closest first: turns of
    one role in a row as one turn; then the system's as a part of what the user says."""
    yield _merged(turns)
    yield _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])


def _merged(turns: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for turn in turns:
        last = merged[-1] if merged else {}
        if last.get("role") == turn["role"] != "tool" and last.keys() == turn.keys() == {"role", "content"}:
            merged[-1] = {**turn, "content": f"{last['content']}\n\n{turn['content']}"}
        else:
            merged.append(turn)
    return merged


def _with_system(turns: list[Message], system_prompt: str) -> list[Message]:
    if not system_prompt or any(turn["role"] in {"system", "developer"} for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def _columns(row: Row) -> str:
    return ", ".join(row) or "(none)"
