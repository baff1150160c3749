"""Interpretation of a row: a conversation to learn, or a prompt with its reference answer.

Supported are OpenAI (`role`, `content`) and ShareGPT or LLaVA (`from`, `value`) turns, plain text, and two columns
such as `question` and `answer`, or Alpaca's `instruction`, `input` and `output`. `preferences.py` reads prompts with
two completions, `tool_calls.py` reads tools. `conversation.py` renders and tokenises.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from cosmos_core.data.columns import find_column, has_column_value, is_filled
from cosmos_core.data.encoded_turns import decode_conversation, decode_history
from cosmos_core.data.tool_calls import parse_sharegpt_calls, pop_tool_calls
from cosmos_core.data.turn_weights import check_content_part_keys, pop_turn_weight
from cosmos_core.errors import DataError, MissingColumn

Row = dict[str, Any]
Message = dict[str, Any]
"""A turn with `role`, `content` and other keys that chat templates read (`tool_calls`, `reasoning_content`, ...);
`weight` = 0 marks an assistant turn without a loss, whatever the key is named in the row's format."""

_TEXT_ONLY_MESSAGE = "this version learns from text alone where the model has no image processor"
_CONVERSATION_COLUMNS = ("messages", "conversations", "conversation", "text")
_PAIR_COLUMNS = (
    ("prompt", "response"), ("prompt", "completion"), ("question", "answer"), ("prompt", "answer"),
    ("question", "response"), ("instruction", "output"), ("instruction", "response"), ("input", "output"),
    ("query", "response"),
)  # fmt: skip
RESPONSE_COLUMNS = ("output", "response", "completion", "answer")
_INSTRUCTION_INPUT_COLUMNS = ("input", "context")  # columns of Alpaca and Dolly that continue `instruction`
PROMPT_COLUMNS = ("prompt", "question", "problem", "conversations", "messages", "query")
_SYSTEM_COLUMNS = ("system", "system_prompt")
_KNOWN_COLUMNS = {*_CONVERSATION_COLUMNS, *PROMPT_COLUMNS, *sum(_PAIR_COLUMNS, ())} - {*_INSTRUCTION_INPUT_COLUMNS}
REFERENCE_COLUMNS = ("answer", "response", "solution", "result", "ground_truth")
_STANDARD_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool",
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bing": "assistant",
    "bard": "assistant", "function_call": "assistant", "observation": "tool", "function": "tool", "prompter": "user",
    "ai": "assistant", "bot": "assistant", "chatbot": "assistant", "tool_call": "assistant", "tool_response": "tool",
}  # fmt: skip
_SHAREGPT_KEYS = ("value", "content", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
IMAGE_MARK_REGEX = re.compile("<image>")
# LLaVA puts <image> or <video> at the start or end of a turn; elsewhere in a turn these are ordinary words.
_MEDIA_MARK_REGEX = re.compile(r"\A\s*<(image|video)>|<(image|video)>\s*\Z")


class SkippedRow(DataError):
    """Error for a well-formed row without content to learn or complete; `prepare` counts the row under `reason`."""

    def __init__(self, location: str, reason: str) -> None:
        super().__init__(location, reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: skipped, {self.reason}"


class ColumnTrackingRow(Row):
    """Row of a data set that records which of its columns have been read."""

    def __init__(self, row: Row, column_names: Mapping[str, str], location: str) -> None:
        """Wrap a row. `column_names` maps standard names (`prompt`, `response`, `chosen`, `rejected`) to the names of
        the row's columns; these columns are read by the standard names. Raise DataError if one of them is missing."""
        if missing_columns := [name for name in column_names.values() if row.get(name) is None]:
            problem = f"no column {missing_columns[0]!r}, which the recipe names"
            raise DataError(f"{location}: {problem}; the row has {describe_columns(row)}")
        excluded_columns = _KNOWN_COLUMNS if "prompt" in column_names else column_names.keys()
        super().__init__({name: value for name, value in row.items() if name not in excluded_columns})
        self.update({standard_name: row[name] for standard_name, name in column_names.items()})
        self.original_row, self.column_names, self._read_columns = row, column_names, set[str]()
        self._filled_columns = [name for name, cell in row.items() if not isinstance(cell, str | list | None) or cell]

    def __getitem__(self, name: str) -> Any:
        self._read_columns.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default_value: Any = None) -> Any:
        """Return the value of the column `name`, or `default_value` if the row lacks it, and record the column as read.
        The function `has_column_value` looks for a value without recording."""
        self._read_columns.add(name)
        return super().get(name, default_value)

    @property
    def unread_columns(self) -> list[str]:
        """Return the names of the non-empty columns that have not been read."""
        read_columns = {self.column_names.get(name, name) for name in self._read_columns}
        return [name for name in self._filled_columns if name not in read_columns]


def read_plain_texts(row: Row, location: str, *column_aliases: tuple[str, ...]) -> list[str] | None:
    """Return the texts to concatenate for a model without a chat template, such as prompt and completion: one text per
    tuple in `column_aliases`, which has alternative names of one column. Return None if a column is missing or holds a
    list of turns, or if the row has a column with a conversation or a system prompt."""
    if any(is_filled(row, name) for name in _CONVERSATION_COLUMNS) or read_system_prompt(row):
        return None
    present_columns = [find_column(row, aliases) for aliases in column_aliases]
    text_values: list[Any] = [_read_column(row, name, location) if name else None for name in present_columns]
    return text_values if all(isinstance(value, str) for value in text_values) else None


def read_conversation(
    row: Row, location: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> list[Message] | str:
    """Return the conversation of a row as turns, or as a string if it is plain text. If prompt and response are in two
    columns, assistant turns of the prompt are not learned.

    `column` is the column to try first; if the row lacks it, the other known columns are tried. `system_prompt` is
    inserted at the beginning if the row has no system turn. `with_images` allows content that is a list of `text` and
    `image` parts or contains <image> (`images.py`).

    Raise DataError for a row without a known column, an unknown role, or content that is not text, and SkippedRow if
    the text or conversation is empty."""
    present_column = find_column(row, (column, *_CONVERSATION_COLUMNS))
    pair_columns: tuple[str, ...] = ()
    if not (present_column and is_filled(row, present_column)):
        present_pairs = [pair for pair in _PAIR_COLUMNS if all(has_column_value(row, name) for name in pair)]
        pair_columns = next((pair for pair in present_pairs if is_filled(row, *pair)), next(iter(present_pairs), ()))
    if present_column and not (pair_columns and is_filled(row, *pair_columns)):
        cell = row[present_column] if present_column == "text" else decode_conversation(row[present_column], location)
        if not isinstance(cell, str):
            turns = read_turns(cell, present_column, location, with_images)
            return add_system_turn(turns, read_system_prompt(row) or system_prompt)
        if not cell.strip():
            raise SkippedRow(location, "empty")
        return cell
    if pair_columns:
        prompt_turns = read_column_turns(row, pair_columns[0], "user", location, with_images)
        response_turns = read_column_turns(row, pair_columns[1], "assistant", location, with_images)
        num_turns = len(prompt_turns)  # find the overlap: the response may begin with the prompt or its last turns
        repeated_turn_indices = (i for i in range(num_turns) if prompt_turns[i:] == response_turns[: num_turns - i])
        first_repeated_turn = next(repeated_turn_indices, num_turns)
        if not isinstance(decode_conversation(row[pair_columns[0]]), str):  # do not learn assistant turns of the prompt
            prompt_turns = mask_assistant_turns(prompt_turns)
        turns = prompt_turns + response_turns[num_turns - first_repeated_turn :]
        return add_system_turn(turns, read_system_prompt(row) or system_prompt)
    remedy = "set train.train_policy.prompt_column_name and response_column_name"
    if not _has_response_column(row):  # suggest also the setting for one column, which may hold prompt and response
        remedy += ", or conversation_column_name for one column of turns or of plain text"
    if None in row.values():
        remedy = f"fill the null, or {remedy}"
    raise MissingColumn(f"{location}: no conversation among the columns {describe_columns(row)}; {remedy}")


def omits_response(row: Row, column: str) -> bool:
    """Return whether training on the plain text in `column` leaves out a response in another column."""
    is_plain_text = column not in {"", "text"} and isinstance(decode_conversation(row.get(column)), str)
    return is_plain_text and _has_response_column(row, column)


def _has_response_column(row: Row, ignored_column: str = "") -> bool:
    return any(has_column_value(row, column) for column in RESPONSE_COLUMNS if column != ignored_column)


def read_prompt(  # noqa: PLR0913 - column names, and flags whose defaults fit most rows
    row: Row,
    location: str,
    prompt_column: str = "",
    response_column: str = "",
    system_prompt: str = "",
    *,
    keeps_last_turn: bool = False,
    with_images: bool = False,
) -> tuple[list[Message], str]:
    """Return the prompt of a row as turns, and its reference answer ("" if there is none).

    A final assistant turn is removed from the prompt, and is the reference answer if no column holds a reference. With
    `keeps_last_turn` the turn stays in the prompt, for the policy to continue. `prompt_column` and `response_column`
    are the columns that the recipe names; empty: known columns. `with_images`: see `read_conversation`.
    Raise DataError if a named column or the prompt is missing, and SkippedRow for a row without a user turn."""
    for key, name in (("prompt_column_name", prompt_column), ("response_column_name", response_column)):
        if name in row and not has_column_value(row, name):
            raise DataError(f"{location}: column {name!r} (train_policy.{key}) is null; fill it, or leave the row out")
        if name and name not in row:
            raise DataError(f"{location}: no column {name!r} (train_policy.{key}); the row has {describe_columns(row)}")
    present_prompt_column = prompt_column or find_column(row, PROMPT_COLUMNS)
    if not present_prompt_column:
        remedy = "set train.train_policy.prompt_column_name"
        raise MissingColumn(f"{location}: no prompt among the columns {describe_columns(row)}; {remedy}")
    turns = read_column_turns(row, present_prompt_column, "user", location, with_images)
    turns = add_system_turn(turns, read_system_prompt(row) or system_prompt)
    reference_response = _read_reference_response(row, response_column, location)
    if keeps_last_turn and turns and turns[-1]["role"] == "assistant":
        return [*_extract_prompt(turns, "", location)[0], turns[-1]], reference_response or ""
    return _extract_prompt(turns, reference_response, location)


def read_held_out_prompt(
    row: Row, location: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> tuple[list[Message], str]:
    """Return the prompt of a held-out row, and its reference answer from a column or the last assistant turn. Raise
    DataError if the row is plain text or no conversation, and SkippedRow if it has no user turn."""
    conversation = read_conversation(row, location, column, system_prompt, with_images=with_images)
    if isinstance(conversation, str):
        remedy = "give validation.dataset conversations, or leave validation.reward_function empty to measure the loss"
        raise DataError(f"{location}: plain text has no prompt to complete; {remedy}")
    return _extract_prompt(conversation, _read_reference_response(row, "", location), location)


def _extract_prompt(turns: list[Message], reference_response: str | None, location: str) -> tuple[list[Message], str]:
    if turns and turns[-1]["role"] == "assistant":
        reference_response = "".join(get_turn_texts(turns[-1])) if reference_response is None else reference_response
        turns = turns[:-1]
    if not any(turn["role"] == "user" and is_filled(turn, "content") for turn in turns):
        raise SkippedRow(location, "without a user turn to answer")
    return turns, reference_response or ""


def _read_reference_response(row: Row, column: str, location: str) -> str | None:
    column = column or find_column(row, REFERENCE_COLUMNS)
    reward_model = None if column else row.get("reward_model")  # verl stores reference answers in `reward_model`
    cell = row[column] if column else reward_model.get("ground_truth") if isinstance(reward_model, dict) else None
    if cell is None:
        return None
    turns = decode_conversation(cell)
    last_turn = turns[-1] if isinstance(turns, list) and turns else None
    if isinstance(last_turn, dict) and _STANDARD_ROLES.get(_read_role(last_turn)) == "assistant":
        return "".join(get_turn_texts(_read_turn(last_turn, location, with_images=False)))
    try:
        return cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)
    except TypeError:  # columnar formats have values without a JSON form, such as dates and bytes
        raise DataError(f"{location}: column {column!r} holds {str(cell)[:40]!r}, no JSON; write it as text") from None


def read_column_turns(row: Row, column: str, role: str, location: str, with_images: bool = False) -> list[Message]:
    """Return the turns in a column, or the text in the column as one turn of `role`. For Alpaca's column `instruction`,
    the text in `input` or `context` is appended, and the turns in `history` are inserted before it."""
    cell = _read_column(row, column, location)
    if not isinstance(cell, str):
        return read_turns(cell, column, location, with_images)
    history_cell = row.get("history") if _is_column_named(row, column, "instruction", "query") else None
    turns = [*decode_history(history_cell, location), {"role": role, "content": cell}]
    return [{**turn, "content": read_content(turn["content"], location, with_images)} for turn in turns]


def _is_column_named(row: Row, column: str, *column_names: str) -> bool:
    return (row.column_names if isinstance(row, ColumnTrackingRow) else {}).get(column, column) in column_names


def _read_column(row: Row, column: str, location: str) -> Any:
    """Return the turns or the text of a column; `input` or `context` is appended to the text of `instruction`. Raise
    DataError if `input` or `context` is a number other than NaN, which is a missing value."""
    cell = decode_conversation(row[column])
    if isinstance(cell, str) and _is_column_named(row, column, "instruction"):
        for name in _INSTRUCTION_INPUT_COLUMNS:
            if isinstance(dict.get(row, name), int | float) and row[name] == row[name]:
                raise DataError(f"{location}: column {name!r} holds {str(row[name])[:40]!r}; write it as text")
        cell = "\n\n".join(filter(None, [cell, *(_get_text(row, name) for name in _INSTRUCTION_INPUT_COLUMNS)]))
    return cell


def _get_text(row: Row, column: str) -> str:
    """Return the text in a column, and record the column as read; empty if the column has no text or only blanks."""
    text = str(row[column]) if isinstance(dict.get(row, column), str) else ""
    return text if text.strip() else ""


def read_turns(cell: Any, column: str, location: str, with_images: bool = False) -> list[Message]:
    """Convert `cell`, a list of turns in a column, to the key names and forms that chat templates read. Raise DataError
    with the number of the turn if the value is not a list of turns, and SkippedRow if the list is empty."""
    if not isinstance(cell, list):
        raise DataError(f"{location}: column {column!r} holds {str(cell)[:40]!r}; write text, or a list of turns")
    if not cell:
        raise SkippedRow(location, "empty")
    turns: list[Message] = []
    for turn_number, turn in enumerate(cell, 1):
        message = _read_turn(turn, f"{location}, turn {turn_number} of {column!r}", with_images)
        is_not_continued = turn.get("tool_calls") or turn.get("function_call") or message["content"]
        calls = [] if is_not_continued else message.get("tool_calls", [])
        if calls and turns and turns[-1]["role"] == "assistant" and turns[-1].get("weight") == message.get("weight"):
            message = {**turns[-1], "tool_calls": [*turns.pop().get("tool_calls", []), *calls]}
        turns.append(message)
    return turns


def _read_turn(turn: Any, turn_location: str, with_images: bool) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{turn_location}: {str(turn)[:40]!r} is not a turn; write role and content, or from and value")
    # Drop keys with None, because Arrow gives each turn the keys of all turns, with None for missing values.
    turn = {key: value for key, value in turn.items() if value is not None}
    role = _read_role(turn)
    if role not in _STANDARD_ROLES:
        unknown_role = repr(turn.get("role", turn.get("from")))
        raise DataError(f"{turn_location}: unknown role {unknown_role[:40]}; known: {', '.join(_STANDARD_ROLES)}")
    weight_field = pop_turn_weight(turn, _STANDARD_ROLES[role], turn_location)
    if "role" not in turn:
        turn = {key: value for key, value in turn.items() if key in _SHAREGPT_KEYS}
    content_without_key = None if {"tool_calls", "function_call"}.isdisjoint(turn) else ""
    tool_calls_field = pop_tool_calls(turn, turn_location)
    content = read_content(turn.get("content", turn.pop("value", content_without_key)), turn_location, with_images)
    if role in {"function_call", "tool_call"} and (parsed_calls := parse_sharegpt_calls(content)):
        content, tool_calls_field = parsed_calls[0], {"tool_calls": parsed_calls[1]}
    return {**turn, "role": _STANDARD_ROLES[role], "content": content, **tool_calls_field, **weight_field}


def _read_role(turn: dict[str, Any]) -> str:
    return str(turn.get("role", turn.get("from"))).strip().lower()


def read_content(content: Any, location: str, with_images: bool = False) -> Any:
    """Normalise the content of a turn: return its text, or its parts if the turn shows images. Raise DataError if the
    content is neither text nor a list of text and image parts, or shows media that are not supported."""
    check_content_part_keys(content, location)
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    if with_images and isinstance(content, list):
        return [_normalise_content_part(part, location) for part in content]
    if not isinstance(content, str):
        remedy = _TEXT_ONLY_MESSAGE if isinstance(content, list) else "write it as text"
        raise DataError(f"{location}: content {str(content)[:40]!r} is not text; {remedy}")
    if media_mark := _MEDIA_MARK_REGEX.search(content):
        media_kind, remedy = media_mark[1] or media_mark[2], f"take rows without {media_mark[0].strip()}"
        if media_kind != "image" or not with_images:
            raise DataError(f"{location}: the turn shows an {media_kind}, and {_TEXT_ONLY_MESSAGE}; {remedy}")
    return content


def is_image_part(content_part: Any) -> bool:
    """Return whether a value is an image part of a turn's content."""
    return isinstance(content_part, dict) and content_part.get("type") in ("image", "image_url", "input_image")


def _is_text_part(part: Any) -> bool:
    is_text = isinstance(part, dict) and part.get("type") in (None, "text", "input_text", "output_text")
    return is_text and isinstance(part.get("text"), str)


def _normalise_content_part(part: Any, location: str) -> dict[str, Any]:
    """Normalise a part of a turn to `{"type": "text", "text": ...}`, or to `type` = `image` with the image's source."""
    if is_image_part(part):
        return {**{key: value for key, value in part.items() if value is not None}, "type": "image"}
    if _is_text_part(part):
        return {"type": "text", "text": part["text"]}
    raise DataError(f"{location}: the part {str(part)[:60]!r} is neither text nor an image, which is all that is read")


def mask_assistant_turns(turns: list[Message]) -> list[Message]:
    """Return the turns, in which each assistant turn is marked as not learned (`weight` = 0)."""
    return [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns]


def get_turn_texts(message: Message) -> list[str]:
    """Return the texts of a turn: one string, or one per text part if the turn shows images."""
    content = message["content"]
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def propose_merged_turns(turns: list[Message]) -> Iterator[list[Message]]:
    """Yield two alternative forms of the turns for a chat template that refuses their sequence of roles. In the first
    form, consecutive turns of one role are merged. In the second one, system turns have become user turns too."""
    yield merge_turns(turns)
    yield merge_turns([{**turn, "role": "user"} if turn["role"] in {"system", "developer"} else turn for turn in turns])


def merge_turns(unmerged_turns: list[Message]) -> list[Message]:
    """Merge consecutive turns of one role into one turn, except tool results and turns with extra keys."""
    merged_turns: list[Message] = []
    for turn in unmerged_turns:
        previous_turn = merged_turns[-1] if merged_turns else {}
        can_merge_by_keys = previous_turn.keys() == turn.keys() <= {"role", "content", "weight"}
        if can_merge_by_keys and previous_turn["role"] == turn["role"] != "tool":
            merged_turns[-1] = {**turn, "content": _join_contents(previous_turn["content"], turn["content"])}
        else:
            merged_turns.append(turn)
    return merged_turns


def _join_contents(content: Any, added_content: Any) -> Any:
    if isinstance(content, str) and isinstance(added_content, str):
        return f"{content}\n\n{added_content}"
    parts, added_parts = ([{"type": "text", "text": e}] if isinstance(e, str) else e for e in (content, added_content))
    return [*parts, {"type": "text", "text": "\n\n"}, *added_parts]


def read_system_prompt(row: Row) -> str:
    """Return the system prompt in a column of the row; empty if there is none."""
    return next(filter(None, (_get_text(row, column) for column in _SYSTEM_COLUMNS)), "")


def add_system_turn(turns: list[Message], system_prompt: str) -> list[Message]:
    """Insert the system prompt before the turns, unless they already have a system or developer turn."""
    if not system_prompt or any(turn["role"] in {"system", "developer"} for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def describe_columns(row: Row) -> str:
    """Return the escaped names of a row's columns for an error message, with "(null)" after columns without a value."""
    column_descriptions = [
        (repr(name)[1:-1][:40] or "(unnamed)") + " (null)" * (value is None) for name, value in row.items()
    ]
    return ", ".join(column_descriptions[:20]) + ", ..." * (len(column_descriptions) > 20) or "(none)"
