"""What a row means: a conversation to learn, or a prompt with its reference answer.

Understood are OpenAI (`role`, `content`) and ShareGPT or LLaVA (`from`, `value`) turns, plain text, and two columns
such as `question` and `answer`, or Alpaca's `instruction`, `input` and `output`. A prompt with two completions is
`preferences.py`, tools are `tool_calls.py`. Nothing is rendered or tokenised here (`conversation.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from cosmos_core.data.tool_calls import calls_of, parsed, with_objects
from cosmos_core.data.turn_weights import check_parts, take_weight
from cosmos_core.errors import DataError

Row = dict[str, Any]
Message = dict[str, Any]
"""`role` and `content`, and what else a chat template may read (`tool_calls`, `reasoning_content`, ...); `weight` = 0:
an assistant turn that is not learned, however the row says so."""

_TEXT_ALONE = "this version learns from text alone where the model has no image processor"
_CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "text")
_PAIR_COLUMNS = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("prompt", "answer"),
    ("question", "response"), ("instruction", "output"), ("instruction", "response"), ("input", "output"),
)  # fmt: skip
_RESPONSE_COLUMNS = ("output", "response", "completion", "answer")
_BEHIND_AN_INSTRUCTION = ("input", "context")  # as Alpaca and Dolly have it
_PROMPT_COLUMNS = ("prompt", "question", "problem", "conversations", "messages")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_KNOWN = {*_CONVERSATION_COLUMNS, *_PROMPT_COLUMNS, *_BEHIND_AN_INSTRUCTION, *chain.from_iterable(_PAIR_COLUMNS)}
_REFERENCE_COLUMNS = ("answer", "response", "solution", "result")
_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bing": "assistant",
    "bard": "assistant", "function_call": "assistant", "observation": "tool",
}  # fmt: skip
_MEDIA_COLUMNS = ("image", "images", "video", "videos")
IMAGE_MARK = re.compile("<image>")
# At either end of a turn, where LLaVA puts it; in the middle of a sentence it is a word like any other.
_MEDIA_MARK = re.compile(r"\A\s*<(image|video)>|<(image|video)>\s*\Z")


def remedy_of(most: float, *, is_all: bool) -> str:
    """Return the end of a message about rows that cannot be used, of which a fraction of `most` may be left out."""
    if is_all:
        return "none of those read can be: this training reads rows of another form; name their columns, or give others"
    return f"more than dataset.max_skipped_fraction = {most:g} allows; mend them, or raise it"


class SkippedRow(DataError):
    """A row of the right form with nothing to learn or to complete in it: `prepare` counts `reason` and goes on."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: skipped, {self.reason}"


class ReadRow(Row):
    """A row that keeps the names of the columns whose values were taken."""

    def __init__(self, row: Row, own_names: Mapping[str, str], where: str) -> None:
        """`own_names`: of known columns, `prompt`, `response`, `chosen` and `rejected`, to those of the row.

        Raises:
            DataError: the row has no column of such a name.
        """
        if missing := [name for name in own_names.values() if row.get(name) is None]:
            raise DataError(f"{where}: no column {missing[0]!r}, which the recipe names; the row has {columns_of(row)}")
        hidden = _KNOWN if "prompt" in own_names else own_names.keys()
        super().__init__({name: value for name, value in row.items() if name not in hidden})
        self.update({known: row[name] for known, name in own_names.items()})
        self._own_names, self._taken = own_names, set[str]()
        self._columns = [
            name for name, value in row.items() if value is not None and not (isinstance(value, str) and not value)
        ]

    def __getitem__(self, name: str) -> Any:
        self._taken.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, which is taken with that; `has` looks without taking it."""
        self._taken.add(name)
        return super().get(name, default)

    @property
    def unread(self) -> list[str]:
        """Return the columns with a value that nothing has taken."""
        taken = {self._own_names.get(name, name) for name in self._taken}
        return [name for name in self._columns if name not in taken]


def has(row: Row, column: str) -> bool:
    """Return whether a row has a value in a column."""
    return column in row and dict.get(row, column) is not None


def plain_texts(row: Row, *columns: str | tuple[str, ...]) -> list[str] | None:
    """Return the texts of columns, of several names the first that there is; None: one is missing or holds turns.

    They stand one behind the other as they are: so a model without a chat template is given a prompt and completions.
    """
    if any(has(row, name) for name in _CONVERSATION_COLUMNS):
        return None
    names = [[column] if isinstance(column, str) else column for column in columns]
    found = [next((name for name in known if has(row, name)), "") for known in names]
    values = [decoded(row[name]) for name in found if name]
    is_text = len(values) == len(columns) and all(isinstance(value, str) for value in values)
    return values if is_text and not system_of(row) else None


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
    found = next((c for c in (column, *_CONVERSATION_COLUMNS) if has(row, c)), None)
    if found is not None:
        value = row[found] if found == "text" else decoded(row[found])
        if not isinstance(value, str):
            return with_system(read_turns(value, found, where, with_images), system_of(row) or system_prompt)
        if not value.strip():
            raise SkippedRow(where, "empty")
        return value
    for question, response in _PAIR_COLUMNS:
        if has(row, question) and has(row, response):
            asked = as_turns(row, question, "user", where, with_images)
            responded = as_turns(row, response, "assistant", where, with_images)
            return with_system(asked + responded, system_of(row) or system_prompt)
    remedy = "set train.train_policy.prompt_column_name and response_column_name"
    if not _has_response(row):  # which the column of a conversation would leave out
        remedy += ", or conversation_column_name for one column of turns or of plain text"
    raise DataError(f"{where}: no conversation among the columns {columns_of(row)}; {remedy}")


def leaves_out_response(row: Row, column: str) -> bool:
    """Return whether to read a column of that name is to learn its text alone, and nothing of what responds to it."""
    is_text = column not in {"", "text"} and isinstance(decoded(row.get(column)), str)
    return is_text and _has_response(row, column)


def _has_response(row: Row, beside: str = "") -> bool:
    return any(has(row, column) for column in _RESPONSE_COLUMNS if column != beside)


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
        if name in row and not has(row, name):
            raise DataError(f"{where}: column {name!r} (train_policy.{key}) is null; fill it, or leave the row out")
        if name and name not in row:
            raise DataError(f"{where}: no column {name!r} (train_policy.{key}); the row has {columns_of(row)}")
    column = prompt_column or next((c for c in _PROMPT_COLUMNS if has(row, c)), "")
    if not column:
        raise DataError(
            f"{where}: no prompt among the columns {columns_of(row)}; set train.train_policy.prompt_column_name"
        )
    turns = with_system(as_turns(row, column, "user", where, with_images), system_of(row) or system_prompt)
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


def _ask(turns: list[Message], reference: str | None, where: str) -> tuple[list[Message], str]:
    if turns and turns[-1]["role"] == "assistant":
        reference = "".join(texts_of(turns[-1])) if reference is None else reference
        turns = turns[:-1]
    if not any(turn["role"] == "user" and any(map(str.strip, texts_of(turn))) for turn in turns):
        raise SkippedRow(where, "without a user turn to answer")
    return turns, reference or ""


def _reference(row: Row, column: str, where: str) -> str | None:
    column = column or next((c for c in _REFERENCE_COLUMNS if has(row, c)), "")
    if not column:
        return None
    value = row[column]
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except TypeError:  # columnar formats hold dates, decimals and bytes
        raise DataError(f"{where}: column {column!r} holds {str(value)[:40]!r}, no JSON; write it as text") from None


def as_turns(row: Row, column: str, role: str, where: str, with_images: bool = False) -> list[Message]:
    """Return the turns that a column holds, or its text as one turn of the role; behind an instruction stands what it
    is about."""
    value = decoded(row[column])
    if not isinstance(value, str):
        return read_turns(value, column, where, with_images)
    if column == "instruction":
        value = "\n\n".join([value, *filter(None, (_text(row, name) for name in _BEHIND_AN_INSTRUCTION))])
    return [{"role": role, "content": read_content(value, where, with_images)}]


def _text(row: Row, column: str) -> str:
    """Return what a column says; empty: nothing, or no text."""
    value = row.get(column)
    return value if isinstance(value, str) and value.strip() else ""


def decoded(value: Any) -> Any:
    """Return a conversation that a format without lists, such as CSV, holds as JSON; anything else as it is."""
    turns = parsed(value) if isinstance(value, str) and re.match(r"\s*\[\s*\{", value) else None
    is_talk = turns and all(isinstance(turn, dict) and {"role", "from"} & turn.keys() for turn in turns)
    return turns if is_talk else value


def read_turns(value: Any, column: str, where: str, with_images: bool = False) -> list[Message]:
    """Return a list of turns with the names and forms that chat templates read.

    Raises:
        DataError: it is no such list, and the message names the turn.
        SkippedRow: it is empty.
    """
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
    weight = take_weight(turn, _ROLES[role], where)
    if "role" not in turn:
        content = read_content(turn.get("value"), where, with_images)
        calls = calls_of(content) if role == "function_call" else None
        said = {"content": content} if calls is None else {"content": "", "tool_calls": calls}
        return {"role": _ROLES[role], **said, **weight}
    content = read_content(turn.get("content", "" if "tool_calls" in turn else None), where, with_images)
    called = {"tool_calls": with_objects(turn["tool_calls"])} if "tool_calls" in turn else {}
    return {**turn, "role": _ROLES[role], "content": content, **called, **weight}


def read_content(content: Any, where: str, with_images: bool = False) -> Any:
    """Return the text of a turn, or its parts where it shows images.

    Raises:
        DataError: it is neither, or shows what is not read.
    """
    check_parts(content, where)
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
    yield merged(turns)
    yield merged([{**turn, "role": "user"} if turn["role"] == "system" else turn for turn in turns])


def merged(turns: list[Message]) -> list[Message]:
    """Return the turns with those of one role in a row as one turn."""
    found: list[Message] = []
    for turn in turns:
        last = found[-1] if found else {}
        if last.get("role") == turn["role"] != "tool" and last.keys() == turn.keys() <= {"role", "content", "weight"}:
            found[-1] = {**turn, "content": _put_together(last["content"], turn["content"])}
        else:
            found.append(turn)
    return found


def _put_together(first: Any, second: Any) -> Any:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts = [[{"type": "text", "text": each}] if isinstance(each, str) else each for each in (first, second)]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]


def system_of(row: Row) -> str:
    """Return what a column says to put before the turns; empty: there is none."""
    return next(filter(None, (_text(row, column) for column in _SYSTEM_COLUMNS)), "")


def with_system(turns: list[Message], system_prompt: str) -> list[Message]:
    """Return the turns with the system prompt before them, unless they have one of their own."""
    if not system_prompt or any(turn["role"] in {"system", "developer"} for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def columns_of(row: Row) -> str:
    """Return the names of a row's columns for a message."""
    names = [repr(name)[1:-1][:40] for name in row]  # escaped: a name may have a line break
    return ", ".join(names[:20]) + ", ..." * (len(names) > 20) or "(none)"


def columns_for_rewards(row: Row, prompt: list[Message]) -> str:
    """Return the columns of a row as JSON without bytes, the prompt under `prompt`: a text where a column holds it as
    one, else the turns."""
    asked = [turn["content"] for turn in prompt if turn["role"] != "system"]
    is_text = len(asked) == 1 and isinstance(asked[0], str) and any(asked[0] == value for value in row.values())
    columns = {name: value for name, value in row.items() if name not in _MEDIA_COLUMNS}
    return json.dumps(_plain({**columns, "prompt": asked[0] if is_text else prompt}), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if _shows_image(value):
            return {"type": "image"}
        return {str(name): _plain(each) for name, each in value.items() if not isinstance(each, bytes)}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.tolist() if hasattr(value, "tolist") else value
