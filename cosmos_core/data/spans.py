"""Where the assistant speaks in a rendered conversation, for any chat template, as spans of characters.

A span runs from the end of the generation prompt to the end of the token that closes the turn: exactly what a model
has to write. Two methods, each proven against the rendering before it is believed; `None` says "not this way".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jinja2.exceptions import TemplateError

from cosmos_core.data.messages import Message, texts_of

Span = tuple[int, int]
Render = Callable[[list[Message], bool], str]
"""Messages, and whether to add the generation prompt, to text; raises TemplateError."""
Head = tuple[str, str]
"""A fixed part up to where the model goes on, and what it lacks of the generation prompt: the completion may have it"""


def prefix_spans(render: Render, messages: list[Message], full: str) -> list[Span] | None:
    """Render the conversation up to and through each assistant turn; each must be a beginning of the whole.

    Not so for templates that treat the last turn in another way, e.g. remove think blocks of the earlier ones.
    """
    spans = []
    for i in _assistant_turns(messages):
        try:
            before, through = render(messages[:i], True), render(messages[: i + 1], False)
        except TemplateError:  # some templates refuse a beginning, e.g. one without a user turn
            return None
        if not (through.startswith(before) and full.startswith(through)):
            return None
        spans.append((len(before), len(through)))
    return spans


def skeleton_spans(
    render: Render, messages: list[Message], full: str, closing_tokens: Sequence[str]
) -> list[Span] | None:
    """Render with a unique word instead of each completion, and find the parts that stayed the same in the whole.

    What the template puts between the generation prompt and a completion (an empty think block) counts as completion.
    """
    turns = _assistant_turns(messages)
    unused = _unused_word(messages)
    words = [f"{unused}{k}x" for k in range(len(turns))]
    hollow = list(messages)
    for i, word in zip(turns, words, strict=True):
        is_text = isinstance(messages[i]["content"], str)
        hollow[i] = {**messages[i], "content": word if is_text else [{"type": "text", "text": word}]}
        hollow[i].pop("tool_calls", None)  # which the model has to write: they are no fixed part
    try:
        fixed = _split_at(render(hollow, False), words)
        ending = _split_at(render(hollow[: turns[-1] + 1], False), words)
        if fixed is None or ending is None:
            return None
        heads = _heads(render, hollow, turns, fixed)
    except TemplateError:
        return None
    closers = [_closer(part, ending[-1], closing_tokens) for part in fixed[1:]]
    return _align(full, heads, fixed[-1], closers)


def trimmed(span: Span, text: str, closing_tokens: Sequence[str]) -> Span:
    """Return the span without the blanks that a template writes after the token that closes the turn."""
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
    """Return the parts between the words; None unless each word occurs once and in order."""
    parts = []
    for word in words:
        if text.count(word) != 1:
            return None
        part, text = text.split(word)
        parts.append(part)
    return [*parts, text]


def _heads(render: Render, messages: list[Message], turns: list[int], fixed: list[str]) -> list[Head]:
    """Return the fixed parts before the completions."""
    first, last = (_invitation(render, messages[:i]) for i in (turns[0], turns[-1]))
    heads = []
    for number, i in enumerate(turns):
        invitation = first if first == last else _invitation(render, messages[:i])
        asked = _last_words(messages[max(0, i - 1) : i])
        heads.append(_head(fixed[number], asked, *invitation) if invitation else (fixed[number], ""))
    return heads


def _invitation(render: Render, before: list[Message]) -> tuple[str, str] | None:
    """Return what the template writes behind the last words before a completion.

    These are the end of their turn, and the generation prompt; None: it writes the turns in another way when it asks.
    """
    try:
        without, with_prompt = render(before, False), render(before, True)
    except TemplateError:
        if any(turn["role"] == "user" for turn in before):
            raise
        # No template renders nothing, and some want a question: the prompt is the one that follows any question.
        before = [*before, {"role": "user", "content": _unused_word(before)}]
        without, with_prompt = render(before, False), render(before, True)
    if not with_prompt.startswith(without):
        return None
    asked = _last_words(before)
    return without[without.rfind(asked) + len(asked) :], with_prompt[len(without) :]


def _last_words(before: list[Message]) -> str:
    return texts_of(before[-1])[-1].strip() if before and texts_of(before[-1]) else ""


def _head(part: str, asked: str, closing: str, prompt: str) -> Head:
    """Return the fixed part up to the end of the generation prompt, or of as much of it as is there.

    A template that asks with `<think>` and renders a completion without thoughts keeps a beginning of the prompt only.
    """
    invitation = asked + closing + prompt
    if invitation in part:
        return part[: part.rfind(invitation) + len(invitation)], ""
    # Never look for the prompt in what the user says, nor for what the user says ("a") in the prompt.
    said = next((words for words in (asked + closing, asked) if words in part), None)
    if said is None or not prompt:
        return part, ""
    body = part.rfind(said) + len(said) if said else 0
    for length in range(len(prompt), 0, -1):
        found = part.rfind(prompt[:length], body)
        # Where nothing was said before, a short beginning may be anything.
        if found >= 0 and (said or length == len(prompt) or part.endswith(prompt[:length])):
            return part[: found + length], prompt[length:]
    return part, ""


def _closer(part: str, ending: str, closing_tokens: Sequence[str]) -> str:
    """Return the beginning of the part after a completion that closes the turn.

    It is what the part shares with the last turn's ending, and stops after a whole token: `<|end|><|user|>` shares
    `<|end|><|` with `<|end|><|endoftext|>`.
    """
    shared = next(
        (i for i, (a, b) in enumerate(zip(part, ending, strict=False)) if a != b), min(len(part), len(ending))
    )
    ends = [part.rfind(token, 0, shared) + len(token) for token in closing_tokens if token in part[:shared]]
    return part[: max(ends)] if ends else part[:shared]


def _align(full: str, heads: list[Head], tail: str, closers: list[str]) -> list[Span] | None:
    """Return spans between the fixed parts, each with what closes its turn; None: there is more than one way."""
    parts = [part for part, _ in heads]
    first, last = len(parts[0]), len(full) - len(tail)
    if not full.startswith(parts[0]) or not full.endswith(tail) or "" in parts[1:]:
        return None
    stops = _leftmost(full[:last], parts[1:], first)
    # A turn that quotes the text between two turns, control tokens included, has a second match.
    if stops is None or stops != _rightmost(full[:last], parts[1:], first):
        return None
    spans = []
    begin = first
    for (_, rest), following, end, closer in zip(heads, [*parts[1:], ""], [*stops, last], closers, strict=True):
        begin += len(rest) * full.startswith(rest, begin, end)
        spans.append((begin, end + len(closer)))
        begin = end + len(following)
    return spans


def _leftmost(text: str, parts: list[str], start: int) -> list[int] | None:
    """Return where the parts stand one after another, each as early as possible."""
    found = []
    for part in parts:
        found.append(text.find(part, start))
        start = found[-1] + len(part)
        if found[-1] < 0:
            return None
    return found


def _rightmost(text: str, parts: list[str], start: int) -> list[int]:
    """Return where the parts stand one after another, each as late as possible; they are known to be there."""
    found: list[int] = []
    for part in reversed(parts):
        found.insert(0, text.rfind(part, start, found[0] if found else len(text)))
    return found
