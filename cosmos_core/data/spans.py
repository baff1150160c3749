"""Spans of characters of the assistant's turns in a rendered conversation, for any chat template.

A span runs from the end of the generation prompt to the end of the token that closes the turn: exactly the text that a
model has to generate. Each of the two methods checks its result against the rendering, and returns None if it fails.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError

from cosmos_core.data.messages import Message, get_turn_texts

Span = tuple[int, int]
RenderFn = Callable[[list[Message], bool], str]
"""Function that renders messages with a chat template, and with the generation prompt if its second argument is True.
It raises TemplateError if the template fails."""
TextBeforeCompletion = tuple[str, str]
"""Text that the chat template writes before a completion, and the end of the generation prompt that this text lacks,
such as `<think>` ("" if it lacks nothing). The rendered completion can begin with the second text."""


def find_spans_by_prefixes(render_fn: RenderFn, messages: list[Message], rendered_text: str) -> list[Span] | None:
    """Return the spans of the assistant's turns in `rendered_text`. For each turn, the messages before it, and the
    messages up to and including it, are rendered. Return None if a rendering is no prefix of `rendered_text`, as for
    templates that render the last turn differently."""
    spans = []
    for i in _find_assistant_turns(messages):
        try:
            text_before_turn = render_fn(messages[:i], True)
            text_through_turn = rendered_text if i + 1 == len(messages) else render_fn(messages[: i + 1], False)
        except TemplateError:  # return None: some templates refuse a part of a conversation, e.g. without a user turn
            return None
        if not (text_through_turn.startswith(text_before_turn) and rendered_text.startswith(text_through_turn)):
            return None
        spans.append((len(text_before_turn), len(text_through_turn)))
    return spans


def find_spans_by_placeholders(
    render_fn: RenderFn, messages: list[Message], rendered_text: str, turn_end_tokens: Sequence[str],
    keeps_reasoning: bool = False,
) -> list[Span] | None:  # fmt: skip
    """Return the spans of the assistant's turns in `rendered_text`; None if this method fails. The conversation is
    rendered with a placeholder in place of the completion of each turn, and the text between the placeholders is
    located in `rendered_text`. A span includes text between generation prompt and completion (think block). With
    `keeps_reasoning`, only the text after the reasoning is replaced, for templates that extract the reasoning."""
    turn_indices = _find_assistant_turns(messages)
    unused_word = make_unused_word(messages)
    placeholders = [f"{unused_word}{turn_number}x" for turn_number in range(len(turn_indices))]
    placeholder_messages = list(messages)
    for i, placeholder in zip(turn_indices, placeholders, strict=True):
        text = "".join("".join(get_turn_texts(messages[i])).rpartition("</think>")[:2]) * keeps_reasoning + placeholder
        is_string = isinstance(messages[i]["content"], str)
        placeholder_messages[i] = {**messages[i], "content": text if is_string else [{"type": "text", "text": text}]}
        placeholder_messages[i].pop("tool_calls", None)  # the placeholder replaces the turn's text and tool calls
    messages_up_to_last_turn = placeholder_messages[: turn_indices[-1] + 1]
    try:
        template_texts = _split_at_words(render_fn(placeholder_messages, False), placeholders)
        texts_up_to_last_turn = _split_at_words(render_fn(messages_up_to_last_turn, False), placeholders)
        if template_texts is None or texts_up_to_last_turn is None:
            return None
        preceding_texts = _find_texts_before_completions(render_fn, placeholder_messages, turn_indices, template_texts)
    except TemplateError:
        return None
    turn_end_texts = [_find_turn_end(text, texts_up_to_last_turn[-1], turn_end_tokens) for text in template_texts[1:]]
    return _locate_completions(rendered_text, preceding_texts, template_texts[-1], turn_end_texts)


def strip_trailing_space(span: Span, text: str, turn_end_tokens: Sequence[str]) -> Span:
    """Return the span of a turn without the whitespace that a template writes after the token that closes the turn."""
    start, end = span
    stripped_span_text = text[start:end].rstrip()
    return (start, start + len(stripped_span_text)) if stripped_span_text.endswith(tuple(turn_end_tokens)) else span


def common_prefix_length(sequence: Sequence[Any], second_sequence: Sequence[Any]) -> int:
    """Return the length of the common prefix of two sequences."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sequence, second_sequence, strict=False)))


def _find_assistant_turns(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def make_unused_word(messages: list[Message]) -> str:
    """Return a word that occurs in none of the messages."""
    word = "zqturn"
    while any(word in str(message) for message in messages):
        word += "q"
    return word


def _split_at_words(text: str, words: list[str]) -> list[str] | None:
    """Split a text at `words` and return the parts; None unless each word occurs exactly once, in the given order."""
    text_parts = []
    for word in words:
        if text.count(word) != 1:
            return None
        text_before_word, text = text.split(word)
        text_parts.append(text_before_word)
    return [*text_parts, text]


def _find_texts_before_completions(
    render_fn: RenderFn, messages: list[Message], turn_indices: list[int], template_texts: list[str]
) -> list[TextBeforeCompletion]:
    """Return the `TextBeforeCompletion` of each completion, the messages at `turn_indices`. `template_texts` are the
    texts that the chat template writes between completions."""
    first_and_last_turn_index = turn_indices[0], turn_indices[-1]
    prompt_of_first, last_prompt = (_find_generation_prompt(render_fn, messages[:i]) for i in first_and_last_turn_index)
    are_prompts_equal, preceding_texts = prompt_of_first == last_prompt, []
    for i, template_text in zip(turn_indices, template_texts, strict=False):
        generation_prompt = prompt_of_first if are_prompts_equal else _find_generation_prompt(render_fn, messages[:i])
        last_turn_text = _get_last_text(messages[:i])
        if generation_prompt is None:
            preceding_texts.append((template_text, ""))
        else:
            preceding_texts.append(_split_at_generation_prompt(template_text, last_turn_text, *generation_prompt))
    return preceding_texts


def _find_generation_prompt(render_fn: RenderFn, preceding_messages: list[Message]) -> tuple[str, str] | None:
    """Return the text that the chat template writes between the last of `preceding_messages` and a completion, in two
    parts: the end of the turn, and the generation prompt. Return None if adding the generation prompt changes the
    rendering of the turns."""
    try:
        text_without_prompt, text_with_prompt = (render_fn(preceding_messages, flag) for flag in (False, True))
    except TemplateError:
        if any(turn["role"] == "user" for turn in preceding_messages):
            raise
        # Templates refuse an empty conversation, and some need a user turn, so add an arbitrary user turn.
        preceding_messages = [*preceding_messages, {"role": "user", "content": make_unused_word(preceding_messages)}]
        text_without_prompt, text_with_prompt = (render_fn(preceding_messages, flag) for flag in (False, True))
    if not text_with_prompt.startswith(text_without_prompt):
        return None
    last_turn_text = _get_last_text(preceding_messages)
    turn_end = text_without_prompt[text_without_prompt.rfind(last_turn_text) + len(last_turn_text) :]
    return turn_end, text_with_prompt[len(text_without_prompt) :]


def _get_last_text(preceding_messages: list[Message]) -> str:
    last_turn_texts = get_turn_texts(preceding_messages[-1]) if preceding_messages else []
    return last_turn_texts[-1].strip() if last_turn_texts else ""


def _split_at_generation_prompt(
    template_text: str, last_turn_text: str, turn_end: str, generation_prompt: str
) -> TextBeforeCompletion:
    """Divide `template_text`, which the chat template writes before a completion. Return the text up to the end of the
    longest prefix of the generation prompt in it, and the rest of the generation prompt, such as `<think>`, which
    templates leave out before a turn without reasoning. The prefix is searched for after `last_turn_text`, the text of
    the preceding turn, and `turn_end`, with which the template ends that turn."""
    complete_prompt_text = last_turn_text + turn_end + generation_prompt
    if complete_prompt_text in template_text:
        return template_text[: template_text.rfind(complete_prompt_text) + len(complete_prompt_text)], ""
    # Search for the generation prompt only after the user's text, because a user may have written the same characters.
    preceding_text = next((text for text in (last_turn_text + turn_end, last_turn_text) if text in template_text), None)
    if preceding_text is None or not generation_prompt:
        return template_text, ""
    search_start = template_text.rfind(preceding_text) + len(preceding_text) if preceding_text else 0
    for prefix_length in range(len(generation_prompt), 0, -1):
        prefix_position = template_text.rfind(generation_prompt[:prefix_length], search_start)
        # Without a preceding text, a part of the generation prompt may match anywhere by chance: accept only the whole
        # generation prompt, or a beginning of it at the end of the text.
        if prefix_position >= 0 and (
            preceding_text
            or prefix_length == len(generation_prompt)
            or template_text.endswith(generation_prompt[:prefix_length])
        ):
            return template_text[: prefix_position + prefix_length], generation_prompt[prefix_length:]
    return template_text, ""


def _find_turn_end(text_after_completion: str, text_after_last_completion: str, turn_end_tokens: Sequence[str]) -> str:
    """Return the text that ends a turn in the rendering: the common prefix of the texts that the chat template writes
    after a completion and after the last completion, up to the end of one of `turn_end_tokens`. For the texts
    `<|end|><|user|>` and `<|end|><|endoftext|>` it is `<|end|>`."""
    common_text = text_after_completion[: common_prefix_length(text_after_completion, text_after_last_completion)]
    token_ends = [common_text.rfind(token) + len(token) for token in turn_end_tokens if token in common_text]
    return common_text[: max(token_ends)] if token_ends else common_text


def _locate_completions(
    rendered_text: str, preceding_texts: list[TextBeforeCompletion], final_text: str, turn_end_texts: list[str]
) -> list[Span] | None:
    """Return the span of each completion in `rendered_text`, including the end of its turn. The completions are located
    by the texts that the chat template writes before them, and after the last one (`final_text`). Return None if these
    texts do not occur in `rendered_text`, or if several locations are possible."""
    (text_before_first, _), *texts_before_later_turns = preceding_texts
    texts_between = [text for text, _ in texts_before_later_turns]
    search_start, search_end = len(text_before_first), len(rendered_text) - len(final_text)
    if not (rendered_text.startswith(text_before_first) and rendered_text.endswith(final_text) and all(texts_between)):
        return None
    search_text = rendered_text[:search_end]
    completion_ends = _find_earliest_occurrences(search_text, texts_between, search_start)
    # Refuse ambiguous spans: a turn may quote the text, with control tokens, that the template writes between turns.
    if completion_ends is None or completion_ends != _find_latest_occurrences(search_text, texts_between, search_start):
        return None
    spans = []
    span_start = search_start
    for (_, remaining_prompt), next_text, completion_end, turn_end in zip(
        preceding_texts, [*texts_between, ""], [*completion_ends, search_end], turn_end_texts, strict=True
    ):
        span_start += len(remaining_prompt) * rendered_text.startswith(remaining_prompt, span_start, completion_end)
        spans.append((span_start, completion_end + len(turn_end)))
        span_start = completion_end + len(next_text)
    return spans


def _find_earliest_occurrences(text: str, substrings: list[str], search_start: int) -> list[int] | None:
    """Return the positions of `substrings` in a text, in order, each as early as possible; None if one is missing."""
    positions = []
    for substring in substrings:
        positions.append(text.find(substring, search_start))
        search_start = positions[-1] + len(substring)
        if positions[-1] < 0:
            return None
    return positions


def _find_latest_occurrences(text: str, substrings: list[str], search_start: int) -> list[int]:
    """Return the positions of `substrings` in a text, in order, each as late as possible; all must occur."""
    positions: list[int] = []
    for substring in reversed(substrings):
        positions.insert(0, text.rfind(substring, search_start, positions[0] if positions else len(text)))
    return positions
