"""What a row means: a conversation to learn, a prompt with its reference answer, or a prompt with two completions.

Understood are OpenAI (`role`, `content`) and ShareGPT or LLaVA (`from`, `value`) turns, plain text, and two columns
such as `question` and `answer`. Nothing is rendered or tokenised here (`conversation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from cosmos_core.errors import DataError

Row = dict[str, Any]
Message = dict[str, Any]
"""`role` and `content`, and what else a chat template may read (`tool_calls`, `reasoning_content`, ...)."""

_TEXT_ALONE = "this version learns from text alone where the model has no image processor"
_CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "text")
_PAIR_COLUMNS = (("prompt", "response"), ("prompt", "completion"), ("question", "answer"))
_PROMPT_COLUMNS = ("prompt", "question", "problem", "conversations", "messages")
_COMPARED_PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem")
_REFERENCE_COLUMNS = ("answer", "response", "solution", "result")
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bing": "assistant",
    "bard": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
IMAGE_MARK = re.compile("<image>")
# At either end of a turn, where LLaVA puts it; in the middle of a sentence it is a word like any other.
_MEDIA_MARK = re.compile(r"\A\s*<(image|video)>|<(image|video)>\s*\Z")


class SkippedRow(DataError):
    """A row of the right form with nothing to learn or to complete in it: `prepare` counts `reason` and goes on."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: skipped, {self.reason}"


class Preference(NamedTuple):
    """Two completions of a prompt; all three are turns, or all are plain text."""

    prompt: list[Message] | str
    chosen: list[Message] | str
    rejected: list[Message] | str


def read_conversation(
    row: Row, where: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> list[Message] | str:
    """Return the conversation of a row; a string is plain text, which has no turns.

    Args:
        row: one row of a data set.
        where: its location, for messages.
        column: looked at first; a row without it may have another of the known columns.
        system_prompt: put first when there is no system turn.
        with_images: content may be a list of parts, `text` and `image`, and may say <image> (`images.py`).

    Raises:
        DataError: no known column, an unknown role, or content that is not text.
        SkippedRow: an empty text or conversation.
    """
    found = next((c for c in (column, *_CONVERSATION_COLUMNS) if row.get(c) is not None), None)
    if found is not None:
        value = row[found] if found == "text" else _decoded(row[found])
        if not isinstance(value, str):
            return _with_system(_turns(value, found, where, with_images), system_prompt)
        if not value.strip():
            raise SkippedRow(where, "empty")
        return value
    for question, response in _PAIR_COLUMNS:
        if row.get(question) is not None and row.get(response) is not None:
            asked = _as_turns(row, question, "user", where, with_images)
            responded = _as_turns(row, response, "assistant", where, with_images)
            return _with_system(asked + responded, system_prompt)
    raise DataError(
        f"{where}: no conversation among the columns {_columns(row)}; "
        "set train.train_policy.conversation_column_name, or name a column messages, text, or prompt and response"
    )


def read_prompt(  # noqa: PLR0913 - names of columns, and flags that default to what most rows are
    row: Row,
    where: str,
    prompt_column: str = "",
    response_column: str = "",
    system_prompt: str = "",
    *,
    keeps_last: bool = False,
    with_images: bool = False,
) -> tuple[list[Message], str]:
    """Return the prompt of a row as turns, and its reference answer ("" when there is none).

    A prompt that is a conversation ends before its last assistant turn when that comes last; that turn is the
    reference where no column holds one. With `keeps_last` it stays in the prompt, for the policy to go on with.
    `with_images`: as `read_conversation`.

    Raises:
        DataError: a named column is missing, or no column looks like a prompt.
        SkippedRow: there is nothing to complete.
    """
    for key, name in (("prompt_column_name", prompt_column), ("response_column_name", response_column)):
        if name and row.get(name) is None:
            raise DataError(f"{where}: no column {name!r} (train_policy.{key}); the row has {_columns(row)}")
    column = prompt_column or next((c for c in _PROMPT_COLUMNS if row.get(c) is not None), "")
    if not column:
        raise DataError(
            f"{where}: no prompt among the columns {_columns(row)}; set train.train_policy.prompt_column_name"
        )
    turns = _with_system(_as_turns(row, column, "user", where, with_images), system_prompt)
    if keeps_last and turns and turns[-1]["role"] == "assistant":
        return [*_ask(turns, "", where)[0], turns[-1]], _reference(row, response_column, where) or ""
    return _ask(turns, _reference(row, response_column, where), where)


def read_held_out(
    row: Row, where: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> tuple[list[Message], str]:
    """Return prompt and reference answer of a row that is made to be learned: ask for its last assistant turn.

    Raises:
        DataError: the row is plain text, or not a conversation.
        SkippedRow: there is nothing to complete.
    """
    conversation = read_conversation(row, where, column, system_prompt, with_images=with_images)
    if isinstance(conversation, str):
        raise DataError(
            f"{where}: plain text has no prompt to complete; give validation.dataset conversations, "
            "or leave validation.reward_function empty to measure the loss"
        )
    return _ask(conversation, _reference(row, "", where), where)


def read_preference(
    row: Row, where: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> Preference:
    """Return prompt, chosen and rejected completion of a row, each as text or as turns.

    Without a column of prompts the prompt is what `chosen` and `rejected` begin with alike: the same turns, or the same
    text, which then is plain and has no turns. Turns that begin with the prompt do not repeat it.

    Args:
        row: one row of a data set.
        where: its location, for messages.
        column: of the prompt, looked at first; a row without it may have `prompt` or another of the known columns.
        system_prompt: put before turns that have no system turn.
        with_images: as `read_conversation`.

    Raises:
        DataError: `chosen`, `rejected` or the prompt is missing or of a wrong form.
        SkippedRow: there is nothing to compare.
    """
    one, other = (_compared(row, name, where, with_images) for name in ("chosen", "rejected"))
    if one == other:
        raise SkippedRow(where, "with equal chosen and rejected")
    found = next((c for c in (column, *_COMPARED_PROMPT_COLUMNS) if row.get(c) is not None), None)
    if found is None and isinstance(one, str) and isinstance(other, str):
        return _plain_preference(one, other, where)
    chosen, rejected = _response_turns(one), _response_turns(other)
    if "assistant" in {chosen[0]["role"], rejected[0]["role"]}:
        prompt = [] if found is None else _as_turns(row, found, "user", where, with_images)
    else:
        prompt = chosen[: _num_shared(chosen, rejected)]
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if any(not turns or turns[0]["role"] != "assistant" for turns in (chosen, rejected)):
        raise SkippedRow(where, "whose chosen and rejected answer different prompts")
    if not prompt and found is None:
        raise DataError(
            f"{where}: no prompt among the columns {_columns(row)}; name it `prompt`, or set "
            "train.train_policy.conversation_column_name"
        )
    if not any(turn["role"] != "assistant" and any(map(str.strip, texts_of(turn))) for turn in prompt):
        raise SkippedRow(where, "without a prompt")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{where}: the prompt ends with an assistant turn; end it with the turn to respond to")
    if not all(any(map(str.strip, texts_of(turns[-1]))) or "tool_calls" in turns[-1] for turns in (chosen, rejected)):
        raise SkippedRow(where, "with an empty answer")
    return Preference(_with_system(prompt, system_prompt), _merged(chosen), _merged(rejected))


def _compared(row: Row, name: str, where: str, with_images: bool) -> list[Message] | str:
    value = row.get(name)
    if value is None:
        raise DataError(
            f"{where}: no {name!r} among the columns {_columns(row)}; leave the row out, or give both completions"
        )
    value = _decoded(value)
    if isinstance(value, str):
        return _content(value, where)
    return _turns([value] if isinstance(value, dict) else value, name, where, with_images)


def _plain_preference(chosen: str, rejected: str, where: str) -> Preference:
    prompt = chosen[: _num_shared(chosen, rejected)]
    if not prompt.strip():
        raise DataError(
            f"{where}: the texts of `chosen` and `rejected` begin differently, and there is no column `prompt`; give "
            "one, or set train.train_policy.conversation_column_name"
        )
    if prompt in {chosen, rejected}:
        raise SkippedRow(where, "with an empty answer")
    return Preference(prompt, chosen[len(prompt) :], rejected[len(prompt) :])


def _response_turns(response: list[Message] | str) -> list[Message]:
    return [{"role": "assistant", "content": response}] if isinstance(response, str) else response


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many turns, or characters, both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _ask(turns: list[Message], reference: str | None, where: str) -> tuple[list[Message], str]:
    if turns and turns[-1]["role"] == "assistant":
        reference = "".join(texts_of(turns[-1])) if reference is None else reference
        turns = turns[:-1]
    if not any(turn["role"] == "user" and any(map(str.strip, texts_of(turn))) for turn in turns):
        raise SkippedRow(where, "without a user turn to answer")
    return turns, reference or ""


def _reference(row: Row, column: str, where: str) -> str | None:
    column = column or next((c for c in _REFERENCE_COLUMNS if row.get(c) is not None), "")
    if not column:
        return None
    value = row[column]
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except TypeError:  # columnar formats hold dates, decimals and bytes
        raise DataError(f"{where}: column {column!r} holds {str(value)[:40]!r}, no JSON; write it as text") from None


def _as_turns(row: Row, column: str, role: str, where: str, with_images: bool = False) -> list[Message]:
    value = _decoded(row[column])
    if isinstance(value, str):
        return [{"role": role, "content": _content(value, where, with_images)}]
    return _turns(value, column, where, with_images)


def _decoded(value: Any) -> Any:
    """Return a conversation that a format without lists, such as CSV, holds as JSON; anything else as it is."""
    turns = _parsed(value) if isinstance(value, str) and re.match(r"\s*\[\s*\{", value) else None
    is_talk = turns and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return turns if is_talk else value


def _parsed(text: Any) -> Any:
    """Return the value of a JSON text; None: it is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _turns(value: Any, column: str, where: str, with_images: bool = False) -> list[Message]:
    if not isinstance(value, list):
        raise DataError(f"{where}: column {column!r} holds {str(value)[:40]!r}; a conversation is a list of turns")
    if not value:
        raise SkippedRow(where, "empty")
    return [
        _turn(turn, f"{where}, turn {number} of {column!r}", with_images) for number, turn in enumerate(value, start=1)
    ]


def _turn(turn: Any, where: str, with_images: bool) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: {str(turn)[:40]!r} is not a turn; write role and content, or from and value")
    # Arrow gives each turn every key that any turn has, with None for what it lacks.
    turn = {key: value for key, value in turn.items() if value is not None}
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(f"{where}: unknown role {repr(role)[:40]}; known: {', '.join(_ROLES)}")
    if "role" not in turn:
        content = _content(turn.get("value"), where, with_images)
        return (_call(content) if role == "function_call" else None) or {"role": _ROLES[role], "content": content}
    content = _content(turn.get("content", "" if "tool_calls" in turn else None), where, with_images)
    return {**turn, "role": _ROLES[role], "content": content}


def _call(content: Any) -> Message | None:
    """Return the turn of a ShareGPT `function_call`, whose text is JSON; None: it is something else."""
    found = _parsed(content)
    calls = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and {"name", "arguments"} <= call.keys() for call in calls):
        return None
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def read_tools(row: Row, where: str) -> list[Any] | None:
    """Return what the column `tools` says of the tools that may be called, a list or its JSON; None: nothing.

    Raises:
        DataError: it is no list of objects.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        found = _parsed(tools)
        tools = [tools] if found is None and tools.strip() not in {"", "null"} else found
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: column 'tools' holds {str(tools)[:40]!r}; write a list of objects, or leave it out")
    listed: list[Any] = without_nulls(tools)
    return listed


def without_nulls(value: Any) -> Any:
    """Return a value as it was written: Arrow gives each object every key that any row has, with None for what it
    lacks."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _content(content: Any, where: str, with_images: bool = False) -> Any:
    if with_images and isinstance(content, list) and any(_shows_image(part) for part in content):
        return [_part(part, where) for part in content]
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: content {str(content)[:40]!r} is not text; {_TEXT_ALONE}")
    mark = _MEDIA_MARK.search(content)
    if mark and not (with_images and (mark[1] or mark[2]) == "image"):
        raise DataError(
            f"{where}: the turn shows an {mark[1] or mark[2]}, and {_TEXT_ALONE}; take rows without {mark[0].strip()}"
        )
    return content


def _shows_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")  # no set: a list may stand there


def _part(part: Any, where: str) -> dict[str, Any]:
    """Return a part of a turn: `{"type": "text", "text": ...}`, or `type` = `image` and what names the image."""
    if _shows_image(part):
        return {**part, "type": "image"}
    if isinstance(part, dict) and part.get("type") in (None, "text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise DataError(f"{where}: the part {str(part)[:60]!r} is neither text nor an image, which is all that is read")


def texts_of(message: Message) -> list[str]:
    """Return the words of a turn, those between two images apart."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def alternating(turns: list[Message]) -> Iterator[list[Message]]:
    """Yield the turns in forms that a chat template may accept when it refuses their roles.

    The closest first: turns of one role in a row as one turn; then the system's as a part of what the user says.
    """
    yield _merged(turns)
    yield _merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])


def _merged(turns: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for turn in turns:
        last = merged[-1] if merged else {}
        if last.get("role") == turn["role"] != "tool" and last.keys() == turn.keys() == {"role", "content"}:
            merged[-1] = {**turn, "content": _put_together(last["content"], turn["content"])}
        else:
            merged.append(turn)
    return merged


def _put_together(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]


def _with_system(turns: list[Message], system_prompt: str) -> list[Message]:
    if not system_prompt or any(turn["role"] in {"system", "developer"} for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def _columns(row: Row) -> str:
    names = [repr(name)[1:-1][:40] for name in row]  # escaped: a name may have a line break
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20) or "(none)"
