"""Reader of preference rows: a prompt with a chosen and a rejected completion, or with a completion and a label."""

from typing import Any, NamedTuple

from cosmos_core.data.columns import find_column, has_column_value, is_filled
from cosmos_core.data.encoded_turns import decode_conversation
from cosmos_core.data.messages import (
    IMAGE_MARK_REGEX,
    Message,
    Row,
    SkippedRow,
    add_system_turn,
    describe_columns,
    get_turn_texts,
    mask_assistant_turns,
    merge_turns,
    read_column_turns,
    read_content,
    read_conversation,
    read_system_prompt,
    read_turns,
)
from cosmos_core.data.spans import common_prefix_length
from cosmos_core.errors import DataError, MissingColumn

_PROMPT_COLUMNS = ("prompt", "question", "instruction", "query", "problem")
_CONVERSATION_COLUMNS = ("messages", "conversations")
_SWIFT_REJECTED_COLUMNS = ("rejected_messages", "rejected_response")
_LABEL_BY_CELL_TEXT = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


class Preference(NamedTuple):
    """Prompt with a chosen and a rejected completion, all three as lists of turns or all three as plain text."""

    prompt: list[Message] | str
    chosen: list[Message] | str
    rejected: list[Message] | str


def read_preference(
    row: Row, location: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> Preference:
    """Return the prompt and the chosen and rejected completion of a row, all as turns or all as plain text.

    Without a prompt column the prompt is the common beginning of `chosen` and `rejected`: their common turns, or the
    common prefix of two plain texts. If the completions begin with the prompt or its last turns, these are removed.
    From plain texts only a prompt of several lines is removed, because a response can begin like a short question.

    `column` is the prompt column to try first; if the row lacks it, `prompt` and other known columns are tried. For
    `system_prompt` and `with_images` see `read_conversation`.
    Raise DataError if `chosen`, `rejected` or the prompt is missing or has the wrong form, and SkippedRow if the
    completions are equal or empty, or the prompt is empty."""
    chosen_turns, rejected_turns = _read_completions(row, location, with_images)
    if chosen_turns == rejected_turns:
        raise SkippedRow(location, "with equal chosen and rejected")
    chosen_roles = [turn["role"] for turn in chosen_turns if isinstance(turn, dict)]
    is_swift_conversation = bool(chosen_roles) and not has_column_value(row, "chosen")
    has_prompt_turns = "user" in chosen_roles or (is_swift_conversation and chosen_roles[0] != "assistant")
    # If the completions contain the prompt, ignore columns of turns, which would repeat the prompt and a completion.
    # Read `input` as a prompt only if the row has no `instruction`, which `input` would continue.
    conversation_columns = () if has_prompt_turns else (*_CONVERSATION_COLUMNS, "input")
    prompt_column = find_column(row, (column, *_PROMPT_COLUMNS, *conversation_columns)) or None
    if prompt_column is None and isinstance(chosen_turns, str) and isinstance(rejected_turns, str):
        if any(name in row for name in (column, *_PROMPT_COLUMNS)):
            raise SkippedRow(location, "without a prompt")
        return _split_plain_preference(chosen_turns, rejected_turns, location)
    prompt = [] if prompt_column is None else read_column_turns(row, prompt_column, "user", location, with_images)
    if len(prompt) == 1 and (texts := remove_repeated_prompt(prompt[0]["content"], chosen_turns, rejected_turns)):
        chosen_turns, rejected_turns = (text.lstrip() for text in texts)
    chosen, rejected = (
        [{"role": "assistant", "content": each}] if isinstance(each, str) else each
        for each in (chosen_turns, rejected_turns)
    )
    if "assistant" not in {chosen[0]["role"], rejected[0]["role"]}:
        shared_turns = chosen[: common_prefix_length(chosen, rejected)]
        chosen, rejected = chosen[len(shared_turns) :], rejected[len(shared_turns) :]
        prompt = _select_longer_prompt(prompt, shared_turns, prompt_column, location) if shared_turns else []
    if any(not turns or turns[0]["role"] != "assistant" for turns in (chosen, rejected)):
        raise SkippedRow(location, "whose chosen and rejected answer different prompts")
    if any(turn.get("weight") == 0 for turn in (*chosen, *rejected)):
        problem = "weight = 0 in `chosen` or `rejected` or loss = false"
        raise DataError(f"{location}: {problem}: they are compared as a whole; leave it out")
    if not prompt and prompt_column is None:
        remedy = "name it `prompt`, or set train.train_policy.prompt_column_name"
        raise MissingColumn(f"{location}: no prompt among the columns {describe_columns(row)}; {remedy}")
    if not any(turn["role"] != "assistant" and is_filled(turn, "content") for turn in prompt):
        raise SkippedRow(location, "without a prompt")
    if prompt[-1]["role"] == "assistant":
        raise DataError(f"{location}: the prompt ends with an assistant turn; end it with the turn to respond to")
    final_response_turns = (chosen[-1], rejected[-1])
    if not all(any(map(str.strip, get_turn_texts(turn))) or "tool_calls" in turn for turn in final_response_turns):
        raise SkippedRow(location, "with an empty answer")
    prompt = add_system_turn(prompt, read_system_prompt(row) or system_prompt)
    return Preference(prompt, merge_turns(chosen), merge_turns(rejected))


def remove_repeated_prompt(prompt: Any, *completions: Any) -> list[str]:
    """Return completions without the prompt at their beginning. Return an empty list if one of them does not begin with
    the prompt, or if the prompt is a single line."""
    has_prompt_lines = isinstance(prompt, str) and "\n" in prompt.strip()
    repeats_prompt = has_prompt_lines and all(isinstance(text, str) and text.startswith(prompt) for text in completions)
    return [text[len(prompt) :] for text in completions] if repeats_prompt else []


def read_label(row: Row, location: str) -> bool:
    """Return whether the completion of a row is desirable; raise DataError if the row has no valid label."""
    cell = row.get(find_column(row, ("label", "kto_tag")) or "label")
    if (label := _LABEL_BY_CELL_TEXT.get(str(cell).lower())) is None:
        problem = f"label {cell!r} among the columns {describe_columns(row)} must be true or false, or 1 or 0"
        remedy = "set train.train_policy.label_column_name to the column that says whether the response is desirable"
        raise DataError(f"{location}: {problem}; {remedy}")
    return label


def read_labelled_conversation(
    row: Row, location: str, column: str = "", system_prompt: str = "", *, with_images: bool = False
) -> list[Message]:
    """Return the conversation of a row with a label; only turns after the last user turn are learned. Raise SkippedRow
    if there is no user turn, DataError for plain text, and the errors of `read_label` and `read_conversation`."""
    read_label(row, location)
    turns = read_conversation(row, location, column, system_prompt, with_images=with_images)
    if isinstance(turns, str):
        remedy = "give `prompt` and `completion` with the label, or turns"
        raise DataError(f"{location}: plain text has no prompt; {remedy}")
    last_user_index = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    if last_user_index < 0:
        raise SkippedRow(location, "without a prompt")
    return mask_assistant_turns(turns[:last_user_index]) + turns[last_user_index:]


def _select_longer_prompt(
    prompt: list[Message], shared_turns: list[Message], column: str | None, location: str
) -> list[Message]:
    """Return the longer prompt of a preference row, which must contain the other one: `prompt`, the turns in the prompt
    column, or `shared_turns`, with which both completions begin. Shared system turns are put before a prompt without
    system turn. Raise DataError if neither contains the other."""
    # Compare roles and words of turns only, because whitespace and the form of images may differ.
    prompt_words, shared_words = (
        [(turn["role"], IMAGE_MARK_REGEX.sub(" ", " ".join(get_turn_texts(turn))).split()) for turn in turns]
        for turns in (prompt, shared_turns)
    )
    is_prompt_empty, num_prompt_turns = not any(words for _, words in prompt_words), len(prompt_words)
    if is_prompt_empty or any(shared_words[i : i + num_prompt_turns] == prompt_words for i in range(len(shared_words))):
        return shared_turns
    if prompt_words[-len(shared_words) :] == shared_words:
        return prompt
    system_roles = {"system", "developer"}
    if all(turn["role"] in system_roles for turn in shared_turns) and prompt[0]["role"] not in system_roles:
        return [*shared_turns, *prompt]
    text, text_of_shared_turn = (" ".join(get_turn_texts(turns[-1]))[:40] for turns in (prompt, shared_turns))
    problem = f"column {column!r} says {text!r} and `chosen` begins with {text_of_shared_turn!r}"
    raise DataError(f"{location}: {problem}; give one prompt")


def _read_completions(row: Row, location: str, with_images: bool) -> list[list[Message] | str]:
    """Return the chosen and the rejected completion of a row. In rows of ms-swift the chosen completion is in a column
    of turns or in `response`, and the rejected one in `rejected_messages` or `rejected_response`. If the rejected one
    begins with an assistant turn, it is put after the last user turn of the chosen one. Older rows of LLaMA-Factory
    have both as a list in `output`."""
    outputs = None if has_column_value(row, "chosen") else row.get("output")
    if isinstance(outputs, list) and len(outputs) == 2 and all(isinstance(output_text, str) for output_text in outputs):
        return [read_content(output_text, location) for output_text in outputs]
    rejected_column = find_column(row, _SWIFT_REJECTED_COLUMNS)
    chosen_column = find_column(row, (*_CONVERSATION_COLUMNS, "response"))
    if has_column_value(row, "chosen") or not (rejected_column and chosen_column):
        return [_read_completion(row, name, location, with_images) for name in ("chosen", "rejected")]
    column_names = (chosen_column, rejected_column)
    chosen, rejected = (_read_completion(row, name, location, with_images) for name in column_names)
    if isinstance(chosen, str):
        return [chosen, rejected]
    rejected = [{"role": "assistant", "content": rejected}] if isinstance(rejected, str) else rejected
    chosen_roles = [turn["role"] for turn in chosen]
    num_leading_turns = chosen_roles.index("assistant") if "assistant" in chosen_roles else 0
    num_prompt_turns = max((i for i, role in enumerate(chosen_roles, 1) if role == "user"), default=num_leading_turns)
    return [chosen, rejected if rejected[0]["role"] != "assistant" else [*chosen[:num_prompt_turns], *rejected]]


def _read_completion(row: Row, column: str, location: str, with_images: bool) -> list[Message] | str:
    completion = row.get(column)
    if completion is None:
        remedy = f"give both completions, or set train.train_policy.{column}_column_name"
        raise MissingColumn(f"{location}: no {column!r} among the columns {describe_columns(row)}; {remedy}")
    completion = decode_conversation(completion, location)
    if isinstance(completion, str):
        return read_content(completion, location)
    return read_turns([completion] if isinstance(completion, dict) else completion, column, location, with_images)


def _split_plain_preference(chosen: str, rejected: str, location: str) -> Preference:
    prompt = chosen[: common_prefix_length(chosen, rejected)]
    if not prompt.strip():
        problem = "the texts of `chosen` and `rejected` begin differently, and there is no column `prompt`"
        raise DataError(f"{location}: {problem}; give one, or set train.train_policy.prompt_column_name")
    if prompt in {chosen, rejected}:
        raise SkippedRow(location, "with an empty answer")
    return Preference(prompt, chosen[len(prompt) :], rejected[len(prompt) :])
