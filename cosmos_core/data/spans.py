"""Where the assistant speaks in a rendered conversation, for any chat template, as spans of characters.

A span runs from the end of the generation prompt to the end of the token that closes the turn: exactly what a model
has to write. Two methods, each proven against the rendering before it is believed; `None` says "not this way".
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence

from jinja2.exceptions import TemplateError

from cosmos_core.data.messages import Message

Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""Messages, and whether to add the generation prompt, to text."""


def prefix_spans(render: Render, messages: list[Message], full: str) -> list[Span] | None:
    """Render the conversation up to and through each assistant turn; each must be a beginning of the whole.

    Not so for templates that treat the last turn in another way, e.g. remove think blocks of the earlier ones.
    """
    spans = []
    for i in _assistant_turns(messages):
        try:
            before, through = render(messages[:i], True), render(messages[: i + 1], False)
        except (TemplateError, IndexError):  # some templates refuse a beginning, e.g. one without a user turn
            return None
        if not (through.startswith(before) and full.startswith(through)):
            return None
        spans.append((len(before), len(through)))
    return spans


def skeleton_spans(render: Render, messages: list[Message], full: str) -> list[Span] | None:
    """Render with a unique word in place of each answer, and find the parts that stayed the same in the whole.

    What the template puts between the generation prompt and an answer (an empty think block) counts as answer.
    """
    turns = _assistant_turns(messages)
    if any("tool_calls" in messages[i] for i in turns):
        return None  # the calls would stand among the fixed parts, but the model has to write them
    words = [f"{_unused_word(messages)}{k}x" for k in range(len(turns))]
    hollow = list(messages)
    for i, word in zip(turns, words, strict=True):
        hollow[i] = {**messages[i], "content": word}
    try:
        fixed = _split_at(render(hollow, False), words)
        ending = _split_at(render(hollow[: turns[-1] + 1], False), words)
        if fixed is None or ending is None:
            return None
        heads = [_head(render, hollow[:i], part) for i, part in zip(turns, fixed, strict=False)]
    except (TemplateError, IndexError):
        return None
    return _align(full, heads, tail=fixed[-1], closer=ending[-1])


def trimmed(span: Span, text: str, closing_tokens: Sequence[str]) -> Span:
    """The span without the blanks that a template writes after the token that closes the turn."""
    start, end = span
    body = text[start:end].rstrip()
    return (start, start + len(body)) if body.endswith(tuple(closing_tokens)) else span


def _assistant_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _unused_word(messages: list[Message]) -> str:
    word = "zqturn"
    while any(word in str(message) for message in messages):
        word += "q"
    return word


def _split_at(text: str, words: list[str]) -> list[str] | None:
    """The parts between the words; None unless each word occurs once and in order."""
    parts = []
    for word in words:
        if text.count(word) != 1:
            return None
        part, text = text.split(word)
        parts.append(part)
    return [*parts, text]


def _head(render: Render, before: list[Message], part: str) -> str:
    """The fixed part before an answer up to the generation prompt's end."""
    without, with_prompt = render(before, False), render(before, True)
    generation_prompt = with_prompt.removeprefix(without)
    end = part.rfind(generation_prompt) if generation_prompt and generation_prompt != with_prompt else -1
    return part if end < 0 else part[: end + len(generation_prompt)]


def _align(full: str, heads: list[str], tail: str, closer: str) -> list[Span] | None:
    """Spans between the fixed parts; each takes with it as much of the next part as `closer` shares with it."""
    if not full.startswith(heads[0]) or not full.endswith(tail):
        return None
    spans = []
    start = len(heads[0])
    for k in range(len(heads)):
        is_last = k + 1 == len(heads)
        following = tail if is_last else heads[k + 1]
        end = len(full) - len(tail) if is_last else full.find(following, start)
        if end < start or not following and not is_last:
            return None
        spans.append((start, end + len(os.path.commonprefix([following, closer]))))
        start = end + len(following)
    return spans
