"""Spans of characters of the assistant's turns in a rendered conversation, for any chat template.

A span runs from the end of the generation prompt to the end of the token that closes the turn: exactly the text that a
model has to generate. Each of the two methods checks its result against the rendering, and returns None if it fails.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from cosmos_core.data.messages import Message, texts_of

Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""Function that renders messages, with the generation prompt if its second argument is True; raises TemplateError."""
TextBeforeCompletion = tuple[str, str]
"""Text that the template writes before a completion, and the rest of the generation prompt, with which the completion
may begin."""


def prefix_spans(render: Render, messages: list[Message], full: str) -> list[Span] | None:
    """Return the assistant's spans by rendering the conversation up to and through each turn; None if this fails.

    Each rendering must be a prefix of `full`. This fails for templates that render the last turn differently from
    earlier turns, for example without the think blocks of earlier turns.
    """
    spans = []
    for i in _assistant_turns(messages):
        try:
            text_before, through = render(messages[:i], True), render(messages[: i + 1], False)
        except TemplateError:  # some templates refuse a part of a conversation, e.g. without a user turn
            return None
        if not (through.startswith(text_before) and full.startswith(through)):
            return None
        spans.append((len(text_before), len(through)))
    return spans


def spans_by_placeholders(
    render: Render, messages: list[Message], full: str, closing_tokens: Sequence[str]
) -> list[Span] | None:
    """Return the assistant's spans by rendering a placeholder for each completion, and locating the other text in
    `full`; None if this fails.

    Text between the generation prompt and a completion, such as an empty think block, belongs to the span.
    """
    turns = _assistant_turns(messages)
    unused = _unused_word(messages)
    words = [f"{unused}{k}x" for k in range(len(turns))]
    with_placeholders = list(messages)
    for i, word in zip(turns, words, strict=True):
        is_text = isinstance(messages[i]["content"], str)
        with_placeholders[i] = {**messages[i], "content": word if is_text else [{"type": "text", "text": word}]}
        with_placeholders[i].pop("tool_calls", None)  # tool calls belong to the completion
    try:
        template_parts = _split_at(render(with_placeholders, False), words)
        parts_up_to_last_turn = _split_at(render(with_placeholders[: turns[-1] + 1], False), words)
        if template_parts is None or parts_up_to_last_turn is None:
            return None
        texts_before = _texts_before_completions(render, with_placeholders, turns, template_parts)
    except TemplateError:
        return None
    turn_ends = [_turn_end(part, parts_up_to_last_turn[-1], closing_tokens) for part in template_parts[1:]]
    return _locate_completions(full, texts_before, template_parts[-1], turn_ends)


def trimmed(span: Span, text: str, closing_tokens: Sequence[str]) -> Span:
    """Return the span without the whitespace that a template writes after the token that closes the turn."""
    start, end = span
    stripped = text[start:end].rstrip()
    return (start, start + len(stripped)) if stripped.endswith(tuple(closing_tokens)) else span


def num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _assistant_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _unused_word(messages: list[Message]) -> str:
    """Return a word that does not occur in the messages."""
    word = "zqturn"
    while any(word in str(message) for message in messages):
        word += "q"
    return word


def _split_at(text: str, words: list[str]) -> list[str] | None:
    """Split a text at `words` and return the parts; None unless each word occurs exactly once, in order."""
    parts = []
    for word in words:
        if text.count(word) != 1:
            return None
        part, text = text.split(word)
        parts.append(part)
    return [*parts, text]


def _texts_before_completions(
    render: Render, messages: list[Message], turns: list[int], template_parts: list[str]
) -> list[TextBeforeCompletion]:
    """Return the text of the template before each completion, up to the end of its generation prompt."""
    first, last = (_generation_prompt(render, messages[:i]) for i in (turns[0], turns[-1]))
    texts_before = []
    for number, i in enumerate(turns):
        generation_prompt = first if first == last else _generation_prompt(render, messages[:i])
        part, last_text = template_parts[number], _last_text(messages[max(0, i - 1) : i])
        if generation_prompt is None:
            texts_before.append((part, ""))
        else:
            texts_before.append(_split_at_generation_prompt(part, last_text, *generation_prompt))
    return texts_before


def _generation_prompt(render: Render, preceding_messages: list[Message]) -> tuple[str, str] | None:
    """Return the template's text between the last turn and a completion: the turn's end, and the generation prompt.
    Return None if adding the generation prompt changes the rendering of the turns."""
    try:
        without, with_prompt = render(preceding_messages, False), render(preceding_messages, True)
    except TemplateError:
        if any(turn["role"] == "user" for turn in preceding_messages):
            raise
        # Templates refuse an empty conversation, and some need a user turn, so render an arbitrary user turn before.
        preceding_messages = [*preceding_messages, {"role": "user", "content": _unused_word(preceding_messages)}]
        without, with_prompt = render(preceding_messages, False), render(preceding_messages, True)
    if not with_prompt.startswith(without):
        return None
    last_text = _last_text(preceding_messages)
    return without[without.rfind(last_text) + len(last_text) :], with_prompt[len(without) :]


def _last_text(preceding_messages: list[Message]) -> str:
    """Return the last text of the last turn; empty if there is no turn or no text."""
    texts = texts_of(preceding_messages[-1]) if preceding_messages else []
    return texts[-1].strip() if texts else ""


def _split_at_generation_prompt(part: str, asked: str, turn_end: str, prompt: str) -> TextBeforeCompletion:
    """Return `part` up to the end of the generation prompt or of its longest prefix, and the rest of the prompt. If a
    generation prompt ends with `<think>`, a completion without thoughts follows only a prefix of the prompt."""
    candidate = asked + turn_end + prompt
    if candidate in part:
        return part[: part.rfind(candidate) + len(candidate)], ""
    # Search after the user's text: it may contain the generation prompt, or, if short, occur in the generation prompt.
    preceding_text = next((words for words in (asked + turn_end, asked) if words in part), None)
    if preceding_text is None or not prompt:
        return part, ""
    search_start = part.rfind(preceding_text) + len(preceding_text) if preceding_text else 0
    for length in range(len(prompt), 0, -1):
        position = part.rfind(prompt[:length], search_start)
        # Without preceding user text to search from, a short prefix of the prompt may match unrelated text.
        if position >= 0 and (preceding_text or length == len(prompt) or part.endswith(prompt[:length])):
            return part[: position + length], prompt[length:]
    return part, ""


def _turn_end(part: str, end_of_conversation: str, closing_tokens: Sequence[str]) -> str:
    """Return the beginning of the template's text after a completion that closes the turn.

    This is the common prefix with the last turn's ending, up to the end of a whole token: `<|end|><|user|>` and
    `<|end|><|endoftext|>` share `<|end|><|`, of which `<|end|>` is returned.
    """
    shared = num_shared(part, end_of_conversation)
    end_positions = [part.rfind(token, 0, shared) + len(token) for token in closing_tokens if token in part[:shared]]
    return part[: max(end_positions)] if end_positions else part[:shared]


def _locate_completions(
    full: str, texts_before: list[TextBeforeCompletion], text_after: str, turn_ends: list[str]
) -> list[Span] | None:
    """Return the spans between the template's texts, each with the text that closes its turn; None if ambiguous."""
    parts = [part for part, _ in texts_before]
    first, last = len(parts[0]), len(full) - len(text_after)
    if not full.startswith(parts[0]) or not full.endswith(text_after) or "" in parts[1:]:
        return None
    stops = _earliest_positions(full[:last], parts[1:], first)
    # Spans are ambiguous if a turn quotes the template's text between two turns, with its control tokens.
    if stops is None or stops != _latest_text_positions(full[:last], parts[1:], first):
        return None
    spans = []
    begin = first
    for (_, missing_rest), next_text, end, turn_end in zip(
        texts_before, [*parts[1:], ""], [*stops, last], turn_ends, strict=True
    ):
        begin += len(missing_rest) * full.startswith(missing_rest, begin, end)
        spans.append((begin, end + len(turn_end)))
        begin = end + len(next_text)
    return spans


def _earliest_positions(text: str, parts: list[str], start: int) -> list[int] | None:
    """Return the positions of `parts` in a text, in order and each as early as possible; None if a part is missing."""
    positions = []
    for part in parts:
        positions.append(text.find(part, start))
        start = positions[-1] + len(part)
        if positions[-1] < 0:
            return None
    return positions


def _latest_text_positions(text: str, parts: list[str], start: int) -> list[int]:
    """Return the positions of `parts` in a text, in order and each as late as possible; all parts must occur."""
    positions: list[int] = []
    for part in reversed(parts):
        positions.insert(0, text.rfind(part, start, positions[0] if positions else len(text)))
    return positions
